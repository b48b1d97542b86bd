"""Inputs that clients give to the server, where an algorithm asks for some and the task has none."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs, joined, take
from lrbpfl.engines.lazy import Roster, is_lazy, names_of
from lrbpfl.rng import numpy_generator

if TYPE_CHECKING:
    from lrbpfl.engines.work import ClientData, Setup

GIVERS = 100  # so many at most of clients that are loaded when they are needed


def with_public(setup: "Setup", fraction: float) -> "Setup":
    """This share of each training client's examples moved to the server, without labels; never a client's last one.

    Where that is none anywhere, each gives one; who has no other keeps it too. Where clients are loaded when they are
    needed, GIVERS of them, drawn by the seed, give their share, so that not all need be loaded for it.
    """
    sizes = {k: len(setup.client(k).train.y) for k in _givers(setup)}
    shares = {k: min(round(fraction * n), n - 1) for k, n in sizes.items()}
    if not any(shares.values()):
        shares = dict.fromkeys(shares, 1)
    public = joined([_parted(setup.clients[k].train, gone, setup.seed, k)[0] for k, gone in shares.items()])
    left = partial(_left, setup.clients, shares, setup.seed)
    clients: Sequence[ClientData] = (
        Roster(names_of(setup.clients), left, largest=getattr(setup.clients, "largest", None), cached=0)
        if is_lazy(setup.clients)
        else tuple(map(left, range(len(setup.clients))))
    )
    return setup._replace(task=setup.task._replace(public=public), clients=clients)


def _givers(setup: "Setup") -> Sequence[int]:
    if not is_lazy(setup.clients) or len(setup.training) <= GIVERS:
        return setup.training
    drawn = numpy_generator(setup.seed, "givers").choice(len(setup.training), GIVERS, replace=False)
    return sorted(drawn.tolist())


def _left(clients: Sequence["ClientData"], shares: Mapping[int, int], seed: int, k: int) -> "ClientData":
    """Client k after it gave."""
    client = clients[k]
    return client._replace(train=_parted(client.train, shares[k], seed, k)[1]) if k in shares else client


def _parted(data: Data, gone: int, seed: int, k: int) -> tuple[Inputs, Data]:
    """What goes and what stays; the last one does both."""
    x, y = data
    order = torch.from_numpy(numpy_generator(seed, "public", k).permutation(len(y)))
    kept = (order[gone:] if gone < len(y) else order).sort().values
    return take(x, order[:gone]), Data(x=take(x, kept), y=y[kept])
