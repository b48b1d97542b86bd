"""A tiny algorithm whose clients misbehave on purpose, and the setups that the tests of engines run."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Info, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.work import ClientData, Setup
from lrbpfl.rng import generator
from lrbpfl.states import Memory
from lrbpfl.testing.engines import same_rounds as same_rounds
from lrbpfl.trees import Tree


def kept(engine: Engine) -> dict[int, Tree]:
    """What clients keep, in an engine that keeps it in memory."""
    assert isinstance(engine.states, Memory)
    return engine.states.kept


def calls(marker: Path) -> int:
    """How often a script ran, over all processes: the length of its marker file."""
    return marker.stat().st_size if marker.exists() else 0


def _count(marker: Path) -> int:
    with marker.open("ab") as file:
        file.write(b"x")
    return calls(marker)


def _die(result: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(result: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return result


def _spin() -> Any:
    while True:
        pass


def _raise(result: Any) -> Any:
    raise LookupError("the disk\nis gone")


def _sleep(result: Any) -> Any:
    time.sleep(0.1)
    return result


# What happens to a culprit's result; the number says how often this script has run.
SCRIPTS: dict[str, Callable[[Any, int], Any]] = {
    "raise": lambda result, n: _raise(result),
    "die": lambda result, n: _die(result),
    "die once": lambda result, n: _die(result) if n == 1 else result,
    "die thrice": lambda result, n: _die(result) if n <= 3 else result,
    "stop once": lambda result, n: _stop(result) if n == 1 else result,
    "spin": lambda result, n: _spin(),
    "die, then raise": lambda result, n: _die(result) if n == 1 else _raise(result),
    "sleep": lambda result, n: _sleep(result),
    "nan": lambda upload, n: {"w": upload["w"] * nan},
    "nan later": lambda upload, n: {"w": upload["w"] * (1 if n == 1 else nan)},
    "one inf": lambda upload, n: {"w": torch.cat([upload["w"][1:], torch.tensor([-inf])])},
    "shape": lambda upload, n: {"w": upload["w"][None]},
    "dtype": lambda upload, n: {"w": upload["w"].double()},
    "name": lambda upload, n: {"v": upload["w"]},
    "extra": lambda upload, n: {**upload, "v": upload["w"]},
    "nothing at all": lambda upload, n: None,
    "no tensor": lambda upload, n: {"w": 3.0},
    "big": lambda upload, n: {"w": torch.ones(10_000)},
}


@dataclass(frozen=True)
class Scripted:
    """Client k adds k and noise to the server's numbers and counts its rounds; culprits follow a script."""

    update: str = "nothing"  # the script of a culprit's update
    predicting: str = "nothing"  # and of its prediction
    culprits: tuple[int, ...] = ()
    marker: str = os.devnull  # a file that grows by a byte whenever a script runs

    def init_server(self, task: Task, rng: Generator) -> Tree:
        return {"w": torch.randn(3, generator=rng)}

    def init_client(self, task: Task, rng: Generator) -> Tree:
        return {"seen": torch.tensor([0.0, inf, -inf])}

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        return server

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator
    ) -> tuple[Tree, Tree, Info]:
        k = who(data.x)
        noise = torch.randn(message["w"].shape, generator=rng)
        upload = self._follow(self.update, {"w": message["w"] + k + noise}, k)
        return upload, {"seen": client["seen"] + 1}, {"k": float(k)}

    def server_aggregate(self, task: Task, server: Tree, updates: Iterable[Update], rng: Generator) -> Tree:
        return trees.mean((u.upload, u.num_examples) for u in updates)

    def personalise(self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator) -> Tree:
        return {"w": message["w"], "seen": client["seen"]}

    def predict(self, task: Task, personal: Tree, x: Tensor, rng: Generator) -> Tensor:
        p = torch.sigmoid(personal["w"].mean() + 0.1 * personal["seen"][0]).expand(1, len(x))
        samples: Tensor = self._follow(self.predicting, torch.stack([p, 1 - p], dim=2), who(x))
        return samples

    def _follow(self, script: str, result: Any, k: int) -> Any:
        if script == "nothing" or k not in self.culprits:
            return result
        return SCRIPTS[script](result, _count(Path(self.marker)))


@dataclass(frozen=True)
class Hoarder:
    """A client keeps the message as it came, and sends its two parts up exchanged: no copies anywhere."""

    def init_server(self, task: Task, rng: Generator) -> Tree:
        return {"a": torch.randn(5, generator=rng), "b": torch.randn(5, generator=rng)}

    def init_client(self, task: Task, rng: Generator) -> Tree:
        return {"a": torch.zeros(5), "b": torch.zeros(5)}

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        return server

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator
    ) -> tuple[Tree, Tree, Info]:
        return {"b": message["a"], "a": message["b"]}, message, {}

    def server_aggregate(self, task: Task, server: Tree, updates: Iterable[Update], rng: Generator) -> Tree:
        return trees.mean((u.upload, u.num_examples) for u in updates)

    def personalise(self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator) -> Tree:
        return {"new": message, "old": client}

    def predict(self, task: Task, personal: Tree, x: Tensor, rng: Generator) -> Tensor:
        return torch.softmax(personal["new"]["a"][:2] + personal["old"]["b"][:2], dim=0).expand(1, len(x), 2)


def who(x: Tensor) -> int:
    """The client whose inputs these are."""
    return int(x[0, 0])


def line(algorithm: Algorithm, clients: int = 4, seed: int = 3) -> Setup:
    """Client k has 4 + k examples for training and 3 for testing, whose one feature is k."""

    def data(k: int, n: int) -> Data:
        return Data(x=torch.full((n, 1), float(k)), y=torch.arange(n) % 2)

    parts = tuple(ClientData(name=f"c{k}", train=data(k, 4 + k), test=data(k, 3)) for k in range(clients))
    return Setup(algorithm, Task(model=nn.Linear(1, 2), num_classes=2), parts, seed)


def noise(algorithm: Algorithm, model: nn.Module, shape: tuple[int, ...], clients: int = 4) -> Setup:
    """Clients of different sizes with random uint8 images (or float vectors) of three classes."""

    def data(n: int, *path: str | int) -> Data:
        rng = generator(0, *path)
        x = torch.randint(256, (n, *shape), generator=rng, dtype=torch.uint8)
        if len(shape) < 3:
            x = x / 128 - 1
        return Data(x=x, y=torch.randint(3, (n,), generator=rng))

    parts = tuple(
        ClientData(
            name=f"c{k}",
            train=data(9 + 5 * k, "train", k),
            test=data(6, "test", k),
            calibration=data(2 + k, "calibration", k) if k else None,
        )
        for k in range(clients)
    )
    task = Task(model=model, num_classes=3, label_prior=0.5, public=data(16, "public").x, num_clients=clients)
    return Setup(algorithm, task, parts, seed=5)
