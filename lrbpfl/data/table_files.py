"""Tables from files, .csv and .parquet, and from libraries: pandas, polars, Arrow, Hugging Face datasets."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrbpfl.data.tables import Column, Table
from lrbpfl.errors import BadInput

SUFFIXES = (".csv", ".parquet")


def read_table(path: Path) -> Table:
    """The table in a file."""
    try:
        return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


def _csv(path: Path) -> Table:
    """Cells as text, separated by what separates the names in the first line: a comma, a semicolon or a tab."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=first.count), skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(lines, [])]
            rows, places = [], []
            for row in lines:
                if row and len(row) != len(header):
                    found = f"{path}: line {lines.line_num} has {len(row)} cells where the first has {len(header)}"
                    raise BadInput(f"{found}: every row needs one for each column")
                if row:
                    rows.append(row)
                    places.append(lines.line_num)
    except (UnicodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a table of text in UTF-8: {error}") from None
    _check_names(path.name, header, len(rows))
    columns = {name: np.array(cells) for name, cells in zip(header, zip(*rows, strict=True), strict=True)}
    return Table(path.name, columns, word="line", places=places)


def _parquet(path: Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadInput(f"{path} needs pyarrow to be read: pip install 'lrbpfl[parquet]'") from None
    try:
        found = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    # What pandas writes there is the index of a frame, and none of its columns.
    kept = [name for name in found.column_names if not name.startswith("__index_level_")]
    return frame_table(found.select(kept), path.name)


def is_frame(source: Any) -> bool:
    """Whether this is a table of some library: it has named columns and gives them by name."""
    named = hasattr(source, "columns") or hasattr(source, "column_names")
    return named and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def frame_table(frame: Any, name: str, label: str | None = None) -> Table:
    """The table of a library; where it names the classes of its ``label`` column, with these names."""
    keys = list(frame.column_names if hasattr(frame, "column_names") else frame.columns)
    _check_names(name, list(map(str, keys)), len(frame))
    kind = getattr(frame, "features", {}).get(label) if isinstance(getattr(frame, "features", None), dict) else None
    names = getattr(kind, "names", None)
    columns = {str(key): _column(frame[key]) for key in keys}
    return Table(name, columns, class_names=tuple(names) if names else None)


def _column(cells: Any) -> Column:
    """A column's cells: numbers as they are, anything else as objects."""
    array = np.asarray(cells.to_numpy()) if hasattr(cells, "to_numpy") else None
    if array is not None and array.ndim == 1:
        return array
    values = list(cells)
    if all(isinstance(cell, bool | int | float | str | None) for cell in values):
        plain = np.array(values)
        return plain if plain.dtype.kind in "biuf" else np.array(values, object)
    objects: Column = np.empty(len(values), object)
    for row, cell in enumerate(values):
        objects[row] = cell
    return objects


def _check_names(table: str, names: Sequence[str], rows: int) -> None:
    if not names:
        raise BadInput(f"{table} has no columns: give a client column, a label column and features")
    ((name, times),) = Counter(names).most_common(1)
    if times > 1:
        raise BadInput(f"{table} has {times} columns called {name!r}: every column needs a name of its own")
    if not rows:
        raise BadInput(f"{table} has no rows below its columns {', '.join(map(repr, names[:20]))}: it needs examples")
