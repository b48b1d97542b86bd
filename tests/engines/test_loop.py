"""The round loop: who takes part, what is averaged, what is counted and what is told."""

import math
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.engines.loop import Engine, Round, federate, sample_clients
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup, evaluate_client, fresh_state, update_client
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, kept, line, same_rounds

SEED = 3


def test_a_cohort_is_distinct_and_in_rising_order() -> None:
    for t in range(50):
        cohort = sample_clients(9, 4, SEED, t)
        assert len(cohort) == 4
        assert sorted(set(cohort)) == cohort
        assert set(cohort) <= set(range(9))


def test_a_cohort_depends_on_seed_and_round_alone() -> None:
    rounds = [sample_clients(9, 4, SEED, t) for t in range(20)]
    torch.rand(7)
    assert rounds == [sample_clients(9, 4, SEED, t) for t in range(20)]
    assert rounds != [sample_clients(9, 4, SEED + 1, t) for t in range(20)]
    assert len(set(map(tuple, rounds))) > 10


def test_every_client_is_drawn_about_as_often_as_the_others() -> None:
    drawn = [k for t in range(400) for k in sample_clients(7, 2, SEED, t)]
    expected = 400 * 2 / 7
    assert all(abs(drawn.count(k) - expected) < 40 for k in range(7))  # over four standard deviations


def with_new(training: int, clients: int) -> Setup:
    """Clients of whom the last ones never train, in a federation that gives everybody a message of its own."""
    setup = line(Named(), clients)
    return setup._replace(task=setup.task._replace(num_clients=training))


@dataclass(frozen=True)
class Named(Scripted):
    """Every client's message carries its number."""

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        return {"w": server["w"] + 10 * client_id}

    def predict(self, task: Task, personal: Tree, x: Tensor, rng: Generator) -> Tensor:
        p = torch.sigmoid(personal["w"][:1] / 100 + personal["seen"][0]).expand(1, len(x))
        return torch.stack([p, 1 - p], dim=2)


def test_new_clients_are_in_no_cohort_and_judged_once() -> None:
    engine = Serial(with_new(3, 5))
    rounds = list(federate(engine, rounds=8, cohort=2, evaluate_every=1))
    assert {k for ended in rounds for k in ended.cohort} == {0, 1, 2}
    assert [list(ended.evaluations) for ended in rounds] == 7 * [[0, 1, 2]] + [[0, 1, 2, 3, 4]]
    assert kept(engine).keys() == {0, 1, 2}


def test_a_new_client_is_judged_as_one_that_never_took_part() -> None:
    setup = with_new(3, 5)
    (last,) = federate(Serial(setup), rounds=1, cohort=3)
    for k in (3, 4):
        message = {"w": last.server["w"] + 10 * k}
        expected = evaluate_client(setup, message, fresh_state(setup, k), 0, k)
        result = last.evaluations[k].result
        assert result is not None and trees.equal(result.personal, expected.personal)
        assert (result.predictions.probs == expected.predictions.probs).all()


def test_new_clients_change_nothing_for_the_others() -> None:
    setup = with_new(3, 5)
    alone = setup._replace(clients=setup.clients[:3])
    rounds, expected = (list(federate(Serial(f), rounds=4, cohort=2, evaluate_every=2)) for f in (setup, alone))
    told = {k: evaluation for k, evaluation in rounds[-1].evaluations.items() if k < 3}
    assert same_rounds([*rounds[:-1], rounds[-1]._replace(evaluations=told)], expected)


def test_new_clients_cannot_fill_a_cohort() -> None:
    with pytest.raises(BadInput, match="cohort of 4 cannot be drawn from 3 clients"):
        next(federate(Serial(with_new(3, 5)), rounds=1, cohort=4))


def test_a_task_with_more_clients_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match="the task says that 6 clients take part, and the setup has 5"):
        next(federate(Serial(with_new(6, 5)), rounds=1, cohort=2))


