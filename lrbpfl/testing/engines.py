"""The promises of an engine: the serial engine's bits, the messages' order, and a run that outlives its clients."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.plain import PersonalNetwork
from lrbpfl.algorithms.protocol import STRICT, Info, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params
from lrbpfl.engines.loop import Engine, Evaluation, Round, federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.slots import to_tensors
from lrbpfl.engines.work import Setup
from lrbpfl.states import Memory, States
from lrbpfl.testing.form import expect
from lrbpfl.testing.toy import make_setup, make_toy
from lrbpfl.trees import Tree

FRAIL = 1  # the client that fails where one has to
MARK = 3.0  # what the frail client's first feature always is
REASON = "this client fails on purpose"
PLAIN = FedAvg(local_steps=3)
ODD: Any = {"half": np.float32(0.5), "two": torch.tensor(2.0), "word": "3", "none": None, "huge": 10**400, 7: True}


class Kept(NamedTuple):
    """What a client keeps."""

    bias: Tensor  # (classes,) the sum of the last layer's in its rounds


@dataclass(frozen=True, config=STRICT)
class Frail:
    """FedAvg with clients that lean towards what they saw, and one that may fail."""

    update: str = "well"  # how the frail client's update goes: well, raise, exit, nan, change, dice, or odd
    prediction: str = "well"  # and its prediction: well, or raise

    def init_server(self, task: Task, rng: Generator) -> Params:
        """FedAvg's."""
        return PLAIN.init_server(task, rng)

    def init_client(self, task: Task, rng: Generator) -> Kept:
        """Nothing seen yet."""
        return Kept(bias=torch.zeros(task.num_classes))

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        """Everybody gets the network."""
        return server

    def client_update(
        self, task: Task, message: Params, client: Kept, data: Data, rng: Generator
    ) -> tuple[Params, Kept, Info]:
        """FedAvg's, and what happens to the frail client."""
        w, _, info = PLAIN.client_update(task, message, None, data, rng)
        kept = Kept(bias=client.bias + w["fc2.bias"])
        way = self.update if _is_frail(data.x) else "well"
        if way in ("raise", "exit"):
            raise LookupError(REASON) if way == "raise" else SystemExit(REASON)
        if way == "nan":
            w = trees.tree_map(lambda leaf: leaf * torch.nan, w)
        if way == "dice":
            w = trees.tree_map(lambda leaf: leaf + torch.rand(()) + float(np.random.rand()) + random.random(), w)
        if way == "change":
            trees.tree_map(torch.Tensor.zero_, (message, client, data))
        return w, kept, ODD if way == "odd" else info

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        """FedAvg's."""
        return PLAIN.server_aggregate(task, server, updates, rng)

    def personalise(self, task: Task, message: Params, client: Kept, data: Data, rng: Generator) -> PersonalNetwork:
        """FedAvg's, leaning."""
        own = PLAIN.personalise(task, message, None, data, rng)
        return own._replace(log_prior=own.log_prior + client.bias)

    def predict(self, task: Task, personal: PersonalNetwork, x: Tensor, rng: Generator) -> Tensor:
        """FedAvg's, unless the client is frail."""
        if _is_frail(x) and self.prediction == "raise":
            raise LookupError(REASON)
        return PLAIN.predict(task, personal, x, rng)


def _is_frail(x: Tensor) -> bool:
    return bool((x[:, 0] == MARK).all())


def frail_setup(algorithm: Frail) -> Setup:
    """Four clients of the toy, of which the last is new."""
    toy = make_toy(label_prior=0.5)
    for part in (toy.train, toy.test):
        part[FRAIL].x[:, 0] = MARK
    return make_setup(algorithm, toy._replace(task=toy.task._replace(num_clients=3)))


Make = Callable[[Setup, States], Engine]


def check_engine(make: Make) -> None:
    """Run a few small federations; AssertionError says in a sentence which promise is broken.

    `make` is given a setup and the store of what clients keep.
    """
    with _blamed():
        _order(make)
        _same_bits(make)
        _failures(make)
        _manners(make)


@contextmanager
def _blamed() -> Iterator[None]:
    try:
        yield
    except AssertionError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # whatever somebody's engine raises
        raise AssertionError(f"the engine fails in a small run: {type(error).__name__}: {error}") from error


def _run(make: Make, setup: Setup) -> tuple[list[Round], dict[int, Tree]]:
    states = Memory()
    with closing(make(setup, states)) as engine:
        return list(federate(engine, rounds=3, cohort=2, evaluate_every=2)), states.kept


