"""Rounds by hand: what a run is, without an engine."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.algorithms.protocol import Algorithm, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.conftest import Toy


class Run(NamedTuple):
    """Everything a run keeps between two rounds."""

    server: Tree
    clients: dict[int, Tree]


def start(algorithm: Algorithm, toy: Toy, seed: int = 0) -> Run:
    clients = {k: algorithm.init_client(toy.task, generator(seed, "client", k)) for k in toy.train}
    return Run(server=algorithm.init_server(toy.task, generator(seed, "server")), clients=clients)


def play(algorithm: Algorithm, toy: Toy, run: Run, rounds: range, seed: int = 0) -> Run:
    for t in rounds:
        updates, clients = [], dict(run.clients)
        for k, data in toy.train.items():
            message = algorithm.broadcast(toy.task, run.server, k)
            rng = generator(seed, "update", t, k)
            upload, clients[k], _ = algorithm.client_update(toy.task, message, run.clients[k], data, rng)
            updates.append(Update(client_id=k, num_examples=len(data.y), upload=upload))
        server = algorithm.server_aggregate(toy.task, run.server, iter(updates), generator(seed, "aggregate", t))
        run = Run(server=server, clients=clients)
    return run


def predict(algorithm: Algorithm, task: Task, message: Tree, client: Tree, data: Data, x: Tensor) -> Tensor:
    """The personal model's probabilities, (samples, n, classes)."""
    personal = algorithm.personalise(task, message, client, data, generator(0, "personalise"))
    return algorithm.predict(task, personal, x, generator(0, "predict"))


def accuracy(algorithm: Algorithm, toy: Toy, run: Run) -> float:
    """The mean over clients of the accuracy of their personal models on held-out data."""
    hits = []
    for k, data in toy.train.items():
        message = algorithm.broadcast(toy.task, run.server, k)
        probs = predict(algorithm, toy.task, message, run.clients[k], data, toy.test[k].x).mean(0)
        hits.append((probs.argmax(1) == toy.test[k].y).float().mean())
    return torch.stack(hits).mean().item()


def loaded(task: Task, w: Params) -> nn.Module:
    """A copy of the task's model that holds these parameters."""
    model = copy.deepcopy(task.model)
    model.load_state_dict(w)
    return model


def gradient(task: Task, w: Params, data: Data) -> Params:
    """Of the mean cross-entropy, by torch's own modules, without anything of ours."""
    model = loaded(task, w)
    nnf.cross_entropy(model(data.x), data.y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
