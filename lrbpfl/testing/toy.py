"""A toy federation that trains within a second, and its rounds by hand, without an engine."""

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lrbpfl.algorithms.protocol import Algorithm, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.engines.work import ClientData, Setup
from lrbpfl.rng import generator
from lrbpfl.trees import Tree

CLASSES, FEATURES = 4, 12


class Toy(NamedTuple):
    """Four Gaussian blobs in twelve dimensions; client k mostly sees the classes k and k + 1 (modulo 4)."""

    task: Task
    train: dict[int, Data]
    test: dict[int, Data]


def mlp(hidden: int = 32) -> nn.Sequential:
    """A network for the blobs."""
    layers = [("fc1", nn.Linear(FEATURES, hidden)), ("relu", nn.ReLU()), ("fc2", nn.Linear(hidden, CLASSES))]
    return nn.Sequential(OrderedDict(layers))


def blobs(labels: Tensor, *path: str | int) -> Data:
    """One example for each label: the class's centre plus noise."""
    centres = 1.4 * torch.randn(CLASSES, FEATURES, generator=generator(0, "centres"))
    return Data(x=centres[labels] + 2 * torch.randn(len(labels), FEATURES, generator=generator(0, *path)), y=labels)


def skewed(k: int, n: int, *path: str | int) -> Data:
    """N examples of client k: nine of ten from its two main classes."""
    shares = torch.full((CLASSES,), 0.05)
    shares[[k % CLASSES, (k + 1) % CLASSES]] = 0.45
    return blobs(torch.multinomial(shares, n, replacement=True, generator=generator(0, "labels", *path)), "x", *path)


def make_toy(label_prior: float | None = None) -> Toy:
    """Four clients with 40 to 64 examples for training and 100 for testing."""
    clients = range(4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp()
    public = skewed(0, 64, "public").x
    task = Task(model, CLASSES, label_prior=label_prior, public=public, num_clients=len(clients))
    train = {k: skewed(k, 40 + 8 * k, "train", k) for k in clients}
    return Toy(task=task, train=train, test={k: skewed(k, 100, "test", k) for k in clients})


def make_setup(algorithm: Algorithm, toy: Toy) -> Setup:
    """The toy for an engine."""
    clients = (ClientData(name=f"client-{k}", train=toy.train[k], test=toy.test[k]) for k in toy.train)
    return Setup(algorithm, toy.task, tuple(clients), seed=0)


class ToyRun(NamedTuple):
    """Everything a run keeps between two rounds."""

    server: Tree
    clients: dict[int, Tree]


def start(algorithm: Algorithm, toy: Toy, seed: int = 0) -> ToyRun:
    """A run before round 0."""
    clients = {k: algorithm.init_client(toy.task, generator(seed, "client", k)) for k in toy.train}
    return ToyRun(server=algorithm.init_server(toy.task, generator(seed, "server")), clients=clients)


def play(algorithm: Algorithm, toy: Toy, run: ToyRun, rounds: range, seed: int = 0) -> ToyRun:
    """The run after these rounds, with all clients in each."""
    for t in rounds:
        updates, clients = [], dict(run.clients)
        for k, data in toy.train.items():
            message = algorithm.broadcast(toy.task, run.server, k)
            rng = generator(seed, "update", t, k)
            upload, clients[k], _ = algorithm.client_update(toy.task, message, run.clients[k], data, rng)
            updates.append(Update(client_id=k, num_examples=len(data.y), upload=upload))
        server = algorithm.server_aggregate(toy.task, run.server, iter(updates), generator(seed, "aggregate", t))
        run = ToyRun(server=server, clients=clients)
    return run


def predict(algorithm: Algorithm, task: Task, message: Tree, client: Tree, data: Data, x: Tensor) -> Tensor:
    """The personal model's probabilities, (samples, n, classes)."""
    personal = algorithm.personalise(task, message, client, data, generator(0, "personalise"))
    return algorithm.predict(task, personal, x, generator(0, "predict"))
