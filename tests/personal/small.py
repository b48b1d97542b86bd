"""Clients' models that are made within a second: no round is run, the server's first state is enough."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.engines.work import ClientData, Setup, evaluate_client, fresh_state, granted
from lrbpfl.metrics import scores
from lrbpfl.personal.model import PersonalModel
from lrbpfl.personal.pack import Parts, Told, personal_document, shared_document
from lrbpfl.rng import generator

CLASSES, FEATURES = 4, 12


def network() -> nn.Module:
    """A network that this package does not know by name."""
    return nn.Sequential(OrderedDict(fc1=nn.Linear(FEATURES, 8), relu=nn.ReLU(), fc2=nn.Linear(8, CLASSES)))


def personal(
    name: str = "lr-bpfl",
    model: nn.Module | None = None,
    data: Data | None = None,
    *,
    classes: int = CLASSES,
    temperature: float = 1.0,
    judged: bool = True,
    **fields: Any,
) -> PersonalModel:
    """The model of a client that has just come to a federation where nobody has trained yet."""
    data = data or Data(rows(30), torch.arange(30) % 7 % CLASSES)
    model = network() if model is None else model
    client = ClientData("north", data, data)
    algorithm = ALGORITHMS[name](**fields)
    task = Task(model=model, num_classes=classes, public=data.x, num_clients=1)
    setup = granted(Setup(algorithm, task, (client,), seed=3, classes=tuple("abcdefghij"[:classes])))
    server = algorithm.init_server(setup.task, generator(3, "server"))
    message = algorithm.broadcast(setup.task, server, 0)
    result = evaluate_client(setup, message, fresh_state(setup, 0), 1, 0)
    found = scores(result.predictions, seed=3, path=(0,)) if judged else {}
    told = Told(client.name, len(data.y), (3, "predict", 1, 0), temperature=temperature)
    if judged:
        told = told._replace(judged="test", predictions=result.predictions, scores=found)
    shared = shared_document(setup, name, server)
    own = personal_document(shared, Parts(result.personal, result.shared), dict(trees.named_leaves(message)), told)
    return PersonalModel(own, shared, model, "small")


def rows(n: int) -> Tensor:
    return 2 * torch.randn(n, FEATURES, generator=generator(0, "rows", n))
