"""The command `keys`: what can be set."""

import json
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lrbpfl.experiments.keys import find_keys
from lrbpfl.sites.holdings import SETTINGS, SiteSection
from lrbpfl.sites.job import SitesSection


def show(which: str | None, *, as_json: bool) -> None:
    """A table for each section and each algorithm."""
    found = find_keys(which, {"sites": SitesSection, SETTINGS: SiteSection})
    if as_json:
        print(json.dumps([key._asdict() for key in found]))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    for place, keys in groupby(found, lambda key: key.name.rpartition(".")[0]):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=place, title_justify="left")
        table.add_column("key", no_wrap=True)
        for heading in ("default", "takes", "meaning"):
            table.add_column(heading, overflow="fold", ratio=3 if heading == "meaning" else 1)
        for key in keys:
            table.add_row(
                *map(escape, (key.name.rpartition(".")[2], _shown(key.default), key.takes)),
                escape(key.meaning.replace("None:", "not set:")),  # TOML has no None
            )
        console.print(table)
    console.print("Set with --set KEY=VALUE or in a TOML file; in `run`, an algorithm's fields are algorithm.KEY.")


def _shown(default: Any) -> str:
    if default is None:
        return "not set"
    return default if isinstance(default, str) else json.dumps(default)
