"""Tables: one column says whose a row is, one is the label, all others are features."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lrbpfl.data.arrays import as_array
from lrbpfl.data.clients import Integers, Part, assemble
from lrbpfl.data.datasets import Dataset
from lrbpfl.data.images import is_picture
from lrbpfl.data.labels import as_labels, is_value
from lrbpfl.data.order import natural_order
from lrbpfl.errors import BadInput

CLIENT, LABEL = "client", "label"  # the columns where nobody says otherwise
Column = npt.NDArray[Any]


class Table(NamedTuple):
    """Columns of equal length, and where each row stands in what they were read from."""

    name: str
    columns: dict[str, Column]  # (n,) cells of any type, or (n, *input) numbers
    word: str = "row"  # what a place is called
    places: Sequence[int] | None = None  # of the rows; None: 0, 1, 2, ...
    class_names: tuple[str, ...] | None = None  # where the labels are places among names

    def where(self, row: int, column: str, client: str | None = None) -> str:
        """The address of a cell in a sentence."""
        place = row if self.places is None else self.places[row]
        whose = "" if not client else f" (client {client!r})"
        return f"{self.name}: {self.word} {place}{whose}, column {column!r},"


def by_client(table: Table, *, client: str | None, label: str | None, integers: Integers) -> Dataset:
    """The dataset of a table with a client column and a label column."""
    client, label = _named(table, "client", client or CLIENT), _named(table, "label", label or LABEL)
    if client == label:
        raise BadInput(f"{table.name}: column {client!r} cannot be both the client and the label")
    owners = _owners(table, client)
    features = _features(table, {client, label})
    x, y = _inputs(table, features, owners), _labels(table, label, owners)
    names, places, counts = np.unique(owners, return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(places, kind="stable"), np.cumsum(counts)[:-1])
    parts = [Part(name, x[own], y[own]) for name, own in zip(names.tolist(), rows, strict=True)]
    return assemble(
        table.name,
        parts,
        integers=integers,
        class_names=table.class_names,
        feature_names=tuple(features) if x.ndim == 2 and len(features) == x.shape[1] else None,
    )


def of_clients(
    name: str, tables: Mapping[str, Table], *, client: str | None, label: str | None, integers: Integers
) -> Dataset:
    """The dataset of a table for each client; a client column in it must hold that client's name, and is left out."""
    parts: list[Part] = []
    features: list[str] = []
    first, *_ = order = natural_order(tables)
    for owner in order:
        table = tables[owner]
        column = _named(table, "label", label or LABEL)
        own = (client or CLIENT) if (client or CLIENT) in table.columns else None
        if own and (others := set(_owners(table, own)) - {owner}):
            raise BadInput(f"the table of client {owner!r} has the name {min(others)!r} in its column {own!r}")
        found = _features(table, {column, own or column})
        if parts and set(found) != set(features):
            odd = min(set(found) ^ set(features))
            has, lacks = (owner, first) if odd in found else (first, owner)
            raise BadInput(f"client {has!r} has a column {odd!r}, and client {lacks!r} has none: all must be alike")
        features = features or found
        owners = [owner] * len(table.columns[column])
        parts.append(Part(owner, _inputs(table, features, owners), _labels(table, column, owners)))
    flat = all(part.x.ndim == 2 for part in parts)
    named = {table.class_names for table in tables.values()}
    return assemble(
        name,
        parts,
        integers=integers,
        class_names=named.pop() if len(named) == 1 else None,
        feature_names=tuple(features) if flat else None,
    )


def features_of(table: Table, wanted: Sequence[str] | None, besides: set[str]) -> Column:
    """The features of somebody alone, (n, features): the columns that are wanted by name, or all but those named."""
    wanted = wanted or _features(table, besides & table.columns.keys())
    for name in wanted:
        if name not in table.columns:
            raise BadInput(f"{table.name} has no column {name!r}, which the model was trained on")
    return _inputs(table, wanted, [""] * len(table.columns[wanted[0]]))


def labels_of(table: Table, label: str | None) -> Column:
    """The labels of somebody alone, (n,)."""
    column = _named(table, "label", label or LABEL)
    return _labels(table, column, [""] * len(table.columns[column]))


def _named(table: Table, role: str, column: str) -> str:
    """The column for the client or the label, or a sentence with the columns there are."""
    if column in table.columns:
        return column
    there = ", ".join(map(repr, list(table.columns)[:20])) + (", ..." if len(table.columns) > 20 else "")
    hint = f"name the {role}'s with data.{role}_column, in Python {role}_column= ({role}= of read_clients)"
    raise BadInput(f"{table.name} has no column {column!r}; its columns are {there}: {hint}")


