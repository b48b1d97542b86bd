"""Which network a file belongs to: its name where it is one of ours, and a fingerprint of any."""

import copy
import hashlib
import inspect
import re
from typing import Any

import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.errors import BadInput
from lrbpfl.models import make, names

Shape = tuple[int, ...]
_PLACE = re.compile(r" at 0x[0-9a-f]+")  # in memory, in an object's text


def fingerprint(model: nn.Module) -> str:
    """A hash of a network's structure and of what no training changes (hex).

    Structure is the type and the settings of every layer, and every parameter's name, shape and type; buffers and
    frozen parameters count with their values. What a custom `forward` computes from them cannot be seen.
    """
    found = hashlib.sha256()
    for name, module in model.named_modules():
        found.update(f"{name}|{type(module).__qualname__}|{_settings(module)}\n".encode())
    for name, p in model.named_parameters():
        found.update(f"{name}|{tuple(p.shape)}|{p.dtype}|{p.requires_grad}\n".encode())
        if not p.requires_grad:
            found.update(trees.raw(p))
    for name, buffer in model.named_buffers():
        found.update(f"{name}|{tuple(buffer.shape)}|{buffer.dtype}\n".encode())
        found.update(trees.raw(buffer))
    return found.hexdigest()


def _settings(module: nn.Module) -> str:
    """How a layer was made: what torch tells of it, and attributes that are called as arguments of its constructor.

    Other attributes may be counters or caches, and change while a model is used.
    """
    arguments = inspect.signature(type(module).__init__).parameters
    own = {name: _plain(value) for name, value in vars(module).items() if name in arguments}
    return f"{_PLACE.sub('', module.extra_repr())}|{sorted((k, v) for k, v in own.items() if v is not None)}"


def _plain(value: Any) -> str | None:
    """A setting as text that is the same in every process; None for what is not plain."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return str([_plain(part) for part in value])
    return getattr(value, "__qualname__", None) if callable(value) else None


def registered(model: nn.Module, num_classes: int, shape: Shape | None) -> str | None:
    """The name under which the same network is made for these classes and inputs, if there is one."""
    own = fingerprint(model)
    for name in names() if shape else ():
        made = None if name == "auto" else _made(name, num_classes, shape or ())
        if made is not None and fingerprint(made) == own:
            return name
    return None


def describe(model: nn.Module, num_classes: int, shape: Shape | None) -> dict[str, Any]:
    """What a file says of its network."""
    return {"name": registered(model, num_classes, shape), "fingerprint": fingerprint(model)}


def restored(about: Any, num_classes: int, shape: Shape | None, model: nn.Module | None, where: str) -> nn.Module:
    """The network that a file belongs to: the one given, if it is the same, or one of ours, made by name."""
    if not isinstance(about, dict) or not isinstance(about.get("fingerprint"), str):
        raise BadInput(f"{where} cannot be used: its description does not say which model it belongs to")
    name = about.get("name")
    if model is None and name is not None:
        model = _made(name, num_classes, shape) if isinstance(name, str) and name in names() and shape else None
        if model is None:
            raise BadInput(f"{where} cannot be used: nothing here makes the model it names, {str(name)[:40]!r}")
    if model is None:
        raise BadInput(
            f"{where} belongs to a model of your own: give it, as in lrbpfl.load(path, model=model), "
            "or --model package.module:callable on the command line"
        )
    model = copy.deepcopy(model).eval()  # what its owner does with it later changes nothing here
    if fingerprint(model) != about["fingerprint"]:
        raise BadInput(
            f"{where} belongs to another model: its layers, their settings or parameters that are never trained differ"
        )
    return model


def _made(name: str, num_classes: int, shape: Shape) -> nn.Module | None:
    """A network by name; None if there is none for such inputs, or it would be very large."""
    try:
        with torch.random.fork_rng(devices=[]):  # making a network draws its first weights
            return make(name, num_classes, shape).eval()
    except (BadInput, RuntimeError, ValueError):
        return None
