"""Your own data: a folder with one ``client-name.npz`` (arrays ``x`` and ``y``) for each client.

A ``classes.txt`` beside them may name the classes, in the order of the labels 0, 1, 2, ...
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lrbpfl.data import npz
from lrbpfl.data.arrays import as_array
from lrbpfl.data.class_names import read_class_names
from lrbpfl.data.clients import Integers, Part, assemble
from lrbpfl.data.datasets import Dataset
from lrbpfl.data.labels import as_labels
from lrbpfl.data.mapped import map_arrays
from lrbpfl.data.order import natural_key
from lrbpfl.errors import BadInput

WANTED = ("x", "y")


def client_files(path: Path, suffix: str) -> list[Path]:
    """The files of this kind in a folder, hidden ones aside, in the natural order of their names.

    What is called like one and is none, such as a link that leads nowhere, is refused: a client would be missing.
    """
    called = (file for file in path.iterdir() if file.suffix.lower() == suffix and not file.name.startswith("."))
    files = sorted(called, key=lambda file: natural_key(file.stem))
    for file in files:
        if not file.is_file():
            what = "is a link that leads nowhere" if file.is_symlink() and not file.exists() else "is no file"
            raise BadInput(f"{file} {what}: mend it, or remove it if there is no such client")
    for stem, times in Counter(file.stem for file in files).items():
        if times > 1:
            raise BadInput(f"{path} holds {times} files of a client {stem!r}: every client needs a name of its own")
    return files


def load_folder(path: Path, *, integers: Integers = "numbers") -> Dataset:
    """Every client of the folder, in the natural order of their names; client k owns what ``owner == k``."""
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder: give one that holds a client-name.npz for each client")
    files = client_files(path, ".npz")
    if not files:
        raise BadInput(f"{path} holds no client-name.npz: put one file for each client there, with arrays x and y")
    npz.check_memory((claim for file in files for claim in npz.claims(file, WANTED).values()), str(path))
    parts = [_part(file, npz.arrays(file, WANTED)) for file in files]
    names = read_class_names(path / "classes.txt", _num_classes(parts))
    return assemble(path.resolve().name, parts, integers=integers, class_names=names)


def _num_classes(parts: list[Part]) -> int:
    """How many names there must be where labels are places among them."""
    return max((int(part.y.max()) + 1 for part in parts if part.y.dtype.kind != "U"), default=1)


def read_client(file: Path) -> Part:
    """One client's x (n, *input) and y (n,), for the moment that it takes to copy what is needed of them."""
    return _part(file, map_arrays(file, WANTED))


def read_labels(file: Path) -> npt.NDArray[Any]:
    """One client's y (n,); its x is not looked at."""
    content = map_arrays(file, ("y",))
    if "y" not in content:
        raise _missing(file, {"y"})
    if content["y"].ndim != 1:
        raise BadInput(f"{file} holds y of shape {content['y'].shape}, and needs (n,)")
    return _labels(file, content["y"])


def _part(file: Path, content: Mapping[str, npt.NDArray[Any]]) -> Part:
    if len(content) < 2:
        raise _missing(file, {"x", "y"} - content.keys())
    x, y = content["x"], content["y"]
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y):
        raise BadInput(f"{file} holds x of shape {x.shape} and y of shape {y.shape}, and needs (n, *input) and (n,)")
    if not x.size:
        raise BadInput(f"{file} holds x of shape {x.shape}, which is empty: every client needs examples")
    return Part(file.stem, as_array(x, str(file)), _labels(file, y))


def _missing(file: Path, names: set[str]) -> BadInput:
    return BadInput(f"{file} has no array {' and '.join(sorted(names))}: every client's file needs x and y")


def _labels(file: Path, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    labels = as_labels(y, str(file))
    if labels.dtype.kind != "U" and len(labels) and labels.min() < 0:
        row = int(labels.argmin())
        raise BadInput(f"example {row} of client {file.stem!r} has the label {labels[row]}, and labels go from 0")
    return labels