def _same_bits(make: Make) -> None:
    """What servers, clients and evaluations come to is what they come to in the serial engine."""
    setup = frail_setup(Frail())
    expected, states = _run(Serial, setup)
    found, states_too = _run(make, setup)
    for ended, other in zip(found, expected, strict=True):
        expect(trees.equal(ended.server, other.server), f"the server after round {other.t} is not the serial engine's")
        told = f"the evaluations after round {other.t} are not the serial engine's"
        expect(_same_evaluations(ended, other), told)
    expect(same_rounds(found, expected), "cohorts, infos or bytes of the rounds are not the serial engine's")
    expect(states_too.keys() == states.keys(), f"states are kept of the clients {list(states_too)}, not {list(states)}")
    expect(trees.equal(states_too, states), "what clients keep is not what they keep in the serial engine")


def _order(make: Make) -> None:
    """Replies and evaluations come in the order of the messages, and a state is kept once it is accepted."""
    setup, states = frail_setup(Frail()), Memory()
    with closing(make(setup, states)) as engine:
        message = setup.algorithm.init_server(engine.setup.task, torch.Generator().manual_seed(0))
        messages = dict.fromkeys((2, 0, 1), message)
        ids = [reply.client_id for reply in engine.update(messages, 0)]
        expect(ids == list(messages), f"replies come from the clients {ids}, messages went to {list(messages)}")
        expect(not states.kept, "a state is kept of a client whose upload nobody accepted")
        engine.accept(0)
        kept = list(states.kept)
        expect(kept == [0], f"when client 0's upload is accepted, states are kept of the clients {kept}")
        ids = [evaluation.client_id for evaluation in engine.evaluate(messages, 0)]
        expect(ids == list(messages), f"evaluations come from the clients {ids}, messages went to {list(messages)}")


def _failures(make: Make) -> None:
    """A client that raises, or whose upload is refused, is skipped; the others are not."""
    for way in ("raise", "exit", "nan"):
        setup = frail_setup(Frail(update=way, prediction="raise"))
        expected, states = _run(Serial, setup)
        found, states_too = _run(make, setup)
        for ended, other in zip(found, expected, strict=True):
            told = f"with a client whose update ends in {way!r}, round {other.t}"
            fine = ended.failures.keys() == other.failures.keys()
            expect(fine, f"{told} names {list(ended.failures)} as failed, not {list(other.failures)}")
            expect(ended.accepted == other.accepted, f"{told} accepts {ended.accepted}, not {other.accepted}")
            expect(trees.equal(ended.server, other.server), f"{told} gives another server than the serial engine")
        reasons = [reason for ended in found for reason in ended.failures.values()]
        fine = way == "nan" or all(REASON in reason for reason in reasons)
        expect(fine, f"what a client raised is lost: its failure is told as {reasons}")
        expect(trees.equal(states_too, states), f"what clients keep is wrong when an update ends in {way!r}")
        _failed_evaluation(found[-1])


def _manners(make: Make) -> None:
    """What a client changes in place is its own copy, its dice are its own, and its info becomes numbers or gaps."""
    for way, told in (
        ("change", "a client changes in place what it was given, and others or later rounds see it"),
        (
            "dice",
            "a client draws from torch's, NumPy's or Python's own generators, and gets other numbers than serially",
        ),
        ("odd", "a client's info holds what is no float, and does not come out as in the serial engine"),
    ):
        honest = "well" if way == "change" else way
        expected, states = _run(Serial, frail_setup(Frail(update=honest)))
        found, states_too = _run(make, frail_setup(Frail(update=way)))
        expect(same_rounds(found, expected) and trees.equal(states_too, states), told)


def _failed_evaluation(last: Round) -> None:
    for k, evaluation in last.evaluations.items():
        if k == FRAIL:
            told = evaluation.result is None and REASON in (evaluation.failure or "")
            expect(told, f"a client whose prediction raised is evaluated as {evaluation.failure!r}")
        else:
            expect(evaluation.result is not None, f"client {k} has no evaluation, though only {FRAIL} raised")


def same_rounds(some: list[Round], others: list[Round]) -> bool:
    """Whether two runs went the same way, bit for bit, whatever time they took."""
    return len(some) == len(others) and all(map(_same_round, some, others))


def _same_round(a: Round, b: Round) -> bool:
    told = (a.t, a.cohort, a.accepted, a.failures, a.undone, repr(a.infos), a.bytes_down, a.bytes_up)
    told_too = (b.t, b.cohort, b.accepted, b.failures, b.undone, repr(b.infos), b.bytes_down, b.bytes_up)
    return told == told_too and trees.equal(a.server, b.server) and _same_evaluations(a, b)


def _same_evaluations(a: Round, b: Round) -> bool:
    pairs = map(_same_evaluation, a.evaluations.values(), b.evaluations.values())
    return list(a.evaluations) == list(b.evaluations) and all(pairs)


def _same_evaluation(a: Evaluation, b: Evaluation) -> bool:
    if a.result is None or b.result is None:
        return a == b
    return (
        a.result.shared == b.result.shared
        and trees.equal(a.result.personal, b.result.personal)
        and trees.equal(to_tensors(a.result.predictions), to_tensors(b.result.predictions))
        and trees.equal(to_tensors(a.result.calibration), to_tensors(b.result.calibration))
    )
