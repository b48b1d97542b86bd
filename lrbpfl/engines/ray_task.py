"""What runs at the nodes of a Ray cluster: one client's job. Bytes and arrays travel, which Ray need not understand."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Timer
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.engines.conduct import attempt, told
from lrbpfl.engines.launch import Parcel, from_bytes, pack, to_bytes, unpack
from lrbpfl.engines.pool import Answer
from lrbpfl.engines.slots import Place, read, room, write
from lrbpfl.engines.work import Evaluated, Setup, Trained, evaluate_client, keep_memory, update_client
from lrbpfl.errors import BadInput
from lrbpfl.trees import Tree

IDLE = 60.0  # seconds after which a worker without work forgets its setup, so that the node's memory is free

_known: dict[str, Setup | str] = {}  # in a worker: the setup by its name in Ray's store, or why it cannot be read
_forgetting: list[Timer] = []


class Wrapped(NamedTuple):
    """A tree on its way: its tensors in one block, and all else as bytes."""

    rest: bytes
    block: Any  # (bytes,) uint8


@dataclass(frozen=True)
class Common:
    """Stands for a tensor that several messages hold: where it is among those."""

    place: int


class Work(NamedTuple):
    """One call for one client, with what it needs beside the setup."""

    what: str  # "update" or "evaluate"
    k: int
    t: int
    message: Tree
    state: Tree


def wrap(tree: Tree) -> Wrapped:
    """For another process; nothing of it is shared with this one."""
    tensors = tuple(leaf for leaf in trees.leaves(tree) if isinstance(leaf, Tensor))
    block = torch.zeros(max(room(tensors), 1), dtype=torch.uint8)
    with torch.no_grad():
        places = iter(write(tensors, block))
    rest = trees.tree_map(lambda leaf: next(places) if isinstance(leaf, Tensor) else leaf, tree)
    return Wrapped(to_bytes(rest), block.numpy())


def unwrap(wrapped: Wrapped, common: Wrapped | None = None) -> Tree:
    """The inverse of `wrap`, and of `common_part` where something is common.

    Copies: Ray's memory cannot be written to or kept for long, and where numbers lie can decide the last bit.
    """
    own = _tensor(wrapped.block)
    shared: Tree = () if common is None else read(from_bytes(common.rest), _tensor(common.block))

    def found(leaf: Any) -> Any:
        if isinstance(leaf, Common):
            return shared[leaf.place].clone()
        return read(leaf, own).clone() if isinstance(leaf, Place) else leaf

    return trees.tree_map(found, from_bytes(wrapped.rest))


def common_part(messages: Mapping[int, Tree]) -> tuple[tuple[Tensor, ...], dict[int, Tree]]:
    """The tensors that several messages hold, once, and the messages with their places instead."""
    holders: dict[tuple[object, ...], int] = {}
    for message in messages.values():
        for key in set(map(_identity, trees.leaves(message))):
            holders[key] = holders.get(key, 0) + 1
    common: list[Tensor] = []
    places: dict[tuple[object, ...], Common] = {}

    def placed(leaf: Tensor) -> Tensor | Common:
        key = _identity(leaf)
        if holders[key] == 1:
            return leaf
        if key not in places:
            places[key] = Common(len(common))
            common.append(leaf)
        return places[key]

    rest = {k: trees.tree_map(placed, message) for k, message in messages.items()}
    return tuple(common), rest


def _identity(leaf: Tensor) -> tuple[object, ...]:
    return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.device


def _tensor(block: Any) -> Tensor:
    with warnings.catch_warnings():  # what lies in Ray's store cannot be written to: nobody here does
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(block)


def wrap_setup(setup: Setup) -> tuple[dict[str, str], Any, Any]:
    """The setup for all workers: what it was made with, and its parcel as arrays, which a node's workers share."""
    parcel = pack(setup)
    return versions(), np.frombuffer(parcel.rest, dtype=np.uint8), parcel.block.numpy()


def versions() -> dict[str, str]:
    """Of what decides the bits; Ray compares its own and Python's."""
    return {"torch": torch.__version__, "NumPy": np.__version__}


def run(place: list[Any], common: Wrapped | None, load: Wrapped) -> Wrapped:
    """Do a piece of work at a node; the place of the setup is in a list, so that Ray leaves it where it is."""
    for timer in _forgetting:
        timer.cancel()
    known = _setup_at(place[0])
    try:
        return wrap(known if isinstance(known, str) else _answer(known, unwrap(load, common)))
    except Exception as error:  # of classes that cannot be sent
        return wrap(told(error))
    finally:
        _forgetting[:] = [Timer(IDLE, _known.clear)]
        _forgetting[0].daemon = True
        _forgetting[0].start()


def _answer(setup: Setup, work: Work) -> Answer:
    what, k, t, message, state = work
    do: Callable[..., Trained | Evaluated] = evaluate_client if what == "evaluate" else update_client
    return attempt(lambda: do(setup, message, state, t, k))


def _setup_at(place: Any) -> Setup | str:
    """The setup, which a worker reads once."""
    import ray

    name = place.hex()
    if name not in _known:
        torch.set_num_threads(1)
        keep_memory()
        _known.clear()
        _known[name] = _read_setup(*ray.get(place))
    return _known[name]


def _read_setup(made_with: dict[str, str], rest: Any, block: Any) -> Setup | str:
    """The setup, or why it cannot be read here, which is then the answer to every job."""
    try:
        for name, version in made_with.items():
            if versions()[name] != version:
                raise BadInput(f"{name} {versions()[name]} is installed there, not {version}")
        return unpack(Parcel(rest.tobytes(), _tensor(block)))
    except Exception as error:  # e.g. a module that only the driver finds
        return f"its worker cannot read the setup: {told(error)}"
