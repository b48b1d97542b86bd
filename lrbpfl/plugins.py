"""What installed packages add by entry points: found without loading anything, loaded by name."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lrbpfl.errors import BadInput, unknown


@cache
def offered(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """What is installed under a group, by name; nothing is loaded. More than one offer of a name is a clash."""
    offers: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        others = offers.get(point.name, ())
        if all((point.value, package(point)) != (other.value, package(other)) for other in others):
            offers[point.name] = (*others, point)
    return offers


def names(group: str, own: Mapping[str, Any]) -> list[str]:
    """Our own names, and then those that installed packages add."""
    return [*own, *sorted(name for name in offered(group) if name not in own)]


def find(what: str, group: str, name: str, own: Mapping[str, Any]) -> Any:
    """What goes by this name, our own or an installed package's; a name that is unknown or taken twice is refused."""
    offers = offered(group).get(name, ())
    if name not in own and not offers:
        raise unknown(what, name, names(group, own))
    if len(offers) + (name in own) > 1:
        owners = [f"the package {package(point)}" for point in offers]
        claims = " and ".join(["lrbpfl itself"] * (name in own) + owners)
        raise BadInput(f"{what} {name!r} is offered by {claims}: uninstall all but one, or rename its entry point")
    return _load(what, offers[0]) if offers else own[name]


def package(point: EntryPoint) -> str:
    """The name of the package that an entry point belongs to."""
    return point.dist.name if point.dist else "of unknown name"


def who(what: str, group: str, name: str) -> str:
    """An offered thing as the subject of a sentence."""
    return f"{what} {name!r} of the package {package(offered(group)[name][0])}"


@cache
def _load(what: str, point: EntryPoint) -> Any:
    subject = who(what, point.group, point.name)
    if not re.fullmatch(r"\w[\w.-]*", point.name, re.ASCII):  # names are typed, and directories are called by them
        raise BadInput(f"{subject} has a name that is not made of letters, digits, '.', '_' and '-'")
    try:
        return point.load()
    except Exception as error:  # whatever importing somebody's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{subject} cannot be loaded from {point.value!r}: {reason}") from error
