"""Clients that do what no client should, and what becomes of it by rights."""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from lrbpfl.algorithms.protocol import Info, Task
from lrbpfl.core.descent import Data
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, who


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this can be said")


def _raise(error: BaseException) -> None:
    raise error


def _signal(args: dict[str, Any], out: dict[str, Any]) -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        raise OSError("somebody knocked") from None


def _upload(**change: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda args, out: out["upload"].update({name: f(out["upload"]["w"]) for name, f in change.items()})


def _state(f: Callable[[Tensor], Any], name: str = "seen") -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda args, out: out.update(state={name: f(out["state"]["seen"])})


# What a rogue does with its arguments and its results, and how its failure begins.
FAIL: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "exit": (lambda args, out: _raise(SystemExit(0)), "SystemExit: 0"),
    "interrupt": (lambda args, out: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
    "generator": (lambda args, out: _raise(GeneratorExit()), "GeneratorExit"),
    "mute": (lambda args, out: _raise(Mute()), "Mute"),
    "sparse": (_upload(w=Tensor.to_sparse), "BadInput: its upload holds w, which is sparse"),
    "array": (_state(Tensor.numpy), "BadInput: what it keeps holds seen of type ndarray"),
    "other keys": (_state(lambda s: s, "sawn"), "BadInput: what it keeps is not what it kept before: its tensors are"),
    "other shape": (_state(lambda s: s[:2]), "BadInput: what it keeps is not what it kept before: seen has shape (2,)"),
    "bfloat16": (_state(Tensor.bfloat16), "BadInput: what it keeps is not what it kept before: seen has dtype"),
    "nan": (_state(lambda s: s * torch.nan), "BadInput: what it keeps is not what it kept before: seen holds numbers"),
    "no dict": (lambda args, out: out.update(info=[1.0]), "BadInput: its info is of type list"),
}

# What is as if it had not been done.
HARMLESS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "message": lambda args, out: args["message"]["w"].fill_(9.0),
    "message's keys": lambda args, out: args["message"].clear(),
    "state": lambda args, out: args["client"]["seen"].fill_(9.0),
    "data": lambda args, out: args["data"].x.add_(1) + args["data"].y.fill_(0).sum(),
    "data by numpy": lambda args, out: args["data"].x.numpy().fill(3.0),
    "model": lambda args, out: args["task"].model.weight.data.fill_(9.0),
    "model's flags": lambda args, out: args["task"].model.requires_grad_(False),
    "model's size": lambda args, out: args["task"].model.weight.data.resize_(1, 1),
    "dtype of all": lambda args, out: torch.set_default_dtype(torch.float64),
    "gradients of all": lambda args, out: torch.set_grad_enabled(False),
    "threads": lambda args, out: torch.set_num_threads(3),
    "seeds": lambda args, out: (torch.manual_seed(0), np.random.seed(0), random.seed(0)),
    "handler": lambda args, out: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "gradient": lambda args, out: (
        _upload(w=Tensor.requires_grad_)(args, out),
        _state(Tensor.requires_grad_)(args, out),
    ),
}

# What makes a number of its own, which is the same in every engine.
DICE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}


def _roll(name: str) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    return lambda args, out: out.update(upload={"w": out["upload"]["w"] + DICE[name]()})


WAYS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "well": lambda args, out: None,
    **{name: way for name, (way, _) in FAIL.items()},
    **HARMLESS,
    **{name: _roll(name) for name in DICE},
    "signal": _signal,
    "infos": lambda args, out: out.update(info=ODD),
}

ODD: Any = {
    "half": np.float32(0.5),
    "two": torch.tensor(2.0, requires_grad=True),
    "one": np.array([1]),
    "yes": True,
    "word": "3.0",
    "none": None,
    "huge": 10**400,
    "nan": float("nan"),
    "complex": 1j,
    7: 7,
    "bell\a" + 500 * "x": 1,
}


@dataclass(frozen=True)
class Rogue(Scripted):
    """Client 1 does its work, and then something that it should not."""

    way: str = "well"

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator
    ) -> tuple[Tree, Tree, Info]:
        rogue = who(data.x) == 1
        upload, state, info = super().client_update(task, message, client, data, rng)
        out: dict[str, Any] = {"upload": upload, "state": state, "info": info}
        if rogue:
            WAYS[self.way]({"task": task, "message": message, "client": client, "data": data}, out)
        weight = task.model.weight
        assert isinstance(weight, Tensor)
        told = {"weight": float(weight.detach().sum()), "flag": weight.requires_grad, "grad": torch.is_grad_enabled()}
        seen = {"dtype": torch.tensor(1.0).element_size(), "threads": torch.get_num_threads()}
        return out["upload"], out["state"], out["info"] if rogue else {**info, **told, **seen}


@dataclass(frozen=True)
class Meddler(Scripted):
    """Everybody changes in place what it is given to make and try its own model."""

    def personalise(self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator) -> Tree:
        message["w"].add_(who(data.x))
        data.x.fill_(99.0)
        client["seen"].add_(5)
        return {"w": message["w"], "seen": client["seen"]}

    def predict(self, task: Task, personal: Tree, x: Tensor, rng: Generator) -> Tensor:
        samples = super().predict(task, personal, x, rng) * (0.5 + torch.rand(1) / 100)
        x.fill_(7.0)
        return samples / samples.sum(2, keepdim=True)


@dataclass(frozen=True)
class Stillborn(Scripted):
    """No state can be made for some clients."""

    def init_client(self, task: Task, rng: Generator) -> Tree:
        if torch.rand(1, generator=rng) < 0.5:
            raise SystemExit(3)
        return super().init_client(task, rng)


@dataclass(frozen=True)
class Drawn(Scripted):
    """First states that are drawn from everybody's dice, want gradients and are in bfloat16."""

    def init_client(self, task: Task, rng: Generator) -> Tree:
        return {"seen": (torch.rand(3) + float(np.random.rand()) + random.random()).bfloat16().requires_grad_()}
