"""Labels as the data have them, numbers or text, and the classes 0, ..., C - 1 that algorithms count with."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lrbpfl.data.order import natural_order
from lrbpfl.errors import BadInput

Label = int | str


def as_labels(values: Any, where: str) -> npt.NDArray[Any]:
    """Labels (n,) as integers or text; whole numbers that are stored as floating-point ones count as integers.

    ``where`` begins the sentence that refuses anything else.
    """
    if isinstance(values, list | tuple):  # as they are: NumPy would turn 1 beside "x" into text
        cells = [cell.item() if hasattr(cell, "item") else cell for cell in values]
        y: npt.NDArray[Any] = np.array(cells, object) if cells else np.zeros(0, np.int64)
    else:
        y = np.asarray(values)
    if y.ndim != 1:
        raise BadInput(f"{where} has labels of shape {y.shape}, and needs one for each example, (n,)")
    if y.dtype.kind == "O":
        y = _from_objects(y, where)
    if y.dtype.kind == "b":
        return y.astype(np.int64)
    if y.dtype.kind == "f":
        wide = y.astype(np.float64)  # 16 bits do not hold the limit
        wrong = np.flatnonzero(~np.isfinite(wide) | (wide != np.rint(wide)) | (np.abs(wide) > 2**53))
        if len(wrong):
            found = f"{where} has the label {y[wrong[0]].item()!r} in row {wrong[0]}"
            raise BadInput(f"{found}, and labels must be whole numbers or text")
        return y.astype(np.int64)
    if y.dtype.kind not in "iuU":
        raise BadInput(f"{where} has labels of type {y.dtype}, and labels must be whole numbers or text")
    if y.dtype.kind == "U" and len(empty := np.flatnonzero(np.char.strip(y) == "")):
        raise BadInput(f"{where} has no label in row {empty[0]}: give one, or leave the row out")
    return y


def _from_objects(y: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """Cells of any type as one array of text or of numbers."""
    cells = y.tolist()
    for row, cell in enumerate(cells):
        if not is_value(cell):
            raise BadInput(f"{where} has no label in row {row}: give one, or leave the row out")
    texts = [isinstance(cell, str) for cell in cells]
    if any(texts) and not all(texts):
        row = texts.index(not texts[0])
        found = f"{where} has the label {cells[0]!r} in row 0 and {cells[row]!r} in row {row}"
        raise BadInput(f"{found}: all must be numbers, or all text")
    if not all(isinstance(cell, str | int | float | np.generic) for cell in cells):
        raise BadInput(f"{where} has labels like {cells[0]!r}, and labels must be whole numbers or text")
    return np.array(cells, str) if all(texts) else np.array(cells)


def is_value(cell: Any) -> bool:
    """Whether a cell holds something: not None, NaN, nor a library's own mark for what is missing."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return False
    return not (isinstance(cell, float | np.floating) and np.isnan(cell))


def classes_of(labels: Mapping[str, npt.NDArray[Any]]) -> tuple[Label, ...]:
    """The label values of all clients together: numbers by value, text in natural order."""
    kinds = {client: "text" if y.dtype.kind == "U" else "numbers" for client, y in labels.items()}
    if len(set(kinds.values())) > 1:
        first, other = (next(c for c, kind in kinds.items() if kind == wanted) for wanted in ("text", "numbers"))
        what = f"client {first!r} has labels that are text, and client {other!r} has labels that are numbers"
        raise BadInput(f"{what}: all must be of one type")
    values = {value for y in labels.values() for value in np.unique(y).tolist()}
    return tuple(natural_order(values) if "text" in kinds.values() else sorted(values))


def numbers_of(labels: Iterable[npt.NDArray[Any]], classes: tuple[Label, ...]) -> npt.NDArray[np.int64]:
    """Everybody's labels, one client after the other, as places among the classes."""
    place = {value: number for number, value in enumerate(classes)}
    found = []
    for y in labels:
        values, inverse = np.unique(y, return_inverse=True)
        found.append(np.array([place[value] for value in values.tolist()], np.int64)[inverse])
    return np.concatenate(found)
