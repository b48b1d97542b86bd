"""Clipped, robust and private means against scipy, NumPy and closed forms."""

import math
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from scipy.stats import kstest, trim_mean

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.ballots import Tally
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.engines.intake import Intake
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.robust import prepared, private_mean, trimmed_mean
from lrbpfl.engines.serial import Serial
from lrbpfl.rng import generator
from lrbpfl.testing.toy import make_setup, make_toy
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, kept, line, same_rounds


@pytest.mark.parametrize(("n", "trim", "cut"), [(1, 0.2, 0), (2, 0.4, 0), (5, 0.2, 1), (5, 0.01, 1), (11, 0.3, 4)])
def test_a_trimmed_mean_is_scipys(n: int, trim: float, cut: int) -> None:
    values = torch.randn(n, 3, 4, generator=generator(0, n), dtype=torch.float64)
    expected = trim_mean(values.numpy(), (cut + 0.5) / n if cut else 0.0, axis=0)
    np.testing.assert_allclose(trimmed_mean(values, trim).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9])
def test_a_median_is_numpys(n: int) -> None:
    values = torch.randn(n, 3, 4, generator=generator(0, n), dtype=torch.float64)
    np.testing.assert_allclose(trimmed_mean(values, 0.5).numpy(), np.median(values.numpy(), axis=0), rtol=1e-12)


def own_messages(n: int) -> tuple[dict[int, Tree], list[Update]]:
    """Messages that differ, each with a vote (sums) and a whole number, and the uploads that answer them."""
    rng = generator(0, "own")
    messages, updates = {}, []
    for k in range(n):
        message = {"w": torch.randn(3, generator=rng), "vote": torch.ones(2), "steps": torch.tensor(10 * k)}
        messages[k] = message
        upload = {"w": message["w"] + k, "vote": torch.full((2,), 100.0 * k), "steps": message["steps"] + k * k}
        updates.append(Update(k, 1 + k, upload))
    return messages, updates


class Voting(Scripted):
    """Its uploads hold a vote."""

    SUMS = ("vote",)

    def fault(self, task: Task, upload: Tree) -> str | None:
        return None


def ready(intake: Intake, n: int = 5) -> Iterator[tuple[Tree, Update, Update]]:
    messages, updates = own_messages(n)
    task = Task(model=torch.nn.Linear(1, 2), num_classes=2, num_clients=n)
    found = prepared(intake, Voting(), task, {"w": torch.zeros(3)}, updates, messages, generator(0))
    return zip(messages.values(), updates, found, strict=True)


def test_nothing_asked_for_changes_nothing() -> None:
    assert all(found is update for _, update, found in ready(Intake()))


def test_everybody_makes_the_robust_move_from_its_own_message() -> None:
    for intake in (Intake(aggregate="median"), Intake(aggregate="trimmed", trim=0.4)):
        for message, update, found in ready(intake):
            assert torch.allclose(found.upload["w"], message["w"] + 2)  # of 0, 1, 2, 3, 4
            assert found.upload["steps"] == message["steps"] + 4  # of 0, 1, 4, 9, 16
            assert torch.equal(found.upload["vote"], update.upload["vote"])
            assert (found.client_id, found.num_examples) == (update.client_id, 1)
    (_, _, found), *_ = ready(Intake(aggregate="trimmed", trim=0.2))
    assert found.upload["steps"] == 5  # the mean of 1, 4, 9 is 14 / 3


def test_a_long_move_is_shortened_and_a_short_one_stays() -> None:
    for k, (message, update, found) in enumerate(ready(Intake(clip=2.5))):
        far = math.hypot(*[k] * 3, k * k)
        assert found is update if far <= 2.5 else torch.allclose(found.upload["w"], message["w"] + k * 2.5 / far)
        assert torch.equal(found.upload["vote"], update.upload["vote"])
        assert found.num_examples == 1 + k


def test_a_huge_move_is_shortened_without_overflow() -> None:
    setup = line(Scripted())
    task, message = setup.task, {"w": torch.zeros(3)}
    update = Update(0, 1, {"w": torch.tensor([3e38, -3e38, 0.0])})
    (found,) = prepared(Intake(clip=1.0), setup.algorithm, task, message, [update], {0: message}, generator(0))
    assert torch.allclose(found.upload["w"], torch.tensor([1.0, -1.0, 0.0]) / 2**0.5)


