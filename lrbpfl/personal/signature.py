"""What a model takes in: recorded from the data it was trained on, and demanded of what it is shown later."""

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrbpfl.errors import BadInput

Inputs = Any  # a tensor, or a tuple or dict of tensors with the same first dimension
LARGEST = 2**27  # numbers in one example: no file makes us ask for more memory
DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.uint8, torch.int64)}


def signature(x: Inputs) -> Any:
    """The type and the shape of one example, as JSON: of each input where there are several."""
    if isinstance(x, dict):
        return {"named": {name: signature(part) for name, part in x.items()}}
    if isinstance(x, tuple):
        return {"several": [signature(part) for part in x]}
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape[1:])}


def shape_of(described: Any) -> tuple[int, ...] | None:
    """The shape of one example of a single input; None where there are several."""
    return tuple(described["shape"]) if "shape" in described else None


def checked(described: Any, where: str) -> Any:
    """A signature that was read from a file, if it is one."""
    parts: list[Any] = [described]
    if isinstance(described, dict) and set(described) == {"named"} and isinstance(described["named"], dict):
        parts = list(described["named"].values())
    if isinstance(described, dict) and set(described) == {"several"} and isinstance(described["several"], list):
        parts = described["several"]
    for part in parts:
        _check_single(part, where)
    if not parts or sum(prod(part["shape"]) for part in parts) > LARGEST:
        raise BadInput(f"{where} cannot be used: its model takes inputs of an impossible shape")
    return described


def _check_single(described: Any, where: str) -> None:
    shape, kind = (described.get(key) if isinstance(described, dict) else None for key in ("shape", "dtype"))
    if not isinstance(shape, list) or not isinstance(kind, str) or kind not in DTYPES:
        raise BadInput(f"{where} cannot be used: its description does not say what inputs the model takes")
    if not all(type(size) is int and 0 < size < 2**31 for size in shape) or len(shape) > 8:
        raise BadInput(f"{where} cannot be used: its model takes inputs of an impossible shape")


def example(described: Any, rows: int = 1) -> Inputs:
    """So many examples of zeros."""
    if "named" in described:
        return {name: example(part, rows) for name, part in described["named"].items()}
    if "several" in described:
        return tuple(example(part, rows) for part in described["several"])
    return torch.zeros(rows, *described["shape"], dtype=DTYPES[described["dtype"]])


def as_inputs(given: Any, described: Any, what: str = "the inputs") -> Inputs:
    """What somebody gave, as tensors of this signature; refused in a sentence if they cannot be."""
    if "named" in described:
        wanted = described["named"]
        if not isinstance(given, dict) or set(given) != set(wanted):
            raise BadInput(f"{what} must be a dict of {', '.join(wanted)}")
        found = {name: as_inputs(given[name], part, f"input {name!r}") for name, part in wanted.items()}
        return _alike(found, list(found.values()))
    if "several" in described:
        wanted = described["several"]
        if not isinstance(given, tuple) or len(given) != len(wanted):
            raise BadInput(f"{what} must be a tuple of {len(wanted)} arrays")
        parts = tuple(
            as_inputs(part, own, f"input {i}") for i, (part, own) in enumerate(zip(given, wanted, strict=True))
        )
        return _alike(parts, list(parts))
    return _tensor(given, described, what)


def _alike(whole: Inputs, parts: list[Tensor]) -> Inputs:
    if len({len(part) for part in parts}) > 1:
        raise BadInput(f"the inputs have {', '.join(str(len(part)) for part in parts)} rows: give as many of each")
    return whole


def _tensor(given: Any, described: Any, what: str) -> Tensor:
    wanted, shape = DTYPES[described["dtype"]], tuple(described["shape"])
    try:
        found = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(_array(given))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{what} cannot be read as an array of numbers: {error}") from None
    if found.shape[1:] != shape or not found.ndim:
        raise BadInput(
            f"{what} have the shape {tuple(found.shape)}, and the model takes {('n', *shape)}".replace("'n'", "n")
        )
    if wanted == torch.uint8 and found.dtype != torch.uint8 and found.numel():
        whole = not found.is_floating_point() or bool((found == found.round()).all())
        if not whole or found.min() < 0 or found.max() > 255:
            raise BadInput(f"{what} are {found.dtype}, and the model takes uint8 images: whole numbers from 0 to 255")
    if not wanted.is_floating_point and found.is_floating_point() and wanted != torch.uint8:
        raise BadInput(f"{what} are {found.dtype}, and the model takes whole numbers ({described['dtype']})")
    found = found.to(wanted)
    if found.is_floating_point() and not bool(found.isfinite().all()):
        row = int((~found.flatten(1).isfinite().all(1)).nonzero()[0, 0]) if found.ndim > 1 else 0
        raise BadInput(f"row {row} of {what} holds a number that is not finite")
    return found


def _array(given: Any) -> np.ndarray[Any, np.dtype[Any]]:
    found = np.asarray(given.to_numpy() if hasattr(given, "to_numpy") else given)
    if found.dtype.kind not in "fiub":
        raise ValueError(f"they are of type {found.dtype}")
    return np.ascontiguousarray(found.astype(found.dtype.newbyteorder("=")))
