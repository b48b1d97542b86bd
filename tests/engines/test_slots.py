"""Trees in a block of memory come out as they went in."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrbpfl import trees
from lrbpfl.engines.slots import ALIGNMENT, Place, read, room, to_arrays, to_tensors, write

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16]


class Pair(NamedTuple):
    left: Any
    right: Any


def mixed() -> Pair:
    """Every dtype, a scalar, empty tensors, a transposed one, and numbers that are none."""
    return Pair(
        left={
            "bytes": torch.arange(5, dtype=torch.uint8),
            "double": torch.tensor([[1.5, float("inf")], [float("nan"), -0.0]], dtype=torch.float64),
            "yes": torch.tensor([True, False, True]),
            "nothing": None,
        },
        right=(
            torch.tensor(7),
            torch.empty(0, 3),
            (torch.arange(6.0).reshape(2, 3).T, torch.empty(0, dtype=torch.int64)),
        ),
    )


def block(size: int) -> Tensor:
    shared: Tensor = torch.zeros(size, dtype=torch.uint8).share_memory_()
    return shared


def test_a_mixed_tree_comes_back_bit_for_bit() -> None:
    slot = block(room(mixed()))
    back = read(write(mixed(), slot), slot)
    assert isinstance(back, Pair)
    assert back.left["nothing"] is None
    assert trees.equal(back, mixed())


TENSORS = st.builds(
    lambda dtype, shape: (torch.arange(torch.Size(shape).numel()).reshape(shape) % 3).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.recursive(TENSORS, lambda child: st.lists(child, max_size=3).map(tuple), max_leaves=8), st.integers(0, 100))
def test_any_tree_fits_into_the_room_it_asks_for(tree: Any, spare: int) -> None:
    slot = block(room(tree) + spare)
    assert trees.equal(read(write(tree, slot), slot), tree)


def test_every_tensor_begins_on_a_cache_line() -> None:
    slot = block(room(mixed()))
    places = trees.leaves(write(mixed(), slot))
    assert len(places) == 7
    assert all(place.offset % ALIGNMENT == 0 for place in places)
    filled = [leaf for leaf in trees.leaves(read(write(mixed(), slot), slot)) if leaf.numel()]
    assert all(leaf.data_ptr() % ALIGNMENT == 0 for leaf in filled)


def test_reading_copies_nothing() -> None:
    slot = block(256)
    places = write({"w": torch.ones(3)}, slot)
    w = read(places, slot)["w"]
    write({"w": torch.full((3,), 5.0)}, slot)
    assert w.tolist() == [5.0, 5.0, 5.0]
    assert w.data_ptr() == slot.data_ptr()


def test_tensors_do_not_overlap() -> None:
    slot = block(room(mixed()))
    places: list[Place] = trees.leaves(write(mixed(), slot))
    ends = [(p.offset, p.offset + p.dtype.itemsize * torch.Size(p.shape).numel()) for p in places]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))


def test_a_block_too_small_is_an_error_and_not_half_a_tensor() -> None:
    with pytest.raises(RuntimeError):
        write({"w": torch.ones(100)}, block(128))


def test_leaves_that_are_no_places_stay_as_they_are() -> None:
    array = torch.ones(2).numpy()
    assert read({"w": array}, block(64))["w"] is array


def test_arrays_and_back_keep_the_bits() -> None:
    tree = mixed()._replace(right=(torch.tensor(7), torch.arange(6.0).reshape(2, 3).T))
    arrays = to_arrays(tree)
    assert not any(isinstance(leaf, Tensor) for leaf in trees.leaves(arrays))
    assert trees.equal(to_tensors(arrays), tree)