def test_a_cohort_of_everybody_is_everybody() -> None:
    assert sample_clients(5, 5, SEED, 0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cohort", [-1, 0, 5])
def test_a_cohort_that_cannot_be_drawn_is_refused(cohort: int) -> None:
    with pytest.raises(BadInput, match=f"cohort of {cohort} cannot be drawn from 4 clients"):
        next(federate(Serial(line(Scripted())), rounds=1, cohort=cohort))


def test_a_model_with_batch_statistics_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    setup = line(FedAvg())._replace(task=Task(model=model, num_classes=2))
    with pytest.raises(BadInput, match="BatchNorm1d"):
        next(federate(Serial(setup), rounds=1, cohort=2))


def upload(setup: Setup, server: Tree, t: int, k: int) -> Tree:
    """What client k sends in its first round, by hand."""
    return update_client(setup, server, fresh_state(setup, k), t, k).upload


def mean_of(setup: Setup, server: Tree, clients: list[int]) -> Tree:
    """The mean of these clients' first uploads, weighted by their examples."""
    return trees.mean((upload(setup, server, 0, k), len(setup.clients[k].train.y)) for k in clients)


def first_server(setup: Setup) -> Tree:
    return setup.algorithm.init_server(setup.task, generator(SEED, "server"))


def test_the_server_gets_the_mean_weighted_by_examples() -> None:
    setup = line(Scripted())
    server = first_server(setup)
    (only,) = federate(Serial(setup), rounds=1, cohort=4)
    assert trees.equal(only.server, mean_of(setup, server, [0, 1, 2, 3]))
    uploads = [upload(setup, server, 0, k)["w"].double() for k in range(4)]
    by_hand = (4 * uploads[0] + 5 * uploads[1] + 6 * uploads[2] + 7 * uploads[3]) / 22
    assert torch.allclose(only.server["w"].double(), by_hand, rtol=1e-6)


FAULTS = {
    "nan": "upload refused: w holds numbers that are not finite",
    "one inf": "upload refused: w holds numbers that are not finite",
    "shape": r"upload refused: w has shape \(1, 3\), not \(3,\)",
    "dtype": r"upload refused: w has dtype torch.float64, not torch.float32",
    "name": r"upload refused: its tensors are named \['v'\], not \['w'\]",
    "extra": r"upload refused: its tensors are named \['v', 'w'\], not \['w'\]",
    "nothing at all": r"upload refused: its tensors are named \[\], not \['w'\]",
    "no tensor": "BadInput: its upload holds w of type float, not a tensor",
    "big": r"upload refused: w has shape \(10000,\), not \(3,\)",
    "raise": r"LookupError: the disk is gone$",  # one line, although the error has two
}


@pytest.mark.parametrize(("workers", "culprit"), [(0, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("script", FAULTS)
def test_a_bad_upload_never_enters_the_mean(script: str, workers: int, culprit: int) -> None:
    setup = line(Scripted(update=script, culprits=(culprit,)))
    engine: Engine = Processes(setup, workers) if workers else Serial(setup)
    with closing(engine):
        (only,) = federate(engine, rounds=1, cohort=4)
    good = [k for k in range(4) if k != culprit]
    assert trees.equal(only.server, mean_of(line(Scripted()), first_server(setup), good))
    assert only.cohort == [0, 1, 2, 3]
    assert only.accepted == good == list(only.infos) == sorted(kept(engine))
    assert list(only.failures) == [culprit]
    assert re.search(FAULTS[script], only.failures[culprit])
    assert "\n" not in only.failures[culprit]


def test_a_client_that_was_refused_keeps_the_state_it_had(tmp_path: Path) -> None:
    setup = line(Scripted(update="nan later", culprits=(1,), marker=str(tmp_path / "marker")))
    engine = Serial(setup)
    rounds = federate(engine, rounds=2, cohort=4)
    assert not next(rounds).failures
    before = kept(engine)[1]
    assert list(next(rounds).failures) == [1]
    assert kept(engine)[1] is before
    assert before["seen"][0] == 1
    assert kept(engine)[0]["seen"][0] == 2


@pytest.mark.parametrize(("script", "t"), [("nan", 0), ("raise", 1)])
def test_a_round_without_any_upload_leaves_the_server_as_it_is(script: str, t: int) -> None:
    setup = line(Scripted(update=script, culprits=(0, 1, 2, 3)))
    engine = Serial(setup)
    rounds = list(federate(engine, rounds=t + 2, cohort=2, start=(t, first_server(setup))))
    assert all(trees.equal(ended.server, first_server(setup)) for ended in rounds)
    assert all(ended.accepted == [] and list(ended.failures) == ended.cohort for ended in rounds)
    assert kept(engine) == {}
    assert len(rounds[-1].evaluations) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_code_that_fails_at_every_client_of_the_first_round_ends_the_run(workers: int) -> None:
    """Whatever it raised is told; one client alone, or dead workers, end nothing."""

    def first_round(script: str, cohort: int, workers: int = workers) -> Round:
        setup = line(Scripted(update=script, culprits=(0, 1, 2, 3)))
        with closing(Processes(setup, workers) if workers else Serial(setup)) as engine:
            return next(federate(engine, rounds=1, cohort=cohort))

    with pytest.raises(BadInput, match=r"every client of round 0.*4 of 4.*'c0'.*LookupError: the disk is gone"):
        first_round("raise", cohort=4)
    assert len(first_round("raise", cohort=1).failures) == 1
    if workers:
        assert len(first_round("die", cohort=2).failures) == 2


def counted(script: str) -> Round:
    return next(federate(Serial(line(Scripted(update=script, culprits=(1,)))), rounds=1, cohort=4))


def test_bytes_are_those_of_the_messages_and_uploads() -> None:
    w = 3 * 4  # three numbers of four bytes
    assert (counted("nothing").bytes_down, counted("nothing").bytes_up) == (4 * w, 4 * w)
    assert (counted("raise").bytes_down, counted("raise").bytes_up) == (4 * w, 3 * w)
    assert (counted("nan").bytes_down, counted("nan").bytes_up) == (4 * w, 4 * w)  # it came all the way to be refused
    assert (counted("big").bytes_down, counted("big").bytes_up) == (4 * w, 3 * w + 40_000)


@pytest.mark.parametrize(("every", "judged"), [(0, [4]), (1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (5, [4]), (9, [4])])
def test_everybody_is_judged_every_so_often_and_in_the_last_round(every: int, judged: list[int]) -> None:
    rounds = list(federate(Serial(line(Scripted())), rounds=5, cohort=2, evaluate_every=every))
    assert [ended.t for ended in rounds if ended.evaluations] == judged
    assert all(list(ended.evaluations) == [0, 1, 2, 3] for ended in rounds if ended.evaluations)


def test_a_client_that_cannot_be_judged_is_named() -> None:
    setup = line(Scripted(predicting="raise", culprits=(2,)))
    (only,) = federate(Serial(setup), rounds=1, cohort=4)
    evaluation = only.evaluations[2]
    assert evaluation.result is None
    assert evaluation.failure is not None and evaluation.failure.startswith("LookupError: the disk")
    assert all(only.evaluations[k].result for k in (0, 1, 3))


@pytest.mark.parametrize("workers", [2, 3])
def test_replies_come_in_the_order_of_the_messages(workers: int) -> None:
    setup = line(Scripted(update="sleep", predicting="sleep", culprits=(0, 2)))
    seen: list[tuple[str, int, int, int]] = []
    with closing(Processes(setup, workers)) as engine:
        rounds = federate(engine, rounds=1, cohort=4, observe=lambda what, t, k, of: seen.append((what, t, k, of)))
        (only,) = rounds
        backwards = dict.fromkeys((3, 2, 1, 0), only.server)
        assert [reply.client_id for reply in engine.update(backwards, 1)] == [3, 2, 1, 0]
        assert [evaluation.client_id for evaluation in engine.evaluate(backwards, 1)] == [3, 2, 1, 0]
    assert seen == [(what, 0, k, 4) for what in ("update", "evaluate") for k in range(4)]


def test_a_run_goes_on_from_a_round_as_if_it_had_never_stopped() -> None:
    setup = line(Scripted())
    whole = list(federate(Serial(setup), rounds=5, cohort=2, evaluate_every=2))
    engine = Serial(setup)
    rounds = federate(engine, rounds=5, cohort=2, evaluate_every=2)
    first = [next(rounds), next(rounds), next(rounds)]
    other = Serial(setup)
    kept(other).update(kept(engine))
    rest = list(federate(other, rounds=5, cohort=2, evaluate_every=2, start=(3, first[-1].server)))
    assert same_rounds(first + rest, whole)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda x, y: (x[:0], y[:0]), "0 labels"),
        (lambda x, y: (x, y[:-1]), "as many of both"),
        (lambda x, y: (x, y + 100), "labels that are not whole numbers"),
        (lambda x, y: (x, y - 100), "labels that are not whole numbers"),
        (lambda x, y: (x, y.float()), "labels that are not whole numbers"),
        (lambda x, y: (x.double() * math.nan, y), "not finite"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_bad_data_are_refused_with_the_clients_name(
    part: str, fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], words: str
) -> None:
    setup = line(Scripted())
    good = setup.clients[2]
    spoiled = Data(*fault(*getattr(good, part)))
    bad = good._replace(train=spoiled) if part == "train" else good._replace(test=spoiled)
    clients = (*setup.clients[:2], bad, *setup.clients[3:])
    with pytest.raises(BadInput, match=words) as refused:
        next(federate(Serial(setup._replace(clients=clients)), rounds=1, cohort=1))
    assert repr(bad.name) in str(refused.value)
    assert f"its {part} data" in str(refused.value)