def test_noise_is_gaussian_and_of_the_size_that_is_told() -> None:
    values = torch.arange(3.0, dtype=torch.float64)[:, None].expand(3, 4000)
    found = private_mean(values, 4, 0.6, generator(0, "noise"))
    assert kstest(((found - 3 / 4) * 4 / 0.6).numpy(), "norm").pvalue > 0.01


def test_with_noise_the_server_sees_one_upload_from_nobody() -> None:
    """Not who took part, nor how many examples they have, nor their votes; and no client more than its clip."""
    messages, updates = own_messages(4)
    task = Task(model=torch.nn.Linear(1, 2), num_classes=2, num_clients=9)

    class Own(Voting):
        def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
            assert client_id == 9
            return {"w": torch.zeros(3), "vote": torch.ones(2), "steps": torch.tensor(7)}

    def seen(updates: list[Update]) -> Tree:
        intake = Intake(clip=1.0, noise=1e-9)
        (only,) = prepared(intake, Own(), task, {"w": torch.zeros(3)}, updates, messages, generator(0))
        assert (only.client_id, only.num_examples) == (9, 1)
        return only.upload

    some = seen(updates)
    assert torch.equal(some["vote"], torch.zeros(2))
    changed = [updates[0]._replace(num_examples=99), *updates[1:3]]
    changed.append(updates[3]._replace(upload={**updates[3].upload, "w": messages[3]["w"] - 1e30}))
    other = seen(changed)
    assert float((some["w"] - other["w"]).norm()) <= 2 / 4 + 1e-6
    fewer = seen(updates[:3])  # divided by the cohort, all the same
    assert torch.allclose(4 * (some["w"] - fewer["w"]), torch.full((3,), 3.0) / math.hypot(3, 3, 3, 9))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_served(name: str) -> None:
    """With medians and with noise a server moves, stays fit, and nobody is refused."""
    algorithm = ALGORITHMS[name]()
    setup = make_setup(algorithm, make_toy())
    for intake in (Intake(aggregate="median"), Intake(clip=0.5, noise=0.1)):
        engine = Serial(setup)
        start = algorithm.init_server(engine.setup.task, generator(setup.seed, "server"))
        (only,) = federate(engine, rounds=1, cohort=3, intake=intake)
        assert only.undone is None and only.failures == {} and len(kept(engine)) == 3
        assert name == "local" or not trees.equal(only.server, start)
        assert all(e.result for e in only.evaluations.values())


def test_what_fedavg_does_with_medians_and_with_noise() -> None:
    setup = make_setup(FedAvg(local_steps=3), make_toy())
    engine = Serial(setup)
    server = setup.algorithm.init_server(engine.setup.task, generator(0, "server"))
    uploads = [reply.update.upload for reply in engine.update(dict.fromkeys(range(4), server), 0) if reply.update]
    (only,) = federate(Serial(setup), rounds=1, cohort=4, intake=Intake(aggregate="median"))
    (noisy,) = federate(Serial(setup), rounds=1, cohort=4, intake=Intake(clip=1e3, noise=1e-9))
    for name, leaf in only.server.items():
        stacked = np.stack([upload[name].double().numpy() for upload in uploads])
        np.testing.assert_allclose(leaf.numpy(), np.median(stacked, axis=0), atol=1e-6)
        np.testing.assert_allclose(noisy.server[name].numpy(), stacked.mean(axis=0), atol=1e-5)


def test_votes_count_with_medians_and_not_with_noise() -> None:
    setup = make_setup(LRBPFL(mask_steps=2, model_steps=2), make_toy())

    def heard(intake: Intake) -> Tally:
        (only,) = federate(Serial(setup), rounds=1, cohort=4, intake=intake)
        tally: Tally = only.server.tally
        return tally

    assert trees.equal(heard(Intake(aggregate="median")), heard(Intake()))
    assert not any(part.any() for part in heard(Intake(clip=1.0, noise=0.5))[:-1])


@pytest.mark.parametrize("intake", [Intake(aggregate="trimmed", clip=1.0), Intake(clip=1.0, noise=1.0)])
def test_robust_and_private_rounds_have_the_same_bits_in_processes_and_after_a_cut(intake: Intake) -> None:
    setup = line(Scripted())
    whole = list(federate(Serial(setup), rounds=4, cohort=3, intake=intake))
    with closing(Processes(setup, 2)) as engine:
        rounds = federate(engine, rounds=4, cohort=3, intake=intake)
        first = [next(rounds), next(rounds)]
        other = Serial(setup)
        kept(other).update(kept(engine))
    rest = federate(other, rounds=4, cohort=3, intake=intake, start=(2, first[-1].server))
    assert same_rounds([*first, *rest], whole)
