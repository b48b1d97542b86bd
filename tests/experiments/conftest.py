"""What the tests of experiments share: four small clients in a folder, and a run of a second."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.disk import LOCK
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import Config, parse
from lrbpfl.experiments.runner import Progress, start
from lrbpfl.experiments.store import Run
from lrbpfl.rng import numpy_generator

NAMES = ("anna", "bert", "carl", "dora")
Tables = dict[str, dict[str, Any]]
Configure = Callable[..., Config]


@pytest.fixture(autouse=True, scope="session")
def warm() -> None:
    """Torch imports a good deal with the first optimiser; forked processes find it done."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clients of 20, 24, 28 and 32 examples, six features and three classes."""
    path = tmp_path_factory.mktemp("clients")
    for k, name in enumerate(NAMES):
        rng = numpy_generator(0, name)
        y = rng.integers(3, size=20 + 4 * k)
        np.savez(path / f"{name}.npz", x=rng.normal(size=(len(y), 6)) + y[:, None], y=np.append(y[:-1], 2))
    return path


@pytest.fixture(scope="session")
def configure(folder: Path) -> Configure:
    """A small run on that folder; keyword arguments name sections and replace some of their keys."""

    def make(**sections: dict[str, Any]) -> Config:
        tables: Tables = {
            "data": {"dataset": str(folder), "train_fraction": 0.5},
            "federation": {"rounds": 4, "cohort": 2, "evaluate_every": 2, "model": "mlp"},
            "engine": {"kind": "serial"},
            "algorithm": {"name": "fedavg", "local_steps": 2},
        }
        if "name" in sections.get("algorithm", {}):
            tables["algorithm"] = {}
        for name, table in sections.items():
            tables[name] = {**tables[name], **table}
        return parse(tables)

    return make


def run(config: Config, path: Path) -> dict[str, Any]:
    """A run from its beginning to its end; its summary."""
    return start(config, path, build_setup(config), Progress())


def files(path: Path) -> Iterator[Path]:
    """All files below a folder, by their paths from there."""
    return (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())


def contents(path: Path) -> dict[str, Any]:
    """Everything in a run's directory that does not tell the time; tensors as bytes."""
    found: dict[str, Any] = {str(file): (path / file).read_bytes() for file in files(path) if file.name != LOCK}
    found["metrics.jsonl"] = [line for line in Run(path).read_record() if line.get("metric") != "seconds"]
    found["summary.json"] = {
        name: {key: value for key, value in table.items() if key != "seconds"}
        for name, table in json.loads(found["summary.json"]).items()
    }
    for name in [name for name in found if name.endswith("checkpoint.json")]:
        about_time = ("record", "checksum")  # the record tells how long rounds took
        found[name] = {key: value for key, value in json.loads(found[name]).items() if key not in about_time}
    return found


def assert_same(path: Path, expected: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    """The directory holds the same files with the same bits."""
    found = contents(path)
    assert found.keys() == expected.keys()
    assert [name for name in expected if name not in but and found[name] != expected[name]] == []


@pytest.fixture(scope="session", params=ALGORITHMS)
def finished(request: pytest.FixtureRequest, configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run(configure(algorithm={"name": request.param}), path)
    return path
