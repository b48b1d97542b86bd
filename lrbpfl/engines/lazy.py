"""Clients that are loaded when they are needed, so that a federation may have more of them than memory holds."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from lrbpfl import trees

if TYPE_CHECKING:
    from lrbpfl.engines.work import ClientData

CACHED = 128 * 2**20  # bytes of clients that a process keeps in memory
OVERHEAD = 4096  # bytes that a client takes beside the numbers of its tensors


class Roster(Sequence["ClientData"]):
    """Clients by number, each loaded by `load(k)` when it is needed; the most recently used ones stay in memory.

    To another process goes how they are loaded, never what was loaded: every worker loads its own.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[int], "ClientData"],
        *,
        largest: int | None = None,  # who has the most examples, where that is known
        sample: int = 0,  # who stands for all where one is looked at
        cached: int = CACHED,
    ) -> None:
        self.names, self.largest, self.sample = names, largest, sample
        self._load, self._limit, self._used = load, cached, 0
        self._cache: OrderedDict[int, ClientData] = OrderedDict()

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, k: int) -> "ClientData": ...
    @overload
    def __getitem__(self, k: slice) -> list["ClientData"]: ...
    def __getitem__(self, k: int | slice) -> "ClientData | list[ClientData]":
        places = range(len(self))[k]
        return [self._get(place) for place in places] if isinstance(places, range) else self._get(places)

    def _get(self, k: int) -> "ClientData":
        if k in self._cache:
            self._cache.move_to_end(k)
            return self._cache[k]
        client = self._load(k)
        self._cache[k] = client
        self._used += _size(client)
        while self._used > self._limit and self._cache:  # one that is larger than the limit is not kept at all
            self._used -= _size(self._cache.popitem(last=False)[1])
        return client

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": OrderedDict(), "_used": 0}


def is_lazy(clients: Sequence["ClientData"]) -> bool:
    """Whether to look at a client may mean to load it: then it is checked when it is seen, and not before."""
    return not isinstance(clients, tuple | list)


def names_of(clients: Sequence["ClientData"]) -> Sequence[str]:
    """Everybody's name, for which nobody need be loaded who is on a roster."""
    return clients.names if isinstance(clients, Roster) else [client.name for client in clients]


def _size(client: "ClientData") -> int:
    return trees.nbytes(tuple(client[1:])) + OVERHEAD
