"""One client's arrays, tensors, lists or PyTorch dataset."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lrbpfl.data.clients import Part
from lrbpfl.data.images import is_picture, pixels
from lrbpfl.data.labels import as_labels
from lrbpfl.errors import BadInput


def from_pair(name: str, x: Any, y: Any) -> Part:
    """A client's inputs (n, *input) and labels (n,)."""
    where = f"client {name!r}"
    inputs = as_array(x, where)
    if inputs.ndim == 1 and inputs.dtype.kind != "O":
        raise BadInput(f"{where} has x of shape {inputs.shape}, and needs (n, *input): a single feature is x[:, None]")
    return Part(name, inputs, as_labels(_plain(y), where))


def from_dataset(name: str, dataset: Any) -> Part:
    """A client's map-style PyTorch dataset, whose items are pairs of an input and a label."""
    inputs, labels = [], []
    for row in range(len(dataset)):
        item = dataset[row]
        if not isinstance(item, tuple | list) or len(item) != 2:
            found = f"item {row} of client {name!r} is {type(item).__name__}"
            raise BadInput(f"{found}, and the items of a dataset must be pairs of an input and a label")
        inputs.append(item[0])
        labels.append(item[1].item() if isinstance(item[1], Tensor | np.generic) else item[1])
    if not inputs:
        raise BadInput(f"client {name!r} has a dataset without items: it needs examples")
    return Part(name, as_array(inputs, f"client {name!r}"), as_labels(labels, f"client {name!r}"))


def as_array(values: Any, where: str) -> npt.NDArray[Any]:
    """Inputs of any kind as one array of numbers; ``where`` begins the sentence that refuses what is none."""
    cells = list(values) if isinstance(values, list | tuple) else values
    if isinstance(cells, list) and cells and is_picture(cells[0]):
        cells = [pixels(cell, f"{where}: image {row}") for row, cell in enumerate(cells)]
    try:
        array = np.asarray([_plain(cell) for cell in cells] if isinstance(cells, list) else _plain(cells))
    except (ValueError, TypeError, RuntimeError) as error:
        raise BadInput(f"{where} has inputs that do not make one array: all need one shape ({error})") from None
    if array.dtype.kind == "U" and isinstance(cells, list):  # as they are: NumPy turns 1 beside "x" into text
        array = np.array(cells, object)
    return _numbers(array, where) if array.dtype.kind in "OU" else array


def _plain(values: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _numbers(array: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    """Cells of any type as numbers; text that spells a number is none, for somebody else has to say what it means."""
    for place, cell in np.ndenumerate(array):
        if not isinstance(cell, int | float | np.number):
            found = "is empty" if cell is None else f"holds {str(cell)!r}, which is not a number"
            raise BadInput(f"row {place[0]} of {where} {found}: inputs must be numbers")
    return array.astype(np.float64)
