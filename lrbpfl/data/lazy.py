"""Clients by name that are loaded when they are needed: from a large folder, or by a function of your own."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lrbpfl.data import table_files
from lrbpfl.data.arrays import from_dataset
from lrbpfl.data.census import Census, take_census
from lrbpfl.data.class_names import read_class_names
from lrbpfl.data.clients import Form, Integers, Known, Part, assemble_one
from lrbpfl.data.datasets import Dataset
from lrbpfl.data.folder import read_client, read_labels
from lrbpfl.data.images import picture_files
from lrbpfl.data.labels import Label, as_labels
from lrbpfl.data.order import natural_order
from lrbpfl.data.sources import part_of
from lrbpfl.errors import BadInput

# A folder of more .npz files than this, or of more bytes, is not read at once.
MANY_FILES, MANY_BYTES = 1_000, 2**30


class LazyClients:
    """Clients that are loaded when they are needed: `load(name)` gives a client's (x, y), always the same.

    They come in the natural order of their `names`, which are text. `classes` says what labels there are: so many,
    0, 1, ..., or these; without it, everybody is loaded once at the beginning to find out. A client is checked when it
    is loaded: one that is not in order takes no part in that round, and the record says why. `load` runs in worker
    processes, and is sent to them as models are.
    """

    def __init__(
        self, names: Iterable[str], load: Callable[[str], Any], *, classes: int | Iterable[Label] | None = None
    ) -> None:
        self.names = _ordered(names)
        self.name, self.load = "clients", load
        self.classes = None if classes is None else _classes(classes)
        self.class_names: tuple[str, ...] | None = None
        self.census: Census | None = None
        self.listed: Iterable[str] = self.names  # what the digest is of, beside classes

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<LazyClients: {len(self)}, {self.names[0]!r} to {self.names[-1]!r}>"

    @property
    def digest(self) -> str:
        """A hash of what is known without loading anybody: names and classes; of a folder also sizes and times."""
        found = hashlib.sha256(repr((self.classes, self.class_names)).encode())
        for line in self.listed:
            found.update(f"{line}\n".encode())
        return found.hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "census": None, "listed": ()}  # what nobody asks for in another process

    def known_classes(self) -> tuple[Label, ...]:
        """The classes; found by a look at everybody's labels if nobody said which there are."""
        if self.classes is None:
            self.census = take_census(self.names, lambda name: labels_in(name, self.get(name)))
            self.classes = self.census.classes
        return self.classes

    def opened(self, integers: Integers = "numbers") -> tuple[Known, Dataset]:
        """What all clients have in common, and the first of them."""
        known = Known(self.name, self.known_classes(), self.class_names, integers)
        first = self.dataset(0, known)
        return known._replace(form=Form(self.names[0], tuple(first.x.shape[1:]), first.x.numpy().dtype)), first

    def dataset(self, k: int, known: Known) -> Dataset:
        """Client k's examples, checked."""
        return dataset_of(self.names[k], self.get(self.names[k]), known)

    def get(self, name: str) -> Any:
        """What `load` gives; whatever goes wrong is told with the client's name."""
        try:
            return self.load(name)
        except BadInput:
            raise
        except Exception as error:  # of somebody else's code
            raise BadInput(f"client {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def dataset_of(name: str, own: Any, known: Known) -> Dataset:
    """What a client's `load` gave, checked."""
    return assemble_one(own if isinstance(own, Part) else part_of(name, own), known)


def labels_in(name: str, own: Any) -> npt.NDArray[Any]:
    """The labels (n,) in what a client's `load` gave."""
    if isinstance(own, tuple | list) and len(own) == 2:
        y = own[1]
        return as_labels(y.detach().cpu().numpy() if hasattr(y, "detach") else y, f"client {name!r}")
    return own.y if isinstance(own, Part) else from_dataset(name, own).y


def _ordered(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise BadInput(f"the names of clients are {names!r}: give a list of them")
    found = [str(name) for name in names]
    if not found:
        raise BadInput("there are no clients: give at least one name")
    if len(set(found)) < len(found) or not all(map(str.strip, found)):
        twice = next(name for name, times in Counter(found).items() if times > 1 or not name.strip())
        fault = f"two clients are called {twice!r}" if twice.strip() else "a client has an empty name"
        raise BadInput(f"{fault}: every client needs a name of its own")
    return tuple(natural_order(found))


def _classes(given: int | Iterable[Label]) -> tuple[Label, ...]:
    labels = range(given) if isinstance(given, int) else given
    found = tuple(label.item() if isinstance(label, np.generic) else label for label in labels)
    if not found or len(set(found)) < len(found) or {type(label) for label in found} not in ({int}, {str}):
        raise BadInput(f"classes is {given!r}: give their number, or different labels, all numbers or all text")
    return found


@dataclass(frozen=True)
class _Files:
    """How a folder's clients are loaded; picklable."""

    folder: Path
    odd: dict[str, str] = field(default_factory=dict)  # names of files that are not the client's name and .npz

    def path(self, name: str) -> Path:
        return self.folder / self.odd.get(name, f"{name}.npz")

    def __call__(self, name: str) -> Part:
        return read_client(self.path(name))


def lazy_folder(path: Path) -> LazyClients | None:
    """The folder's clients, if it holds so many .npz files, or so much in them, that they are better not read at once.

    All labels are looked at, and what is wrong with them is refused; inputs are looked at when a client is loaded.
    None if the folder is small, or holds anything else that could be clients.
    """
    try:
        entries = [entry for entry in os.scandir(path.expanduser()) if not entry.name.startswith(".")]
        files = {entry.name: entry.stat() for entry in entries if _suffix(entry.name) == ".npz" and entry.is_file()}
    except (OSError, RuntimeError, ValueError):  # no folder, or none that can be read: others say so
        return None
    path = path.expanduser()
    if len(files) <= MANY_FILES and sum(found.st_size for found in files.values()) <= MANY_BYTES:
        return None
    if not files or _others(path, entries):
        return None
    return _of_files(path, files)


def _of_files(path: Path, files: Mapping[str, os.stat_result]) -> LazyClients:
    odd = {Path(name).stem: name for name in files if not name.endswith(".npz")}
    loader = _Files(path.resolve(), odd)
    clients = LazyClients((Path(name).stem for name in files), loader)
    clients.name = path.resolve().name
    clients.listed = sorted(f"{name}/{found.st_size}/{found.st_mtime_ns}" for name, found in files.items())
    clients.census = take_census(clients.names, lambda name: read_labels(loader.path(name)))
    clients.classes = clients.census.classes
    most = max((label for label in clients.classes if isinstance(label, int)), default=0)
    clients.class_names = read_class_names(path / "classes.txt", most + 1)
    if clients.class_names is not None:
        clients.classes = tuple(range(len(clients.class_names)))
    return clients


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _others(path: Path, entries: Iterable[os.DirEntry[str]]) -> bool:
    """Whether there are tables or folders of images beside the .npz files, about which to ask."""
    if any(_suffix(entry.name) in table_files.SUFFIXES and entry.is_file() for entry in entries):
        return True
    folders = any(entry.is_dir() for entry in entries)
    return folders and any(len(file.relative_to(path).parts) == 3 for file in picture_files(path))