def _features(table: Table, taken: set[str]) -> list[str]:
    features = [name for name in table.columns if name not in taken]
    if not features:
        raise BadInput(f"{table.name} has no columns beside {' and '.join(sorted(taken))}: it needs features")
    for name in features:
        if not name.strip() or name.startswith("Unnamed: "):
            what = f"{table.name} has a column without a name, which may count the rows and be no feature"
            raise BadInput(f"{what}: name it, or leave it out (index=False in pandas)")
    return features


def _owners(table: Table, column: str) -> list[str]:
    """The name of each row's client; 3.0 is the client 3."""
    cells, owners = table.columns[column].tolist(), []
    for row, cell in enumerate(cells):
        if not is_value(cell) or not str(cell).strip():
            raise BadInput(f"{table.where(row, column)} names no client: give one, or leave the row out")
        whole = isinstance(cell, float) and cell.is_integer()
        owners.append(str(int(cell)) if whole else str(cell).strip())
    return owners


def _labels(table: Table, column: str, owners: Sequence[str]) -> Column:
    """The labels (n,), integers or text; text that spells whole numbers throughout is read as such."""
    cells = table.columns[column]
    for row, cell in enumerate(cells.tolist() if cells.dtype.kind in "OUf" else ()):
        if not is_value(cell) or (isinstance(cell, str) and not cell.strip()):
            raise BadInput(f"{table.where(row, column, owners[row])} is empty: give a label, or leave the row out")
    y = as_labels(cells, f"column {column!r} of {table.name}") if cells.dtype.kind != "U" else np.char.strip(cells)
    if y.dtype.kind != "U" or table.word != "line":  # only a text file says all in text
        return y
    spelled = np.unique(y).tolist()
    if any(re.fullmatch(r"[+-]?0[0-9]+", text) for text in spelled):  # a code like 007 is a name
        return y
    try:
        numbers = y.astype(np.float64)
    except ValueError:
        return y
    wrong = np.flatnonzero(numbers != np.rint(numbers))
    if len(wrong):
        where = table.where(int(wrong[0]), column, owners[wrong[0]])
        raise BadInput(f"{where} holds {y[wrong[0]].item()!r}, and labels must be whole numbers or text")
    return as_labels(numbers, f"column {column!r} of {table.name}")


def _inputs(table: Table, features: Sequence[str], owners: Sequence[str]) -> Column:
    """The features (n, features), or (n, *input) where one column holds whole arrays."""
    columns = [_numbers(table, name, owners) for name in features]
    if len(columns) > 1 and (odd := [name for name, x in zip(features, columns, strict=True) if x.ndim > 1]):
        raise BadInput(f"{table.name}: column {odd[0]!r} holds arrays, and must then be the only feature")
    return columns[0] if columns[0].ndim > 1 else np.stack(columns, axis=1)


def _numbers(table: Table, column: str, owners: Sequence[str]) -> Column:
    """A feature as numbers, finite in float32; a fault is told with its row, client and column."""
    cells = table.columns[column]
    if cells.dtype.kind == "O" and (is_picture(cells[0]) or isinstance(cells[0], list | tuple | np.ndarray)):
        return as_array(cells.tolist(), f"column {column!r} of {table.name}")
    if cells.dtype.kind not in "biufOU":
        raise BadInput(f"{table.name}: column {column!r} is {cells.dtype}, and features must be numbers")
    if cells.dtype.kind == "U" and np.isin(switches := np.char.lower(np.char.strip(cells)), ("true", "false")).all():
        return np.equal(switches, "true")
    try:
        values = cells.astype(np.float64) if cells.dtype.kind in "OU" else cells
    except (ValueError, TypeError, OverflowError):
        raise _bad_cell(table, column, owners) from None
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
        if len(wrong):
            found = "is empty or NaN" if np.isnan(values[wrong[0]]) else f"holds {values[wrong[0]]:g}"
            where = table.where(int(wrong[0]), column, owners[wrong[0]])
            raise BadInput(f"{where} {found}, and features must be finite numbers that fit into float32")
    return values


def _bad_cell(table: Table, column: str, owners: Sequence[str]) -> BadInput:
    """The sentence about the first cell of a feature that is not a number."""
    cells = table.columns[column].tolist()
    row = next(row for row, cell in enumerate(cells) if not _is_number(cell))
    found = f"{cells[row]!s:.50}".strip() if is_value(cells[row]) else ""
    where = table.where(row, column, owners[row])
    if not found:
        return BadInput(f"{where} is empty: fill it in, or leave the row out")
    return BadInput(f"{where} holds {found!r}: features must be numbers, so encode or leave out others")


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (ValueError, TypeError, OverflowError):
        return False
    return True
