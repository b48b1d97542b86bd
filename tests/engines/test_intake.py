"""What the server takes from clients: the rule on moves, and rounds that count whole or not at all."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.engines.intake import Intake, check_intake, length, too_far
from lrbpfl.engines.loop import Engine, federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, kept, line, same_rounds

MESSAGE = {"w": torch.full((100,), 0.1), "b": torch.zeros(4)}  # of length 1


def judged(*moves: tuple[float, float], farthest: float = 10.0, message: Tree = MESSAGE) -> dict[int, str]:
    """Who moved too far, if client k moves w and b by so much (their lengths)."""

    def update(k: int, w: float, b: float) -> Update:
        by = {"w": torch.full((100,), w / 10), "b": torch.full((4,), b / 2)}
        return Update(k, 1, {name: (message[name].double() + by[name]).float() for name in message})

    updates = [update(k, *move) for k, move in enumerate(moves)]
    return too_far(updates, dict.fromkeys(range(len(moves)), message), farthest)


def test_one_that_goes_far_is_named_with_the_median() -> None:
    found = judged((0.5, 0), (0.9, 0), (3e31, 0), (0.8, 0), (0.7, 0))
    assert found == {2: "it moved 3e+31, the median of this round is 0.8"}


def test_a_small_tensor_is_seen_in_a_large_upload() -> None:
    """Nearly twenty is what four typical entries of this message would measure; as wholes, no move is too far."""
    long = {"w": torch.full((100,), 10.0), "b": torch.zeros(4)}
    assert judged((50.0, 0.1), (60.0, 0.1), (50.0, 190.0), message=long) == {}
    found = judged((50.0, 0.1), (60.0, 0.1), (50.0, 220.0), message=long)
    assert found == {2: "its b moved 2.2e+02, the median of this round is 0.1"}


@pytest.mark.parametrize("bad", [1e30, -3e38, 3e38])
def test_up_to_half_of_a_cohort_may_be_bad(bad: float) -> None:
    good = (0.5, 0.1)
    assert judged(good, good, good, (bad, bad), (bad, bad), (bad, bad)).keys() == {3, 4, 5}
    assert judged(good, good, (bad, bad)).keys() == {2}
    assert judged(good, (bad, bad)).keys() == {1}
    assert judged((bad, bad)).keys() == {0}


def test_few_uploads_are_measured_by_their_message() -> None:
    assert judged((9.0, 0)) == {}
    assert judged((11.0, 0)) == {0: "it moved 11, its message measures 1"}
    assert judged((0.0, 0), (9.0, 0)) == {}
    assert judged((0.0, 0), (11.0, 0)).keys() == {1}


def test_a_median_of_zero_alarms_nobody() -> None:
    """Most clients send back what they got, or leave a tensor alone."""
    assert judged((0, 0), (0, 0), (0, 0), (0.9, 0.9)) == {}
    assert judged((0.5, 0), (0.5, 0), (0.5, 0), (0.5, 0.9)) == {}
    nothing = trees.tree_map(torch.zeros_like, MESSAGE)
    assert judged((0, 0), (0, 0), (0, 0), (5.0, 1.0), message=nothing) == {}
    assert judged((0, 0), (0, 0), (0, 0), (1e9, 1.0), message=nothing).keys() == {3}


def test_no_square_overflows() -> None:
    for value in (1e-300, 3e38, 1e300):
        move = torch.full((9,), value, dtype=torch.float64)
        assert length(move) == pytest.approx(3 * value)
    assert length(torch.zeros(3).double()) == length(torch.zeros(0).double()) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_who_is_refused_takes_no_part_in_the_round(workers: int) -> None:
    setup, alone = line(Far(culprits=(1,))), line(Scripted(update="nan", culprits=(1,)))
    engine: Engine = Processes(setup, workers) if workers else Serial(setup)
    with closing(engine):
        rounds = list(federate(engine, rounds=3, cohort=4))
    expected = list(federate(Serial(alone), rounds=3, cohort=4))
    assert all(trees.equal(a.server, b.server) for a, b in zip(rounds, expected, strict=True))
    assert [ended.accepted for ended in rounds] == [[0, 2, 3]] * 3
    assert all("upload refused: it moved" in ended.failures[1] for ended in rounds)
    assert sorted(kept(engine)) == [0, 2, 3]


def test_without_the_rule_it_counts() -> None:
    (only,) = federate(Serial(line(Far(culprits=(1,)))), rounds=1, cohort=4, intake=Intake(farthest=0))
    assert only.failures == {} and only.server["w"].max() > 1e28


@dataclass(frozen=True)
class Far(Scripted):
    """Culprits send 1e30."""

    def _follow(self, script: str, result: Tree, k: int) -> Tree:
        return {"w": torch.full((3,), 1e30)} if k in self.culprits and isinstance(result, dict) else result


@dataclass(frozen=True)
class Fragile(Scripted):
    """An aggregate that ends badly in about every other round."""

    end: str = "nan"

    def init_server(self, task: Task, rng: Generator) -> Tree:
        return {**super().init_server(task, rng), "t": torch.zeros(1)}

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        return {"w": server["w"]}

    def server_aggregate(self, task: Task, server: Tree, updates: Iterable[Update], rng: Generator) -> Tree:
        w: Tensor = super().server_aggregate(task, server, updates, rng)["w"]
        if torch.rand(1, generator=rng) < 0.5:
            return {"w": w, "t": server["t"] + 1}
        if self.end == "raise":
            raise ZeroDivisionError("nobody\nis left")
        return {"w": w * torch.nan, "t": server["t"]} if self.end == "nan" else {"w": w[:2], "t": server["t"]}


ENDS = {
    "nan": "the server's next state is unfit: w holds numbers that are not finite",
    "shape": "the server's next state is unfit: w has shape (2,), not (3,)",
    "raise": "the aggregate failed: ZeroDivisionError: nobody is left",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_round_that_ends_badly_is_undone_and_the_run_goes_on(end: str) -> None:
    engine = Serial(line(Fragile(end=end)))
    rounds, seen = [], []
    for ended in federate(engine, rounds=8, cohort=4, evaluate_every=1):
        rounds.append(ended)
        seen.append(dict(kept(engine)))
    undone = [ended for ended in rounds if ended.undone]
    assert 0 < len(undone) < 8
    assert {ended.undone for ended in undone} == {ENDS[end]}
    assert all(ended.accepted == [] and ended.infos == {} and ended.failures == {} for ended in undone)
    assert int(rounds[-1].server["t"]) == 8 - len(undone)
    for before, after, states, states_after in zip(rounds, rounds[1:], seen, seen[1:], strict=False):
        assert (after.server is before.server) == bool(after.undone)
        assert trees.equal(states, states_after) == bool(after.undone)
    assert all(e.result for e in rounds[-1].evaluations.values())


def test_a_run_with_rounds_undone_goes_on_in_the_same_bits() -> None:
    setup = line(Fragile())
    whole = list(federate(Serial(setup), rounds=6, cohort=4))
    engine = Serial(setup)
    rounds = federate(engine, rounds=6, cohort=4)
    first = [next(rounds), next(rounds), next(rounds)]
    other = Serial(setup)
    kept(other).update(kept(engine))
    rest = list(federate(other, rounds=6, cohort=4, start=(3, first[-1].server)))
    assert same_rounds(first + rest, whole)


@pytest.mark.parametrize(
    ("intake", "words"),
    [
        (Intake(farthest=0.5), "x.farthest = 0.5 times"),
        (Intake(farthest=float("nan")), "x.farthest = nan"),
        (Intake(aggregate="best"), "x.aggregate = 'best'"),  # type: ignore[arg-type]
        (Intake(trim=0.5), "x.trim = 0.5"),
        (Intake(clip=0.0), "x.clip = 0.0"),
        (Intake(noise=1.0), "needs x.clip"),
        (Intake(noise=1.0, clip=1.0, aggregate="median"), "x.aggregate = 'mean'"),
        (Intake(noise=1.0, clip=1.0, delta=1.0), "x.delta = 1.0"),
    ],
)
def test_what_cannot_be_together_is_refused(intake: Intake, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        check_intake(intake, "x.")
