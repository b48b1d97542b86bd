"""Randomness with an address: a seed and a path decide the stream, never the order of calls."""

import hashlib

import numpy as np
import torch

Address = str | int


def _digest(seed: int, path: tuple[Address, ...]) -> int:
    """Sixty-four bits that depend on every part of the address and on nothing else."""
    text = "/".join(repr(part if isinstance(part, str) else int(part)) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *path: Address) -> torch.Generator:
    """A fresh CPU generator for this address, e.g. ``generator(seed, "update", t, k)``."""
    # Torch's CPU generator keeps 32 bits of its seed: two of many addresses may share a stream, never a run of them.
    return torch.Generator().manual_seed(_digest(seed, path) % 2**63)


def numpy_generator(seed: int, *path: Address) -> np.random.Generator:
    """The same rule for NumPy, where index arithmetic lives."""
    return np.random.default_rng(_digest(seed, path))
