"""Rounds by hand, and what they come to by torch's own modules."""

import copy

import torch
from torch import nn
from torch.nn import functional as nnf

from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params
from lrbpfl.testing.toy import ToyRun as ToyRun
from lrbpfl.testing.toy import play as play
from lrbpfl.testing.toy import predict as predict
from lrbpfl.testing.toy import start as start
from tests.conftest import Toy


def accuracy(algorithm: Algorithm, toy: Toy, run: ToyRun) -> float:
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
