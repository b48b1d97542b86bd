"""Which network a file belongs to: its name where it is one of ours, and a fingerprint of any."""

import copy
import hashlib
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lrbpfl.errors import BadInput
from lrbpfl.models import MODELS

Shape = tuple[int, ...]


def fingerprint(model: nn.Module) -> str:
    """A hash of a network's structure and of what no training changes (hex).

    Structure is the type and the settings of every layer, and every parameter's name, shape and type; buffers and
    frozen parameters count with their values. What a custom `forward` computes from them cannot be seen.
    """
    found = hashlib.sha256()
    for name, module in model.named_modules():
        settings = (
            module.extra_repr() if not list(module.children()) or type(module).__module__.startswith("torch.") else ""
        )
        found.update(f"{name}|{type(module).__qualname__}|{settings}\n".encode())
    for name, p in model.named_parameters():
        found.update(f"{name}|{tuple(p.shape)}|{p.dtype}|{p.requires_grad}\n".encode())
        if not p.requires_grad:
            found.update(_bytes(p))
    for name, buffer in model.named_buffers():
        found.update(f"{name}|{tuple(buffer.shape)}|{buffer.dtype}\n".encode())
        found.update(_bytes(buffer))
    return found.hexdigest()


def registered(model: nn.Module, num_classes: int, shape: Shape | None) -> str | None:
    """The name under which this package makes the same network for these classes and inputs, if there is one."""
    own = fingerprint(model)
    for name in MODELS if shape else ():
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
        if name not in MODELS or shape is None or prod(shape) > 2**20 or num_classes > 2**16:
            raise BadInput(
                f"{where} cannot be used: it names a model that this version does not have, {str(name)[:40]!r}"
            )
        model = _made(name, num_classes, shape)
    if model is None:
        raise BadInput(
            f"{where} belongs to a model of your own: give it, as in lrbpfl.load(path, model=model), "
            "or --model package.module:callable on the command line"
        )
    model = copy.deepcopy(model).eval()  # what its owner does with it later changes nothing here
    if fingerprint(model) != about["fingerprint"]:
        raise BadInput(f"{where} belongs to another model: its layers, or parameters that are never trained, differ")
    return model


def _made(name: str, num_classes: int, shape: Shape) -> nn.Module | None:
    try:
        with torch.random.fork_rng(devices=[]):  # making a network draws its first weights
            return MODELS[name](num_classes, shape).eval()
    except (BadInput, RuntimeError, ValueError):
        return None


def _bytes(leaf: Tensor) -> bytes:
    return leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
