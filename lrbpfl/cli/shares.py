"""The command `partition`: who gets what."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lrbpfl.cli.runs import remark
from lrbpfl.data import Dataset, Split, permutations
from lrbpfl.errors import plain
from lrbpfl.experiments import config
from lrbpfl.experiments.build import data_remarks, load_data
from lrbpfl.experiments.deal import Group, deal_groups, shift_group, train_fraction
from lrbpfl.experiments.sections import DataSection

SHADES = " ░▒▓█"
NAME = 60  # characters of a client's name in the table
FEW = 20  # classes, that each have a column
Counts = np.ndarray[tuple[int], np.dtype[np.int64]]  # (classes,)


def show(file: Path | None, settings: Iterable[str], *, as_json: bool) -> None:
    """A row per client: how many examples it has, of which classes."""
    made = config.parse(config.override(config.read(file) if file else {}, settings))
    dataset = load_data(made.data, progress=not as_json)
    seed = made.federation.seed
    groups = deal_groups(dataset, made.data, seed)
    for sentence in data_remarks(dataset, made.data, groups[0]):
        remark(sentence)
    if as_json:
        print(json.dumps({name: row for group in groups for name, row in _rows(dataset, group, made.data, seed)}))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(_chart(dataset, groups, made.data, seed))
    first, *new = (sum(map(_size, group.splits.values())) for group in groups)
    clients = len(groups[0].splits)
    console.print(f"{clients} clients, {first} examples of {len(dataset.y)}, seed {seed}")
    if dataset.class_names and dataset.num_classes <= FEW:
        called = ", ".join(f"{c} {plain(name, NAME)}" for c, name in enumerate(dataset.class_names))
        console.print(f"classes: {called}", markup=False, highlight=False)
    console.print(_split_line(dataset, made.data), *_shift_lines(dataset, made.data, seed), sep="\n")
    if groups[-1].new_alpha == "sites":
        console.print(f"{len(groups[-1].splits)} new clients, the last ones above: {new[0]} examples")
    elif new:
        alphas = ", ".join(map(str, made.data.new_alpha))
        console.print(
            f"{made.data.new_clients} new clients for alpha {alphas}: {new[0]} other examples, dealt each time"
        )


def _split_line(dataset: Dataset, section: DataSection) -> str:
    """Where the training parts come from."""
    fraction = train_fraction(dataset, section)
    origin = "the data's own" if fraction is None else f"a fraction of {fraction:g}"
    return f"training parts: {origin}; parts are drawn {'class by class' if section.stratified else 'at random'}"


def _shift_lines(dataset: Dataset, section: DataSection, seed: int) -> Iterator[str]:
    """How clients differ beyond who gets what."""
    if section.shift == "features":
        yield f"shift: every client's inputs are changed in a way of its own, strength {section.shift_strength:g}"
    if section.shift == "concept":
        yield f"shift: {section.concept_groups} groups name the classes differently, shown above as each client does"
        named = permutations(dataset.num_classes, section.concept_groups, seed)
        for g in range(1, section.concept_groups if dataset.num_classes <= FEW else 0):
            yield f"  group {g}: " + " ".join(f"{c}→{label}" for c, label in enumerate(named[g]) if c != label)


def _size(part: Split) -> int:
    return sum(map(len, part))


def _counts(dataset: Dataset, group: Group, section: DataSection, seed: int) -> list[Counts]:
    """How many examples of each class each client has, by the labels that it has for them."""
    y = (shift_group(dataset, group, section, seed) if section.shift == "concept" else dataset).y.numpy()
    return [np.bincount(y[np.concatenate(part)], minlength=dataset.num_classes) for part in group.splits.values()]


def _rows(dataset: Dataset, group: Group, section: DataSection, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is told about each client as plain values."""
    counts = _counts(dataset, group, section, seed)
    for k, (name, part) in enumerate(group.splits.items()):
        row: dict[str, Any] = {field: len(indices) for field, indices in part._asdict().items()}
        row["classes"] = {str(c): int(n) for c, n in enumerate(counts[k]) if n}
        if section.shift == "concept":
            row["group"] = k % section.concept_groups
        if group.corruptions:
            row["corruption"] = group.corruptions[k]._asdict()
        if group.new_alpha is not None:
            row["new_alpha"] = group.new_alpha
        yield name, row


def _chart(dataset: Dataset, groups: list[Group], section: DataSection, seed: int) -> Table:
    """Few classes: a column each, shaded by how many examples of it a client has; many: the numbers of its classes."""
    few = dataset.num_classes <= FEW
    table = Table(box=None, header_style="bold")
    table.add_column("client", no_wrap=True)
    concept = ["group"] if section.shift == "concept" else []
    for column in ("train", "valid.", "test", "public", "calib.", "labels", *concept):
        table.add_column(column, justify="right", no_wrap=True)
    if groups[0].corruptions:
        table.add_column("corruption", overflow="fold")
    table.add_column("".join(f"{c:<2}" for c in range(dataset.num_classes)) if few else "which", no_wrap=few)
    parts = [(k, name, part) for group in groups for k, (name, part) in enumerate(group.splits.items())]
    corruptions = [f"{c.kind} {c.severity}".replace("_", " ") for group in groups for c in group.corruptions or ()]
    counts = [row for group in groups for row in _counts(dataset, group, section, seed)]
    largest = max(int(row.max()) for row in counts)
    for i, (k, name, part) in enumerate(parts):
        shades = "".join(2 * SHADES[int(np.ceil(n / largest * (len(SHADES) - 1)))] for n in counts[i])
        classes = np.flatnonzero(counts[i])
        sizes = [str(len(indices)) for indices in part]
        which = shades if few else " ".join(map(str, classes))
        own = [str(k % section.concept_groups) for _ in concept]
        table.add_row(escape(plain(name, NAME)), *sizes, str(len(classes)), *own, *corruptions[i : i + 1], which)
    return table
