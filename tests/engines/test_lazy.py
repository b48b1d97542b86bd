"""Clients that are loaded when they are needed, and only then."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedbe import FedBE
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.engines import public
from lrbpfl.engines.lazy import OVERHEAD, Roster
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Setup, check_setup, granted
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from tests.engines.fakes import same_rounds

NAMES = [f"site-{k}" for k in range(8)]
SIZE = OVERHEAD + (10 + 2) * (4 * 4 + 8)  # bytes of a client of 10 and 2 examples


def make(k: int) -> ClientData:
    """A client of 10 training examples with 4 features."""

    def part(n: int) -> Data:
        rng = generator(0, "lazy", k, n)
        return Data(torch.randn(n, 4, generator=rng), torch.arange(n) % 2)

    return ClientData(name=NAMES[k], train=part(10), test=part(2))


def load(log: Path, k: int, bad: int = 5) -> ClientData:
    """The same, and a line in a log; one client has a label too many."""
    with log.open("a") as file:
        file.write(f"{k}\n")
    client = make(k)
    return client._replace(test=Data(client.test.x, client.test.y + 1)) if k == bad else client


def loaded(log: Path) -> list[int]:
    """Who was loaded, in order, since the last time."""
    found = [int(line) for line in log.read_text().split()] if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def setup(clients: Sequence[ClientData], algorithm: FedAvg | FedBE | None = None) -> Setup:
    return Setup(algorithm or FedAvg(local_steps=2), Task(nn.Linear(4, 2), 2), clients, seed=0)


def test_the_most_recently_used_stay_in_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    roster = Roster(NAMES, partial(load, log), cached=2 * SIZE)
    assert len(roster) == 8 and loaded(log) == []
    for k in (0, 1, 0, 2, 0, 1, -1):
        assert roster[k].name == NAMES[k]
    assert loaded(log) == [0, 1, 2, 1, 7]
    assert [client.name for client in roster] == NAMES and [client.name for client in roster[2:4]] == NAMES[2:4]
    with pytest.raises(IndexError):
        roster[8]
    loaded(log)
    large = Roster(NAMES, partial(load, log), cached=SIZE - 1)
    assert large[0].name == large[0].name and loaded(log) == [0, 0]


def test_what_travels_is_how_to_load_and_not_what_was_loaded(tmp_path: Path) -> None:
    roster = Roster(NAMES, partial(load, tmp_path / "log"))
    before = len(cloudpickle.dumps(roster))
    assert roster[3].name == "site-3"
    assert len(cloudpickle.dumps(roster)) == before


def test_a_round_loads_its_cohort_alone_and_in_the_workers(tmp_path: Path) -> None:
    """The parent looks at the first client, before round 0; nobody is loaded twice."""
    log = tmp_path / "log"
    roster = Roster(NAMES, partial(load, log))
    engine = Processes(setup(roster), 1)
    try:
        rounds = federate(engine, rounds=9, cohort=2)
        one = next(rounds)
        assert sorted(loaded(log)) == sorted({0, *one.cohort})
        assert set(roster._cache) == {0}
    finally:
        engine.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_who_is_not_in_order_is_told_and_the_others_have_the_same_bits(tmp_path: Path, workers: int) -> None:
    """A label too many is seen when the client is; rounds are those of a federation where it raises."""
    roster = Roster(NAMES, partial(load, tmp_path / "log"))
    with pytest.raises(BadInput, match="client 'site-5': its test data have labels"):
        check_setup(setup(tuple(roster)))
    engine = Processes(setup(roster), workers) if workers else Serial(setup(roster))
    try:
        (ended,) = federate(engine, rounds=1, cohort=8)
    finally:
        engine.close()
    sentence = "BadInput: client 'site-5': its test data have labels that are not whole numbers (int64) from 0 to 1"
    assert ended.failures == {5: sentence}
    assert ended.evaluations[5].failure == sentence
    assert {k for k, e in ended.evaluations.items() if e.result} == {0, 1, 2, 3, 4, 6, 7}
    assert [e.result.examples for e in ended.evaluations.values() if e.result] == [10] * 7


def test_the_same_rounds_as_of_clients_at_hand() -> None:
    eager, lazy = (Serial(setup(clients)) for clients in (tuple(map(make, range(8))), Roster(NAMES, make)))
    some, others = (list(federate(engine, rounds=3, cohort=4)) for engine in (eager, lazy))
    assert same_rounds(some, others)


def test_inputs_for_the_server_are_those_of_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are, the same as of clients at hand; fewer, and the others are not loaded and keep all."""
    log = tmp_path / "log"
    asks = FedBE()  # for so little that everybody gives one
    whole, lazy = granted(setup(tuple(map(make, range(8))), asks)), granted(setup(Roster(NAMES, make), asks))
    assert torch.equal(whole.task.public, lazy.task.public) and len(lazy.task.public) == 8
    for mine, theirs in zip(whole.clients, lazy.clients, strict=True):
        assert torch.equal(mine.train.x, theirs.train.x) and len(mine.train.y) == 9
    monkeypatch.setattr(public, "GIVERS", 3)
    some = granted(setup(Roster(NAMES, partial(load, log, bad=-1)), asks))
    givers = set(loaded(log)) - {0}
    assert len(some.task.public) == 3 and len(givers) in (2, 3) and granted(some) is some
    assert sorted(len(client.train.y) for client in some.clients) == [9] * 3 + [10] * 5
