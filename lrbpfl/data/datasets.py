"""Labelled examples by name: fifteen speakers' vowels, scikit-learn's digits, CIFAR, or clients at a path."""

import csv
import difflib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lrbpfl.data import cifar
from lrbpfl.data.class_names import read_class_names
from lrbpfl.disk import usable
from lrbpfl.errors import BadInput, shown


class Dataset(NamedTuple):
    """Examples and their labels; who owns which, where the data say so."""

    name: str
    x: Tensor  # (n, *input), uint8 images, float32, or int64 tokens
    y: Tensor  # (n,) int64
    num_classes: int
    owner: npt.NDArray[np.int64] | None = None  # (n,) which natural client each example belongs to
    client_names: tuple[str, ...] | None = None  # (clients,)
    num_test: int = 0  # so many of the last examples are the official test set; 0 if there is none
    class_names: tuple[str, ...] | None = None  # (num_classes,) where the data name them
    trains: npt.NDArray[np.bool_] | None = None  # (n,) which examples natural clients train on, where the data say so
    classes: tuple[int | str, ...] | None = None  # (num_classes,) labels as the data have them; None: their numbers
    feature_names: tuple[str, ...] | None = None  # (features,) where the data are a table


def load(
    name: str,
    root: Path | None = None,
    *,
    progress: bool = False,
    client: str | None = None,
    label: str | None = None,
) -> Dataset:
    """The dataset of that name, or the clients in the file or folder at that path (see ``read_clients``).

    ``root`` holds the unpacked CIFAR archives: by default ``$LRBPFL_DATA``, else the user's cache directory.
    ``client`` and ``label`` name columns, where the path is that of a table.
    """
    # Imported here because paths are read into the Dataset defined above.
    from lrbpfl.data.sources import KINDS, read_path

    if name in DATASETS:
        if client or label:
            raise BadInput(f"{client or label!r} names a column, and the dataset {name!r} is no table")
        return DATASETS[name](root, progress)
    path = usable(name, home=True)
    if name and (path.exists() or path.suffix.lower() in (".csv", ".parquet") or path.name != name):
        return read_path(path, client=client, label=label)
    nearest = difflib.get_close_matches(name[:80].lower(), DATASETS, n=1)
    hint = f" (nearest: {nearest[0]!r})" if nearest else ""
    raise BadInput(f"unknown dataset {shown(name)}{hint}: give {', '.join(DATASETS)}, {KINDS}")


def check_dataset(dataset: Dataset) -> None:
    """Refuse what no algorithm can learn from, naming the first offending example and its client."""
    x, y = dataset.x, dataset.y
    if x.dtype not in (torch.uint8, torch.float32, torch.int64):
        raise BadInput(
            f"the inputs of {dataset.name!r} are {x.dtype}, and must be torch.uint8, torch.float32 or torch.int64"
        )
    if y.dtype != torch.int64:
        raise BadInput(f"the labels of {dataset.name!r} are {y.dtype}, and must be integers (torch.int64)")
    if x.ndim < 2 or y.ndim != 1:
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise BadInput(f"x and y of {dataset.name!r} have the shapes {shapes}, and must have (n, *input) and (n,)")
    if not 0 < x.shape[0] == y.shape[0]:
        raise BadInput(f"{dataset.name!r} has {x.shape[0]} inputs and {y.shape[0]} labels, and needs as many of each")
    _check_owner(dataset)
    trains = dataset.trains
    if trains is not None and (trains.dtype != np.bool_ or trains.shape != tuple(y.shape) or dataset.owner is None):
        found = f"{trains.shape} {trains.dtype}"
        raise BadInput(f"the trains array of {dataset.name!r} is {found}, and must hold a bool for each owned example")
    wrong = (y < 0) | (y >= dataset.num_classes)
    if wrong.any():
        index = int(wrong.nonzero()[0, 0])
        where = _where(dataset, index)
        raise BadInput(f"{where} has the label {int(y[index])}, and labels go from 0 to {dataset.num_classes - 1}")
    if x.dtype == torch.float32 and not x.isfinite().all():
        index = int((~x.flatten(1).isfinite().all(1)).nonzero()[0, 0])
        raise BadInput(f"{_where(dataset, index)} holds NaN or infinity, and inputs must be finite numbers")


