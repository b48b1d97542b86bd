"""Tables from files, .csv and .parquet, and from libraries: pandas, polars, Arrow, Hugging Face datasets."""

import csv
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrbpfl.data.tables import Column, Table
from lrbpfl.errors import BadInput

SUFFIXES = (".csv", ".parquet")
AT_ONCE = 10_000  # rows of text in memory


def read_table(path: Path, text: Collection[str]) -> Table:
    """The table in a file; cells of the columns ``text`` are never taken for numbers there."""
    try:
        return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path, text)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None


def _csv(path: Path, text: Collection[str]) -> Table:
    """Cells are separated by what separates the names in the first line: a comma, a semicolon or a tab."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            lines = csv.reader(file, delimiter=max(",;\t", key=first.count), skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(lines, [])]
            rows = _rows(path, lines, len(header))
            pieces: list[list[Column]] = []
            places: list[int] = []
            while some := list(itertools.islice(rows, AT_ONCE)):
                places += (place for place, _ in some)
                cells = zip(*(row for _, row in some), strict=True)
                pieces.append([_cells(c, name not in text) for name, c in zip(header, cells, strict=True)])
    except (UnicodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a table of text in UTF-8: {error}") from None
    _check_names(path.name, header, len(places))
    columns = {name: _joined(own) for name, own in zip(header, zip(*pieces, strict=True), strict=True)}
    return Table(path.name, columns, word="line", places=places)


def _rows(path: Path, lines: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    """Rows of a file and the lines where they end; empty lines are none."""
    for row in lines:
        if row and len(row) != width:
            found = f"{path}: line {lines.line_num} has {len(row)} cells where the first has {width}"
            raise BadInput(f"{found}: every row needs one for each column")
        if row:
            yield lines.line_num, row


def _cells(cells: Sequence[str], numeric: bool) -> Column:
    """Numbers, if all of these cells are and may be; else their text."""
    try:
        return np.array([float(cell) for cell in cells]) if numeric else np.array(cells)
    except ValueError:
        return np.array(cells)


def _joined(pieces: Sequence[Column]) -> Column:
    """A column from its pieces; where only some are numbers, cells stay as they are, and one will be told."""
    alike = len({piece.dtype.kind for piece in pieces}) == 1
    return np.concatenate(pieces if alike else [piece.astype(object) for piece in pieces])


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
