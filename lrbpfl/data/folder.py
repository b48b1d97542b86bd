"""Your own data: a folder with one ``client-name.npz`` (arrays ``x`` and ``y``) for each client.

A ``classes.txt`` beside them may name the classes.
"""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.npyio import NpzFile

from lrbpfl.data.class_names import read_class_names
from lrbpfl.data.datasets import Dataset, check
from lrbpfl.errors import BadInput

_MOST_CLASSES = 100_000  # a label beyond is an identifier, not a class number
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def load_folder(path: Path) -> Dataset:
    """Every client of the folder, in the order of their names; client k owns the examples where ``owner == k``."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder: give one that holds a client-name.npz for each client")
    files = sorted(file for file in path.glob("*.npz") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise BadInput(f"{path} holds no client-name.npz: put one file for each client there, with arrays x and y")
    clients = [_read(file) for file in files]
    _check_alike(files, [x for x, _ in clients])
    y = np.concatenate([y for _, y in clients])
    num_classes = max(int(y.max()) + 1, 1)
    dataset = Dataset(
        name=path.resolve().name,
        x=torch.from_numpy(np.concatenate([x for x, _ in clients])),
        y=torch.from_numpy(y),
        num_classes=num_classes,
        owner=np.repeat(np.arange(len(files)), [len(y) for _, y in clients]),
        client_names=tuple(file.stem for file in files),
        class_names=read_class_names(path / "classes.txt", num_classes),
    )
    check(dataset)
    return dataset


def _read(file: Path) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """One client's x (n, *input), uint8 or float32, and y (n,)."""
    try:
        with file.open("rb") as stream:
            arrays = np.load(stream, allow_pickle=False)
            if not isinstance(arrays, NpzFile):
                raise ValueError("it holds a single array")
            content = {key: arrays[key] for key in ("x", "y") if key in arrays}
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        raise BadInput(f"{file} cannot be read as an .npz file of plain arrays ({reason})") from error
    if len(content) < 2:
        missing = " and ".join(sorted({"x", "y"} - set(content)))
        raise BadInput(f"{file} has no array {missing}: every client's file needs x and y")
    x, y = content["x"], content["y"]
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise BadInput(f"{file} holds x of shape {x.shape} and y of shape {y.shape}, and needs (n, *input) and (n,)")
    if not x.size:
        raise BadInput(f"{file} holds x of shape {x.shape}, which is empty: every client needs examples")
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise BadInput(f"{file} holds x of type {x.dtype}, and inputs must be uint8 or floating-point numbers")
    if y.dtype.kind not in "iu":
        raise BadInput(f"{file} holds y of type {y.dtype}, and labels must be integers from 0")
    if y.max() >= _MOST_CLASSES:
        raise BadInput(f"{file} holds the label {y.max()}, and labels are class numbers from 0 to {_MOST_CLASSES - 1}")
    with np.errstate(over="ignore"):  # what does not fit becomes infinity, and is refused by name
        return x.astype(np.uint8 if x.dtype == np.uint8 else np.float32), y.astype(np.int64)


def _check_alike(files: list[Path], inputs: list[npt.NDArray[Any]]) -> None:
    """Refuse clients whose inputs differ in shape or kind from the first one's."""
    first = inputs[0]
    for file, x in zip(files, inputs, strict=True):
        if (x.shape[1:], x.dtype) != (first.shape[1:], first.dtype):
            found, expected = f"{x.shape[1:]} {x.dtype}", f"{first.shape[1:]} {first.dtype}"
            raise BadInput(f"{file} holds inputs {found} where {files[0].name} holds {expected}: all must be alike")
