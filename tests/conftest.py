"""What all tests share: one thread, and a toy federation that trains within a second."""

import os
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.rng import generator

torch.manual_seed(0)  # of the modules that test files build when they are imported
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

CLASSES, FEATURES = 4, 12


class Toy(NamedTuple):
    """Four Gaussian blobs in twelve dimensions; client k mostly sees the classes k and k + 1 (modulo 4)."""

    task: Task
    train: dict[int, Data]
    test: dict[int, Data]


def mlp(hidden: int = 32) -> nn.Sequential:
    layers = [("fc1", nn.Linear(FEATURES, hidden)), ("relu", nn.ReLU()), ("fc2", nn.Linear(hidden, CLASSES))]
    return nn.Sequential(OrderedDict(layers))


def blobs(labels: torch.Tensor, *path: str | int) -> Data:
    """One example for each label: the class's centre plus noise."""
    centres = 1.4 * torch.randn(CLASSES, FEATURES, generator=generator(0, "centres"))
    return Data(x=centres[labels] + 2 * torch.randn(len(labels), FEATURES, generator=generator(0, *path)), y=labels)


def skewed(k: int, n: int, *path: str | int) -> Data:
    """n examples of client k: nine of ten from its two main classes."""
    shares = torch.full((CLASSES,), 0.05)
    shares[[k % CLASSES, (k + 1) % CLASSES]] = 0.45
    return blobs(torch.multinomial(shares, n, replacement=True, generator=generator(0, "labels", *path)), "x", *path)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def toy() -> Toy:
    clients = range(4)
    task = Task(model=mlp(), num_classes=CLASSES, public=skewed(0, 64, "public").x, num_clients=len(clients))
    train = {k: skewed(k, 40 + 8 * k, "train", k) for k in clients}
    return Toy(task=task, train=train, test={k: skewed(k, 100, "test", k) for k in clients})
