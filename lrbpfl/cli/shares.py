"""The command `partition`: who gets what."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lrbpfl.data import Dataset, Split, load
from lrbpfl.experiments import config
from lrbpfl.experiments.build import deal

SHADES = " ░▒▓█"
Counts = np.ndarray[tuple[int], np.dtype[np.int64]]  # (classes,)


def show(file: Path | None, settings: Iterable[str], *, as_json: bool) -> None:
    """A row per client: how many examples it has, of which classes."""
    made = config.parse(config.override(config.read(file) if file else {}, settings))
    dataset = load(made.data.dataset, progress=not as_json)
    splits = deal(dataset, made.data, made.federation.seed)
    counts = {name: _counts(dataset, part) for name, part in splits.items()}
    if as_json:
        rows = {
            name: {"train": len(part.train), "validation": len(part.validation), "test": len(part.test),
                   "public": len(part.public), "classes": {str(c): int(n) for c, n in enumerate(counts[name]) if n}}
            for name, part in splits.items()
        }  # fmt: skip
        print(json.dumps(rows))
        return
    console = Console()
    console.print(_chart(dataset, splits, counts))
    total = sum(int(row.sum()) for row in counts.values())
    console.print(f"{len(splits)} clients, {total} examples of {len(dataset.y)}, seed {made.federation.seed}")


def _counts(dataset: Dataset, part: Split) -> Counts:
    everything = np.concatenate(part)
    return np.bincount(dataset.y.numpy()[everything], minlength=dataset.num_classes)


def _chart(dataset: Dataset, splits: dict[str, Split], counts: dict[str, Counts]) -> Table:
    """Few classes: a column each, shaded by how many examples of it a client has; many: the numbers of its classes."""
    few = dataset.num_classes <= 20
    table = Table(box=None, header_style="bold")
    table.add_column("client", no_wrap=True)
    for column in ("train", "valid.", "test", "public", "labels"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("".join(f"{c:<2}" for c in range(dataset.num_classes)) if few else "which", no_wrap=few)
    largest = max(int(row.max()) for row in counts.values())
    for name, part in splits.items():
        shades = "".join(2 * SHADES[int(np.ceil(n / largest * (len(SHADES) - 1)))] for n in counts[name])
        classes = np.flatnonzero(counts[name])
        sizes = [str(len(indices)) for indices in part]
        table.add_row(name, *sizes, str(len(classes)), shades if few else " ".join(map(str, classes)))
    return table
