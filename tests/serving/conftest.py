"""Personal files of a small federation, without rounds: what they say does not matter, that it is theirs does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lrbpfl import documents, trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.engines.work import ClientData, Setup, evaluate_client, fresh_state, granted
from lrbpfl.models import MODELS
from lrbpfl.personal.model import shared_name
from lrbpfl.personal.pack import Parts, Told, personal_document, shared_document
from lrbpfl.rng import generator

NAMES = ("north", "south", "east")
CLASSES = ("no", "maybe", "yes")
FEATURES = 6
Written = Callable[..., Path]


def rows(n: int, *path: str | int, shape: tuple[int, ...] = (FEATURES,)) -> torch.Tensor:
    return torch.randn(n, *shape, generator=generator(0, "rows", *path))


def client(name: str, shape: tuple[int, ...]) -> ClientData:
    """Twelve examples, of which the first class is the rarer the later the client comes."""
    y = (torch.arange(12) + NAMES.index(name)) % len(CLASSES)
    y[: 3 * NAMES.index(name)] = 2
    data = Data(rows(12, name, shape=shape) + y.reshape(-1, *[1] * len(shape)), y)
    return ClientData(name=name, train=data, test=data)


def write(folder: Path, name: str, model: str, shape: tuple[int, ...], fields: dict[str, Any]) -> Path:
    """The files of three clients beside what they share; the first client's probabilities are tempered."""
    clients = tuple(client(name, shape) for name in NAMES)
    public = rows(8, "public", shape=shape)
    network = MODELS[model](len(CLASSES), shape)
    task = Task(network, len(CLASSES), label_prior=1.0, public=public, num_clients=len(NAMES))
    setup = granted(Setup(ALGORITHMS[name](**fields), task, clients, seed=0, classes=CLASSES))
    server = setup.algorithm.init_server(setup.task, generator(0, "server"))
    shared = shared_document(setup, name, server)
    documents.write(folder / shared_name(shared), shared)
    for k, one in enumerate(setup.clients):
        message = setup.algorithm.broadcast(setup.task, server, k)
        result = evaluate_client(setup, message, fresh_state(setup, k), 1, k)
        heat = 1.0 if k else 1.7
        told = Told(client=one.name, examples=len(one.train.y), address=(0, "predict", 1, k), temperature=heat)
        parts = Parts(result.personal, result.shared)
        own = personal_document(shared, parts, dict(trees.named_leaves(message)), told)
        documents.write(folder / f"{one.name}.safetensors", own)
    return folder


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """`written(algorithm, model, shape, **fields)`: a folder of three clients' files, made once."""
    made: dict[str, Path] = {}

    def make(name: str, model: str = "mlp", shape: tuple[int, ...] = (FEATURES,), **fields: Any) -> Path:
        key = f"{name} {model} {shape} {fields}"
        if key not in made:
            made[key] = write(tmp_path_factory.mktemp("served"), name, model, shape, fields)
        return made[key]

    return make
