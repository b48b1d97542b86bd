"""What the tests of personal models share: two small sites, a network, and a federation that trains within a second."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lrbpfl
from lrbpfl import documents
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.documents import Document
from lrbpfl.rng import numpy_generator

QUICK = LRBPFL(max_rank=2, mask_steps=4, model_steps=20, predict_samples=4, calibration=0.0)


def network(hidden: int = 12, slope: float = 0.1) -> nn.Sequential:
    """For four features and the classes 3, 7 and 11."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, hidden), nn.LeakyReLU(slope), nn.Linear(hidden, 3))


def site(name: str, n: int = 40) -> tuple[Tensor, Tensor]:
    """Examples of the classes 3, 7 and 11 around three corners."""
    rng = numpy_generator(0, name)
    y = rng.permutation(np.arange(n) % 3)
    x = rng.normal(size=(n, 4)) + 2 * np.eye(4)[y]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y * 4 + 3)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> lrbpfl.Federation:
    """Two sites that kept some examples for sets."""
    clients = {"north": site("north", 60), "south": site("south")}
    federation = lrbpfl.Federation(network(), clients, QUICK, calibration=0.3, workers=1, quiet=True)
    return federation.fit(3, directory=tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="session")
def saved(trained: lrbpfl.Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a client, with what it shares beside it."""
    return trained.personal("north").save(tmp_path_factory.mktemp("saved") / "north.safetensors")


@pytest.fixture
def forge(saved: Path) -> Iterator[Callable[..., Path]]:
    """A file beside the real one that says something else, with a digest that fits."""
    forged = saved.with_name("forged.safetensors")

    def make(tensors: dict[str, Tensor | None] | None = None, **about: Any) -> Path:
        real = documents.read(saved, "personal")
        said = {key: value for key, value in {**real.about, **about}.items() if value is not ...}
        held = {key: value for key, value in {**real.tensors, **(tensors or {})}.items() if value is not None}
        documents.write(forged, Document(said, held))
        return forged

    yield make
    forged.unlink(missing_ok=True)
