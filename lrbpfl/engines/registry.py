"""Engines by name: ours, and what installed packages add by entry points."""

from collections.abc import Callable

from lrbpfl import plugins
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.options import Options
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput
from lrbpfl.states import States

# The entry point group: a name, and a callable that makes an engine of a setup, options and what clients keep.
GROUP = "lrbpfl.engines"

Make = Callable[[Setup, Options, States], Engine]

ENGINES: dict[str, Make] = {
    "processes": lambda setup, options, states: Processes(
        setup, options.workers, options.start, states, options.deadline
    ),
    "serial": lambda setup, options, states: Serial(setup, states),
}


def names() -> list[str]:
    """The names of all engines, ours first; packages are not loaded for it."""
    return plugins.names(GROUP, ENGINES)


def find(name: str) -> Make:
    """What makes the engine of this name, ours or an installed package's; only that package is loaded."""
    make: Make = plugins.find("engine", GROUP, name, ENGINES)
    if not callable(make):
        raise BadInput(f"{plugins.who('engine', GROUP, name)} is {make!r}, which cannot be called to make an engine")
    return make
