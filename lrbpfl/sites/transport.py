"""What carries letters between the hub and the sites; an adapter to a networking framework is one of these."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

Letter = dict[str, Any]  # plain values and tensors
What = Literal["open", "update", "evaluate", "close", "ping"]


class Lost(NamedTuple):
    """No answer came from a site, and why, in a few words."""

    reason: str


class Transport(Protocol):
    """Calls to the sites of one leg."""

    @property
    def sites(self) -> Sequence[str]:
        """The names of the sites that take part in this leg, in rising order."""

    def call(self, what: What, letters: Mapping[str, Letter], seconds: float) -> Iterator[tuple[str, Letter | Lost]]:
        """Send all letters now; the answers as they come, each site's once, after so many seconds `Lost` ones too."""
