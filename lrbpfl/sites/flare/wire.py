"""What went over the wire in a leg: counted where letters leave and answers arrive, for who wants to know."""

from collections.abc import Iterable, Mapping
from typing import Any

Traffic = dict[str, dict[str, Any]]  # by the kind of call


def empty() -> dict[str, Any]:
    """Nothing yet."""
    return {"letters": 0, "down": 0, "answers": 0, "up": 0, "sent": [], "told": []}


def count(traffic: Traffic, what: str, letter: Mapping[str, Any], *, up: bool) -> None:
    """Add a letter to a site, or with `up` its answer; names of its fields are kept, values never."""
    many, size, names = ("answers", "up", "told") if up else ("letters", "down", "sent")
    line = traffic.setdefault(what, empty())
    line[many] += 1
    line[size] += size_of(letter)
    line[names] = sorted({*line[names], *map(str, letter)})


def size_of(value: Any) -> int:
    """Bytes of what is in a letter, without what the network wraps it in."""
    if isinstance(value, Mapping):
        return sum(size_of(key) + size_of(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return int(getattr(value, "nbytes", 8))  # arrays and tensors know; numbers are small


def add(first: Traffic, second: Mapping[str, Any]) -> Traffic:
    """Two legs together."""
    found = {what: dict(line) for what, line in first.items()}
    for what, line in second.items():
        into = found.setdefault(what, empty())
        for name, value in line.items():
            into[name] = sorted({*into[name], *value}) if isinstance(value, list) else into[name] + value
    return found


def lines(traffic: Traffic) -> Iterable[str]:
    """A sentence for each kind of call, the largest first."""
    for what, line in sorted(traffic.items(), key=lambda item: -item[1]["down"] - item[1]["up"]):
        sent, told = (", ".join(line[names]) or "empty" for names in ("sent", "told"))
        yield (
            f"{what}: {line['letters']} letters to sites, {_units(line['down'])} ({sent}); "
            f"{line['answers']} answers, {_units(line['up'])} ({told})"
        )


def _units(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