def _check_owner(dataset: Dataset) -> None:
    """Refuse an owner array that does not say, for every example, which named client it belongs to."""
    owner, names = dataset.owner, dataset.client_names
    if owner is None:
        return
    if owner.shape != tuple(dataset.y.shape) or owner.dtype.kind not in "iu":
        found = f"{owner.shape} {owner.dtype}"
        raise BadInput(f"the owner array of {dataset.name!r} is {found}, and must hold an integer for each label")
    if owner.min() < 0 or (names is not None and owner.max() >= len(names)):
        top = "up" if names is None else str(len(names) - 1)
        found = f"{owner.min()} to {owner.max()}"
        raise BadInput(f"the owners of {dataset.name!r} go from {found}, and clients are numbered from 0 to {top}")


def _where(dataset: Dataset, index: int) -> str:
    """The address of an example: its place in its client's file if there are clients, else in the dataset."""
    if dataset.owner is None:
        return f"example {index} of {dataset.name!r}"
    client = int(dataset.owner[index])
    name = client if dataset.client_names is None else repr(dataset.client_names[client])
    return f"example {int((dataset.owner[:index] == client).sum())} of client {name}"


SPEAKERS = (
    "Andrew", "Bill", "David", "Mark", "Jo", "Kate", "Penny", "Rose", "Mike", "Nick", "Rich", "Tim", "Sarah", "Sue",
    "Wendy",
)  # fmt: skip
# Of each feature, over the examples that all speakers train on; rounded, so that no machine differs in a bit.
SPEAKERS_MEAN = (-3.16, 1.90, -0.50, 0.48, -0.32, 0.62, -0.01, 0.36, -0.30, -0.08)
SPEAKERS_STD = (0.86, 1.16, 0.71, 0.77, 0.67, 0.61, 0.47, 0.58, 0.56, 0.60)


def _speakers(root: Path | None, progress: bool) -> Dataset:
    """990 vowels of fifteen speakers, (10,) float32, standardised; speakers.txt says where they are from.

    Each speaker trains on the first three of the six examples of each vowel.
    """
    with Path(__file__).with_name("speakers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    x = np.array([[float(row[f"f{i}"]) for i in range(10)] for row in rows])
    vowels = tuple(dict.fromkeys(row["vowel"] for row in rows))
    return Dataset(
        name="speakers",
        x=torch.from_numpy((x - SPEAKERS_MEAN) / SPEAKERS_STD).float(),
        y=torch.tensor([vowels.index(row["vowel"]) for row in rows]),
        num_classes=len(vowels),
        owner=np.array([int(row["speaker"]) for row in rows]),
        client_names=SPEAKERS,
        class_names=vowels,
        trains=np.array([int(row["repetition"]) <= 3 for row in rows]),
    )


def _digits(root: Path | None, progress: bool) -> Dataset:
    """1,797 handwritten digits, (1, 8, 8) float32 in [-1, 1]; they come with scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    y = torch.from_numpy(digits.target).long()
    return Dataset(name="digits", x=x, y=y, num_classes=10, class_names=tuple("0123456789"))


def _cifar(name: str, archive: cifar.Archive, root: Path | None, progress: bool) -> Dataset:
    """60,000 photographs, (3, 32, 32) uint8: the 50,000 official training images, then the 10,000 test images."""
    root = root or default_root()
    x, y = cifar.read(archive, root, progress=progress)
    class_names = read_class_names(root / archive.folder / archive.class_names, archive.num_classes)
    num_test = archive.count(archive.files[-1])
    return Dataset(name, x, y, archive.num_classes, num_test=num_test, class_names=class_names)


def default_root() -> Path:
    """``$LRBPFL_DATA``, else the user's cache directory."""
    if chosen := os.environ.get("LRBPFL_DATA"):
        return usable(chosen, home=True)
    import pooch

    return Path(pooch.os_cache("lrbpfl"))


DATASETS: dict[str, Callable[[Path | None, bool], Dataset]] = {
    "speakers": _speakers,
    "digits": _digits,
    "cifar10": partial(_cifar, "cifar10", cifar.CIFAR10),
    "cifar100": partial(_cifar, "cifar100", cifar.CIFAR100),
}
