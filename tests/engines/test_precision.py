"""Clients that learn in bfloat16, or with several threads: what they send, how far they are off, and the same bits."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.protocol import Info, Task
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params
from lrbpfl.core.precision import Precision
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Evaluated, Setup, Trained, evaluate_client, fresh_state, granted, update_client
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.engines.fakes import noise, same_rounds
from tests.engines.test_equality import run, small


def smooth(name: str) -> Setup:
    """No ReLU, at whose edge a last digit can send a gradient another way."""
    layers = OrderedDict(fc1=nn.Linear(5, 8), tanh=nn.Tanh(), fc2=nn.Linear(8, 3))
    return noise(ALGORITHMS[name](), nn.Sequential(layers), (5,), clients=2)


def learned(setup: Setup, precision: Precision) -> tuple[Tree, Trained, Evaluated]:
    """The first message, and what client 1 makes of it in this precision."""
    setup = granted(setup)._replace(precision=precision)
    algorithm, task = setup.algorithm, setup.task
    message = algorithm.broadcast(task, algorithm.init_server(task, generator(0)), 1)
    trained = update_client(setup, message, fresh_state(setup, 1), 0, 1)
    return message, trained, evaluate_client(setup, message, trained.state, 1, 1)


def numbers(tree: Tree) -> Tensor:
    """All finite floating-point numbers of a tree, in a row."""
    floats = [leaf.double().flatten() for leaf in trees.leaves(tree) if leaf.is_floating_point()]
    row = torch.cat([torch.zeros(1), *floats])
    return row[row.isfinite()]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_in_bf16_almost_what_it_learns_in_float32(name: str) -> None:
    """The difference is small beside the way that was gone, and not nothing; all that is sent is as exact as before.

    LR-BPFL goes back through dense layers by hand, in float32: there it is nothing.
    """
    message, exact, judged = learned(smooth(name), "float32")
    _, rough, judged_too = learned(smooth(name), "bf16")
    for leaf, expected in zip(trees.leaves(rough[:2]), trees.leaves(exact[:2]), strict=True):
        assert leaf.dtype == expected.dtype and bool((leaf.isfinite() == expected.isfinite()).all())
    what = (exact.upload, rough.upload, message) if name != "local" else (exact.state, rough.state, fresh(name))
    learnt, learnt_too, start = map(numbers, what)
    off = float((learnt_too - learnt).norm() / (learnt - start).norm())
    assert off < 0.06 and (off > 0 or name == "lr-bpfl")
    assert float(abs(judged.predictions.probs - judged_too.predictions.probs).max()) < 0.01
    assert judged_too.predictions.probs.dtype == judged.predictions.probs.dtype


def fresh(name: str) -> Tree:
    return fresh_state(granted(smooth(name)), 1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bf16_has_the_same_bits_in_every_engine(name: str) -> None:
    setup = small(name, clients=3)._replace(precision="bf16")
    expected, _ = run(Serial(setup), rounds=1)
    found, _ = run(Processes(setup, 2), rounds=1)
    assert not expected[-1].failures and all(e.result for e in expected[-1].evaluations.values())
    assert same_rounds(found, expected)


def test_convolutions_in_bf16_have_the_same_bits_too_and_learn_the_same_way() -> None:
    setup = noise(FedAvg(local_steps=3), cnn(3, (1, 16, 16)), (1, 16, 16), clients=3)._replace(precision="bf16")
    expected, _ = run(Serial(setup), rounds=1)
    found, _ = run(Processes(setup, 2), rounds=1)
    assert same_rounds(found, expected)
    exact, _ = run(Serial(setup._replace(precision="float32")), rounds=1)
    start = numbers(setup.algorithm.init_server(setup.task, generator(setup.seed, "server")))
    one, other = (numbers(rounds[-1].server) - start for rounds in (exact, expected))
    assert 0.95 < float(torch.cosine_similarity(one, other, dim=0)) < 1


@dataclass(frozen=True)
class Counting(FedAvg):
    """Fails in another number of threads than it should have: three where it learns, one where it predicts."""

    def client_update(
        self, task: Task, message: Params, client: None, data: Data, rng: Generator
    ) -> tuple[Params, None, Info]:
        assert torch.get_num_threads() == 3
        return super().client_update(task, message, client, data, rng)

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Any:
        assert torch.get_num_threads() == 3
        return super().personalise(task, message, client, data, rng)

    def predict(self, task: Task, personal: Any, x: Inputs, rng: Generator) -> Tensor:
        assert torch.get_num_threads() == 1
        return super().predict(task, personal, x, rng)


def test_clients_learn_with_the_threads_they_are_given_and_predict_with_one() -> None:
    setup = small("fedavg")._replace(algorithm=Counting(), threads=3)
    rounds, _ = run(Serial(setup), rounds=1)
    assert not rounds[-1].failures and all(e.result for e in rounds[-1].evaluations.values())
    assert torch.get_num_threads() == 1


def test_the_same_number_of_threads_gives_the_same_bits() -> None:
    setup = noise(FedAvg(local_steps=1), cnn(3, (1, 8, 8)), (1, 8, 8), clients=1)._replace(threads=2)
    first, second = (run(Serial(setup), rounds=1, cohort=1)[0] for _ in range(2))
    assert same_rounds(first, second)
