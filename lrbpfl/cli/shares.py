"""The command `partition`: who gets what."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lrbpfl.data import Dataset, Split, load
from lrbpfl.experiments import config
from lrbpfl.experiments.build import Group, deal_groups

SHADES = " ░▒▓█"
Counts = np.ndarray[tuple[int], np.dtype[np.int64]]  # (classes,)


def show(file: Path | None, settings: Iterable[str], *, as_json: bool) -> None:
    """A row per client: how many examples it has, of which classes."""
    made = config.parse(config.override(config.read(file) if file else {}, settings))
    dataset = load(made.data.dataset, progress=not as_json)
    groups = deal_groups(dataset, made.data, made.federation.seed)
    if as_json:
        print(json.dumps({name: row for group in groups for name, row in _rows(dataset, group)}))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(_chart(dataset, groups))
    first, *new = (sum(map(_size, group.splits.values())) for group in groups)
    clients = len(groups[0].splits)
    console.print(f"{clients} clients, {first} examples of {len(dataset.y)}, seed {made.federation.seed}")
    if new:
        alphas = ", ".join(map(str, made.data.new_alpha))
        console.print(
            f"{made.data.new_clients} new clients for alpha {alphas}: {new[0]} other examples, dealt each time"
        )


def _size(part: Split) -> int:
    return sum(map(len, part))


def _counts(dataset: Dataset, part: Split) -> Counts:
    everything = np.concatenate(part)
    return np.bincount(dataset.y.numpy()[everything], minlength=dataset.num_classes)


def _rows(dataset: Dataset, group: Group) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is told about each client as plain values."""
    for k, (name, part) in enumerate(group.splits.items()):
        row: dict[str, Any] = {field: len(indices) for field, indices in part._asdict().items()}
        row["classes"] = {str(c): int(n) for c, n in enumerate(_counts(dataset, part)) if n}
        if group.corruptions:
            row["corruption"] = group.corruptions[k]._asdict()
        if group.new_alpha is not None:
            row["new_alpha"] = group.new_alpha
        yield name, row


def _chart(dataset: Dataset, groups: list[Group]) -> Table:
    """Few classes: a column each, shaded by how many examples of it a client has; many: the numbers of its classes."""
    few = dataset.num_classes <= 20
    table = Table(box=None, header_style="bold")
    table.add_column("client", no_wrap=True)
    for column in ("train", "valid.", "test", "public", "labels"):
        table.add_column(column, justify="right", no_wrap=True)
    if groups[0].corruptions:
        table.add_column("corruption", overflow="fold")
    table.add_column("".join(f"{c:<2}" for c in range(dataset.num_classes)) if few else "which", no_wrap=few)
    parts = [(name, part) for group in groups for name, part in group.splits.items()]
    corruptions = [f"{c.kind} {c.severity}".replace("_", " ") for group in groups for c in group.corruptions or ()]
    counts = [_counts(dataset, part) for _, part in parts]
    largest = max(int(row.max()) for row in counts)
    for k, (name, part) in enumerate(parts):
        shades = "".join(2 * SHADES[int(np.ceil(n / largest * (len(SHADES) - 1)))] for n in counts[k])
        classes = np.flatnonzero(counts[k])
        sizes = [str(len(indices)) for indices in part]
        which = shades if few else " ".join(map(str, classes))
        table.add_row(name, *sizes, str(len(classes)), *corruptions[k : k + 1], which)
    return table
