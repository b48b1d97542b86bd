"""The round loop, written once: server -> messages -> replies -> server."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Info, Task, Update
from lrbpfl.engines import intake as taking
from lrbpfl.engines.conduct import told
from lrbpfl.engines.intake import PLAIN, Intake
from lrbpfl.engines.robust import prepared
from lrbpfl.engines.work import Evaluated, Setup, Trained, check_setup, dropout_seeded, granted, one_thread
from lrbpfl.errors import BadInput, plain
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
        text = plain(reason) if isinstance(reason, str) else told(reason)
        return cls(client_id=k, update=None, info={}, seconds=0.0, failure=text, deaths=deaths)


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
        """The server took client k's upload of this round: the client keeps the state that came with it.

        That is known when all replies are there and averaged, and never of some clients in a round that was undone.
        """

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
    unjudged: dict[int, str]  # clients that should have been judged and could not be, and why
    evaluations: dict[int, Evaluation]  # empty in rounds without evaluation, and where somebody else takes them
    undone: str | None = None  # why nothing of this round was kept, should the server's next state have been unfit

    @property
    def mean_loss(self) -> float | None:
        """Over the clients whose algorithm tells one."""
        losses = [info["loss"] for info in self.infos.values() if "loss" in info]
        return sum(losses) / len(losses) if losses else None


# What is going on ("update" or "evaluate"), the round, the client just done, and of how many.
Observer = Callable[[str, int, int, int], None]
# Of a round and the server after it: what takes each evaluation as it comes, so that nobody has to keep them all.
Judging = Callable[[int, Tree], Callable[[Evaluation], None]]

BLOCK = 256  # clients whose messages and evaluations are at hand at a time


def federate(
    engine: Engine,
    *,
    rounds: int,
    cohort: int,
    evaluate_every: int = 0,
    judged: int | None = None,
    judged_last: int | None = None,
    intake: Intake = PLAIN,
    start: tuple[int, Tree] | None = None,
    observe: Observer = lambda what, t, k, of: None,
    judging: Judging | None = None,
) -> Iterator[Round]:
    """Yield what happened after each of the rounds, from round `start` (t, server) on.

    Clients are evaluated every `evaluate_every` rounds, so many as `judged` says, and after the last one, so many as
    `judged_last` says (None: all); always the same ones. New clients, with ids from `task.num_clients` on, are in no
    cohort and evaluated after the last round only. A client without a valid upload takes no part in the round; a round
    without any leaves the server as it is. The uploads of a round are gathered and judged side by side (memory for a
    cohort of them), and counted all together or, where the server's next state would be unfit, not at all.
    """
    setup = engine.setup
    algorithm, task, seed = setup.algorithm, setup.task, setup.seed
    training = engine.setup.training
    if not 1 <= cohort <= len(training):
        raise BadInput(f"a cohort of {cohort} cannot be drawn from {len(training)} clients")
    taking.check_intake(intake)
    check_setup(engine.setup)
    if granted(engine.setup) is not engine.setup:
        raise TypeError(f"{type(engine).__name__} runs a setup with open wishes: engines run granted(setup)")
    first, server = start or (0, algorithm.init_server(task, generator(seed, "server")))
    for t in range(first, rounds):
        began = time.perf_counter()
        messages = _messages(algorithm, task, server, sample_clients(len(training), cohort, seed, t))
        ledger = _Ledger(engine, messages, t, observe)
        updates, undone = ledger.gather(intake), None
        if updates:
            server, undone = _step(engine.setup, server, messages, updates, intake, t)
            ledger.settle(undone)
        elif t == 0:
            ledger.check_code()
        last = t + 1 == rounds
        evaluations: dict[int, Evaluation] = {}
        unjudged: dict[int, str] = {}
        if last or (evaluate_every and (t + 1) % evaluate_every == 0):
            ids = judged_clients(engine.setup, judged_last if last else judged, new=last)
            take = judging(t, server) if judging else None
            for evaluation in _evaluated(engine, server, ids, t):
                observe("evaluate", t, evaluation.client_id, len(ids))
                if evaluation.result is None:
                    unjudged[evaluation.client_id] = evaluation.failure or "no result"
                if take:
                    take(evaluation)
                else:
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
            unjudged=unjudged,
            evaluations=evaluations,
            undone=undone,
        )


def sample_clients(clients: int, cohort: int, seed: int, t: int) -> list[int]:
    """The clients of round t, drawn without replacement, in rising order."""
    return sorted(torch.randperm(clients, generator=generator(seed, "cohort", t))[:cohort].tolist())


def judged_clients(setup: Setup, number: int | None, *, new: bool) -> Sequence[int]:
    """So many of the training clients (None: all), the same ones whenever they are asked for, and new ones, if any."""
    training, everybody = setup.training, range(len(setup.clients))
    if number is None or number >= len(training):
        return everybody if new else training
    order = torch.randperm(len(training), generator=generator(setup.seed, "judged"))
    return [*sorted(order[:number].tolist()), *(everybody[len(training) :] if new else ())]


def _evaluated(engine: Engine, server: Tree, ids: Sequence[int], t: int) -> Iterator[Evaluation]:
    """The evaluations of these clients, in their order; messages are made for some at a time."""
    algorithm, task = engine.setup.algorithm, engine.setup.task
    for first in range(0, len(ids), BLOCK):
        yield from engine.evaluate(_messages(algorithm, task, server, ids[first : first + BLOCK]), t)


def _messages(algorithm: Algorithm, task: Task, server: Tree, ids: Iterable[int]) -> dict[int, Tree]:
    return {k: algorithm.broadcast(task, server, k) for k in ids}


def _step(
    setup: Setup, server: Tree, messages: Mapping[int, Tree], updates: list[Update], intake: Intake, t: int
) -> tuple[Tree, str | None]:
    """The server after round t; or as it was, and why it did not move."""
    algorithm, task, seed = setup.algorithm, setup.task, setup.seed
    try:
        with one_thread(), dropout_seeded(seed, t, "server", device=setup.device):
            ready = prepared(intake, algorithm, task, server, updates, messages, generator(seed, "privacy", t))
            moved = algorithm.server_aggregate(task, server, iter(ready), generator(seed, "aggregate", t))
        fault = trees.fault(moved, server)
    except BadInput:
        raise
    except Exception as error:  # what uploads can make an aggregate raise must not end the run
        return server, f"the aggregate failed: {told(error)}"
    return (server, f"the server's next state is unfit: {fault}") if fault else (moved, None)


class _Ledger:
    """Who delivered in one round and who did not."""

    def __init__(self, engine: Engine, messages: Mapping[int, Tree], t: int, observe: Observer) -> None:
        self.engine, self.messages, self.t, self.observe = engine, messages, t, observe
        self.infos: dict[int, Info] = {}
        self.failures: dict[int, str] = {}
        self.retried: dict[int, str] = {}
        self.raised: list[int] = []  # clients whose own code raised something
        self.bytes_up = 0

    def gather(self, intake: Intake) -> list[Update]:
        """The updates fit to be averaged; clients without one, or with one that is refused, are named in `failures`."""
        fit = [update for reply in self.engine.update(self.messages, self.t) if (update := self._fit(reply))]
        algorithm, task = self.engine.setup.algorithm, self.engine.setup.task
        # With noise, who is refused must not depend on others: a clipped move of one client is all that it can change.
        farthest = 0.0 if intake.noise else intake.farthest
        with one_thread():
            faults = taking.faults(algorithm, task, fit, self.messages, farthest)
        for k, fault in faults.items():
            self.failures[k] = plain(f"upload refused: {fault}")
            del self.infos[k]
        return [update for update in fit if update.client_id not in faults]

    def _fit(self, reply: Reply) -> Update | None:
        """A client's update, of the message's structure and finite."""
        k = reply.client_id
        self.observe("update", self.t, k, len(self.messages))
        if reply.deaths:
            self.retried[k] = reply.deaths[-1]
        if reply.update is None:
            self.failures[k] = reply.failure or "no upload"
            if not reply.deaths:
                self.raised.append(k)
            return None
        self.bytes_up += trees.nbytes(reply.update.upload)
        fault = trees.fault(reply.update.upload, self.messages[k])
        if fault:
            self.failures[k] = plain(f"upload refused: {fault}")
            return None
        self.infos[k] = reply.info
        return reply.update

    def settle(self, undone: str | None) -> None:
        """Clients whose uploads were counted keep what they learned; in a round that was undone, nobody does."""
        if undone:
            self.infos = {}
        for k in self.infos:
            self.engine.accept(k)

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
