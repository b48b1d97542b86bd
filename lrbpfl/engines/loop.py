"""The round loop, written once: server -> messages -> replies -> server."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Info, Task, Update
from lrbpfl.engines.work import Evaluated, Setup, Trained, check_setup, dropout_seeded, granted, one_thread
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from lrbpfl.states import States
from lrbpfl.trees import Tree


class Reply(NamedTuple):
    """A client's answer to a message: an update, or the reason why there is none."""

    client_id: int
    update: Update | None
    info: Info
    seconds: float
    failure: str | None = None
    deaths: tuple[str, ...] = ()  # what went wrong before it went well

    @classmethod
    def of(cls, k: int, trained: Trained, deaths: tuple[str, ...] = ()) -> "Reply":
        """The reply of a client whose update went well, at last."""
        update = Update(client_id=k, num_examples=trained.examples, upload=trained.upload)
        return cls(client_id=k, update=update, info=trained.info, seconds=trained.seconds, deaths=deaths)

    @classmethod
    def failed(cls, k: int, reason: BaseException | str, deaths: tuple[str, ...] = ()) -> "Reply":
        """The reply of a client that raised, or whose process died."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        return cls(client_id=k, update=None, info={}, seconds=0.0, failure=" ".join(text.split()), deaths=deaths)


class Evaluation(NamedTuple):
    """One client's evaluation, or the reason why there is none."""

    client_id: int
    result: Evaluated | None
    failure: str | None = None


class Engine(Protocol):
    """A map over clients. It owns processes, devices and data; what clients keep between rounds is in a store."""

    setup: Setup  # granted
    states: States

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """Run round t at the clients; replies come in the order of the messages, whichever is ready first."""

    def accept(self, k: int) -> None:
        """The server took client k's upload of this round: the client keeps the state that came with it."""

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """Judge the clients' own models, in the order of the messages."""

    def close(self) -> None:
        """Let processes and memory go."""


class Round(NamedTuple):
    """What happened in round t, and the server after it."""

    t: int
    server: Tree
    cohort: list[int]
    accepted: list[int]
    infos: dict[int, Info]  # of the accepted clients
    failures: dict[int, str]  # clients without an upload, or with one that was refused, and why
    retried: dict[int, str]  # clients that were run again, and why
    bytes_down: int
    bytes_up: int
    seconds: float
    evaluations: dict[int, Evaluation]  # empty in rounds without evaluation


# What is going on ("update" or "evaluate"), the round, the client just done, and of how many.
Observer = Callable[[str, int, int, int], None]


def federate(
    engine: Engine,
    *,
    rounds: int,
    cohort: int,
    evaluate_every: int = 0,
    start: tuple[int, Tree] | None = None,
    observe: Observer = lambda what, t, k, of: None,
) -> Iterator[Round]:
    """Yield what happened after each of the rounds, from round `start` (t, server) on.

    All clients are evaluated every `evaluate_every` rounds and after the last one; new clients, with ids from
    `task.num_clients` on, are in no cohort and evaluated after the last round only. A client without a valid upload
    takes no part in the round; a round without any leaves the server as it is.
    """
    algorithm, task, clients, seed, *_ = engine.setup
    training = engine.setup.training
    if not 1 <= cohort <= len(training):
        raise BadInput(f"a cohort of {cohort} cannot be drawn from {len(training)} clients")
    check_setup(engine.setup)
    if granted(engine.setup) is not engine.setup:
        raise TypeError(f"{type(engine).__name__} runs a setup with open wishes: engines run granted(setup)")
    first, server = start or (0, algorithm.init_server(task, generator(seed, "server")))
    for t in range(first, rounds):
        began = time.perf_counter()
        messages = _messages(algorithm, task, server, sample_clients(len(training), cohort, seed, t))
        ledger = _Ledger(engine, messages, t, observe)
        accepted = ledger.accepted()
        some = next(accepted, None)
        if some is not None:
            with one_thread(), dropout_seeded(seed, t, "server", device=engine.setup.device):
                updates = chain([some], accepted)
                server = algorithm.server_aggregate(task, server, updates, generator(seed, "aggregate", t))
        elif t == 0:
            ledger.check_code()
        last = t + 1 == rounds
        evaluations: dict[int, Evaluation] = {}
        if last or (evaluate_every and (t + 1) % evaluate_every == 0):
            judged = range(len(clients)) if last else training
            for evaluation in engine.evaluate(_messages(algorithm, task, server, judged), t):
                observe("evaluate", t, evaluation.client_id, len(judged))
                evaluations[evaluation.client_id] = evaluation
        yield Round(
            t=t,
            server=server,
            cohort=list(messages),
            accepted=list(ledger.infos),
            infos=ledger.infos,
            failures=ledger.failures,
            retried=ledger.retried,
            bytes_down=sum(map(trees.nbytes, messages.values())),
            bytes_up=ledger.bytes_up,
            seconds=time.perf_counter() - began,
            evaluations=evaluations,
        )


def sample_clients(clients: int, cohort: int, seed: int, t: int) -> list[int]:
    """The clients of round t, drawn without replacement, in rising order."""
    return sorted(torch.randperm(clients, generator=generator(seed, "cohort", t))[:cohort].tolist())


def _messages(algorithm: Algorithm, task: Task, server: Tree, ids: Iterable[int]) -> dict[int, Tree]:
    return {k: algorithm.broadcast(task, server, k) for k in ids}


class _Ledger:
    """Who delivered in one round and who did not, while the updates pass by on their way to the aggregate."""

    def __init__(self, engine: Engine, messages: Mapping[int, Tree], t: int, observe: Observer) -> None:
        self.engine, self.messages, self.t, self.observe = engine, messages, t, observe
        self.infos: dict[int, Info] = {}
        self.failures: dict[int, str] = {}
        self.retried: dict[int, str] = {}
        self.raised: list[int] = []  # clients whose own code raised something
        self.bytes_up = 0

    def accepted(self) -> Iterator[Update]:
        """The updates fit to be averaged: of the message's structure and finite; the others are named in `failures`."""
        for reply in self.engine.update(self.messages, self.t):
            k = reply.client_id
            self.observe("update", self.t, k, len(self.messages))
            if reply.deaths:
                self.retried[k] = reply.deaths[-1]
            if reply.update is None:
                self.failures[k] = reply.failure or "no upload"
                if not reply.deaths:
                    self.raised.append(k)
                continue
            self.bytes_up += trees.nbytes(reply.update.upload)
            fault = trees.fault(reply.update.upload, self.messages[k])
            if fault:
                self.failures[k] = f"upload refused: {fault}"
                continue
            self.engine.accept(k)
            self.infos[k] = reply.info
            yield reply.update

    def check_code(self) -> None:
        """Refuse to go on if what every client runs raises: further rounds would do nothing either.

        One client alone, where there are more, proves nothing.
        """
        if len(self.raised) == len(self.messages) >= min(2, len(self.engine.setup.training)):
            k = self.raised[0]
            raise BadInput(
                f"every client of round {self.t} failed ({len(self.raised)} of {len(self.messages)}), "
                f"the first, {self.engine.setup.names[k]!r}, with {self.failures[k]}"
            )
