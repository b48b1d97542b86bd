"""Data and a job for a federation that shows itself: fifteen speakers at three sites, each with its own file."""

import csv
from collections.abc import Mapping
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from lrbpfl.sites.holdings import SETTINGS
from lrbpfl.sites.job import write

FEATURES = tuple(f"f{i}" for i in range(10))
CLIENT, LABEL = "speaker", "vowel"
SETTING = f'data = "speakers.csv"\nclient_column = "{CLIENT}"\nlabel_column = "{LABEL}"\n'


def prepare(kits: Mapping[str, Path]) -> dict[str, Any]:
    """Deal the speakers out to these sites, a file into each one's kit; the job for them."""
    with (files("lrbpfl.data") / "speakers.csv").open() as file:
        rows = list(csv.DictReader(file))
    own: dict[str, set[str]] = {site: set() for site in kits}
    for site, speaker in zip(cycle(kits), dict.fromkeys(row[CLIENT] for row in rows), strict=False):
        own[site].add(speaker)
    for site, kit in kits.items():
        with (kit / "speakers.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, [CLIENT, *FEATURES, LABEL], extrasaction="ignore")
            table.writeheader()
            table.writerows(row for row in rows if row[CLIENT] in own[site])
        (kit / SETTINGS).write_text(SETTING)
    tables = {"federation": {"rounds": 20}}
    classes = sorted({row[LABEL] for row in rows})
    return write("demo", tables, {"classes": classes, "features": list(FEATURES), "names": sorted(kits)})
