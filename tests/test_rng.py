"""Streams are decided by their address alone."""

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lrbpfl.rng import Address, generator, numpy_generator

ADDRESSES: list[tuple[int, tuple[Address, ...]]] = [
    (0, ()),
    (1, ()),
    (0, ("update",)),
    (0, ("update", 0)),
    (0, ("update", 0, 0)),
    (0, ("update", 0, 1)),
    (0, ("update", 1, 0)),
    (0, ("update", 10)),
    (0, ("update", "10")),
    (0, ("update1", 0)),
    (0, ("update/0",)),
    (0, ("update'/'0",)),
    (1, ("update", 0, 1)),
    (-1, ("update", 0, 1)),
    (2**70, ()),
]


def numbers(seed: int, *path: Address) -> list[float]:
    return [*torch.rand(4, generator=generator(seed, *path)).tolist(), *numpy_generator(seed, *path).random(4)]


@pytest.mark.parametrize(("seed", "path"), ADDRESSES)
def test_same_address_same_stream(seed: int, path: tuple[Address, ...]) -> None:
    assert numbers(seed, *path) == numbers(seed, *path)


def test_different_address_different_stream() -> None:
    streams = [numbers(seed, *path) for seed, path in ADDRESSES]
    for a, b in itertools.combinations(streams, 2):
        assert a[:4] != b[:4] and a[4:] != b[4:]


def test_the_order_of_calls_plays_no_part() -> None:
    forwards = {address: numbers(address[0], *address[1]) for address in ADDRESSES}
    first = generator(0, "held")
    backwards = {address: numbers(address[0], *address[1]) for address in reversed(ADDRESSES)}
    assert forwards == backwards
    assert torch.equal(torch.rand(3, generator=first), torch.rand(3, generator=generator(0, "held")))


def test_global_seeds_play_no_part() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = numbers(0, "a")
        torch.manual_seed(2)
        assert numbers(0, "a") == one


def test_global_state_is_left_alone() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)
    numbers(0, "a")
    assert torch.equal(torch.get_rng_state(), before)
    assert str(np.random.get_state(legacy=False)) == str(numpy_before)


def test_an_integer_is_an_integer_whoever_made_it() -> None:
    three: Any = np.int64(3)
    assert numbers(0, "update", three) == numbers(0, "update", 3)
    assert numbers(three, "update") == numbers(3, "update")


def test_the_address_is_hashed_the_same_everywhere() -> None:
    """The hash of a Python string changes with the process; ours must not, nor with the version."""
    digest = int.from_bytes(hashlib.blake2b(b"3/'update'/1", digest_size=8).digest(), "little")
    assert numpy_generator(3, "update", 1).integers(2**62) == np.random.default_rng(digest).integers(2**62)
    assert generator(3, "update", 1).initial_seed() == digest % 2**63
