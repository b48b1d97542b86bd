"""What a network takes in: one tensor, or several as a tuple or a dict, all with one row for each example."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lrbpfl import trees

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # a tuple: positional arguments; a dict: keyword arguments


def length(x: Inputs) -> int:
    """How many examples there are."""
    return len(_tensors(x)[0])


def take(x: Inputs, places: Tensor) -> Inputs:
    """The rows at these places."""
    return x[places] if isinstance(x, Tensor) else _mapped(lambda part: part[places], x)


def pieces(x: Inputs, size: int) -> Iterator[Inputs]:
    """The rows in their order, at most so many at a time, as views."""
    for start in range(0, max(length(x), 1), size):
        yield _mapped(lambda part, start=start: part[start : start + size], x)


def joined(parts: Sequence[Inputs]) -> Inputs:
    """The rows of all parts, one part after the other."""
    return _mapped(lambda *same: torch.cat(same), *parts)


def device_of(x: Inputs) -> torch.device:
    """Where the inputs lie."""
    return _tensors(x)[0].device


def describe(x: Inputs) -> str:
    """Shapes, without the rows, and dtypes: '(3, 32, 32) uint8', or 'ids (12,) int64, mask (12,) int64'."""
    names = [f"{name} " for name in x] if isinstance(x, dict) else [""] * len(_tensors(x))
    told = (f"{tuple(part.shape[1:])} {str(part.dtype).removeprefix('torch.')}" for part in _tensors(x))
    return ", ".join(name + one for name, one in zip(names, told, strict=True))


def fault(x: object) -> str | None:
    """What keeps something from being inputs, or None."""
    if not isinstance(x, Tensor | tuple | dict):
        return f"are a {type(x).__name__}: give a tensor, or a tuple or dict of tensors"
    parts = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, dict) else x)
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
        return f"hold {kinds}: give tensors with one row for each example"
    if len({len(part) for part in parts}) > 1:
        return f"have different numbers of rows: {', '.join(str(len(part)) for part in parts)}"
    return None


def _tensors(x: Inputs) -> list[Tensor]:
    return trees.leaves(x)


def _mapped(f: Callable[..., Tensor], x: Inputs, *others: Inputs) -> Inputs:
    found: Inputs = trees.tree_map(f, x, *others)
    return found
