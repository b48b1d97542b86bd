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


def show(file: Path | None, settings: Iterable[str], *, as_json: bool) -> None:
    """A row per client: how many examples it has, of which classes."""
    made = config.parse(config.override(config.read(file) if file else {}, settings))
    dataset = load(made.data.dataset, progress=not as_json)
    splits = deal(dataset, made.data, made.federation.seed)
    counts = {name: _counts(dataset, part) for name, part in splits.items()}
    if as_json:
        rows = {
            name: {"train": len(part.train), "validation": len(part.validation), "test": len(part.test),
                   "classes": {str(c): int(n) for c, n in enumerate(counts[name]) if n}}
            for name, part in splits.items()
        }  # fmt: skip
        print(json.dumps(rows))
        return
    console = Console()
    console.print(_chart(dataset, splits, counts))
    total = sum(int(row.sum()) for row in counts.values())
    console.print(f"{len(splits)} clients, {total} examples of {len(dataset.y)}, seed {made.federation.seed}")


def _counts(dataset: Dataset, part: Split) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    everything = np.concatenate([part.train, part.validation, part.test])
    return np.bincount(dataset.y.numpy()[everything], minlength=dataset.num_classes)


def _chart(
    dataset: Dataset, splits: dict[str, Split], counts: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]
) -> Table:
    """Classes as columns, shaded by how many examples of them a client has; the classes' numbers beside them."""
    few = dataset.num_classes <= 20
    width = 2 if few else 1
    numbers = "".join(f"{c:<2}" for c in range(dataset.num_classes))
    header = numbers if few else f"classes 0 to {dataset.num_classes - 1}"
    table = Table(box=None, header_style="bold")
    table.add_column("client")
    for column in ("train", "valid.", "test", "labels"):
        table.add_column(column, justify="right")
    table.add_column(header, no_wrap=True)
    largest = max(int(row.max()) for row in counts.values())
    for name, part in splits.items():
        shades = [SHADES[int(np.ceil(n / largest * (len(SHADES) - 1)))] for n in counts[name]]
        sizes = [str(len(indices)) for indices in part]
        table.add_row(name, *sizes, str(int((counts[name] > 0).sum())), "".join(s * width for s in shades))
    return table
