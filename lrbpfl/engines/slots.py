"""Trees in a block of shared memory: tensors lie in the block, their places travel."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.trees import Tree

ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the block."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def room(tree: Tree) -> int:
    """The bytes that `write` needs."""
    return sum(_aligned(trees.nbytes(leaf)) for leaf in trees.leaves(tree))


def write(tree: Tree, slot: Tensor) -> Tree:
    """Copy the tensors into the block (bytes,), one after the other; a tree of their places."""
    end = 0

    def put(leaf: Tensor) -> Place:
        nonlocal end
        place = Place(offset=end, dtype=leaf.dtype, shape=tuple(leaf.shape))
        _view(place, slot).copy_(leaf.detach())
        end += _aligned(trees.nbytes(leaf))
        return place

    return trees.tree_map(put, tree)


def read(places: Tree, slot: Tensor) -> Tree:
    """The tensors at these places, as views of the block; leaves that are no places stay as they are."""
    return trees.tree_map(lambda leaf: _view(leaf, slot) if isinstance(leaf, Place) else leaf, places)


@dataclass(frozen=True)
class Foreign:
    """The bytes of a tensor whose numbers NumPy does not know, such as bfloat16."""

    raw: np.ndarray[Any, Any]
    dtype: torch.dtype


def to_arrays(tree: Tree) -> Tree:
    """The tree with NumPy arrays for tensors: plain bytes in a pipe, whatever the platform."""

    def array(leaf: Tensor) -> Any:
        try:
            return leaf.detach().numpy()
        except TypeError:
            return Foreign(leaf.detach().contiguous().unsqueeze(-1).view(torch.uint8).numpy(), leaf.dtype)

    return trees.tree_map(lambda leaf: array(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def to_tensors(tree: Tree) -> Tree:
    """The inverse of `to_arrays`; copies, aligned like torch's own, as where numbers lie can decide the last bit."""

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, Foreign):
            return torch.from_numpy(leaf.raw).clone().view(leaf.dtype).squeeze(-1)
        return torch.from_numpy(leaf).clone() if isinstance(leaf, np.ndarray) else leaf

    return trees.tree_map(tensor, tree)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(place: Place, slot: Tensor) -> Tensor:
    size = int(np.prod(place.shape)) * place.dtype.itemsize
    return slot[place.offset : place.offset + size].view(place.dtype).view(place.shape)
