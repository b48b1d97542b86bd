"""Natural order: numbers inside names count by their value, so that site-2 comes before site-10."""

import re
from collections.abc import Iterable

Key = tuple[tuple[str | tuple[int, str], ...], str]


def natural_key(name: str) -> Key:
    """A key to sort names by; text and numbers alternate in it, text first, and the name itself breaks ties."""
    pieces = re.split(r"([0-9]+)", name.casefold())
    return tuple(_value(piece) if i % 2 else piece for i, piece in enumerate(pieces)), name


def _value(digits: str) -> tuple[int, str]:
    """What orders digits as the number they spell, however many there are."""
    short = digits.lstrip("0")
    return len(short), short


def natural_order(names: Iterable[str]) -> list[str]:
    """The names in natural order."""
    return sorted(names, key=natural_key)
