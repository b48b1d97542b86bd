"""The models of many clients side by side: whatever is equal in them is in memory once."""

import ctypes
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lrbpfl import documents
from lrbpfl.documents import Document
from lrbpfl.errors import BadInput
from lrbpfl.personal.model import PersonalModel, shared_of
from lrbpfl.personal.signature import example
from lrbpfl.serving.batching import Asked, samples

SHARED = re.compile(r"W-[0-9a-f]{16}\.safetensors")
TOGETHER = 64  # models that are tried at a time


class Found(NamedTuple):
    """A client's file, read."""

    where: str
    own: Document
    shared: Document | None


class Shelf(NamedTuple):
    """Models by their clients' names, and the clients of a run that have none."""

    models: dict[str, PersonalModel]
    missing: tuple[str, ...] = ()


def shelf(directory: str | Path, model: nn.Module | None = None) -> Shelf:
    """Every client's model in the directory of a finished run, or in a folder of personal files.

    A model of your own has to be given; the package's own are made by name.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}")
    paths, missing = _of_run(directory) if (directory / "clients.json").is_file() else (_of_folder(directory), ())
    if not paths:
        raise BadInput(f"{directory} is no finished run and holds no personal models (*.safetensors)")
    return Shelf(side_by_side(_read(paths), model), tuple(missing))


def side_by_side(found: Iterable[Found], model: nn.Module | None = None) -> dict[str, PersonalModel]:
    """The models of these files by their clients' names, each of them tried once."""
    common, models, places = _Common(model), dict[str, PersonalModel](), dict[str, str]()
    for one in found:
        personal = common.model(one)
        name = personal.client
        if name in models:
            raise BadInput(f"{places[name]} and {one.where} both belong to a client {name!r}: keep one of them")
        models[name], places[name] = personal, one.where
    names = list(models)
    for at in range(0, len(names), TOGETHER):
        _try([(places[name], models[name]) for name in names[at : at + TOGETHER]])
    del common
    _release_memory()
    return models


def _of_run(run: Path) -> tuple[list[Path], list[str]]:
    """The files of a run's clients, and the names of those without one."""
    file = run / "clients.json"
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from None
    if not isinstance(names, list):
        raise BadInput(f"{file} is no list of names")
    paths = {str(name): run / "clients" / f"{k:05d}" / "personal.safetensors" for k, name in enumerate(names)}
    there = [path for path in paths.values() if path.is_file()]
    return there, [name for name, path in paths.items() if not path.is_file()]


def _of_folder(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.safetensors")) if not SHARED.fullmatch(path.name)]


def _read(paths: Iterable[Path]) -> Iterator[Found]:
    known: dict[str, Document] = {}
    for path in paths:
        own = documents.read(path, "personal")
        shared = shared_of(own, path, known)
        if shared is not None:
            known[own.about["shared"]] = shared
        yield Found(str(path), own, shared)


class _Common:
    """What models have had in common so far; needed only while they are put side by side."""

    def __init__(self, model: nn.Module | None) -> None:
        self.given = model
        self.values: dict[str, Any] = {}  # by their JSON
        self.tensors: dict[bytes, Tensor] = {}  # by their content
        self.blocks = _Blocks()
        self.first: dict[str, PersonalModel] = {}  # by what they say of network, classes, inputs and algorithm

    def model(self, found: Found) -> PersonalModel:
        """The model of a file, made of what is there already as far as it can be."""
        where, own, shared = found
        own = Document(self._about(own.about), {name: self._tensor(leaf) for name, leaf in own.tensors.items()})
        key = json.dumps([own.about.get(key) for key in ("model", "classes", "inputs", "algorithm", "label_prior")])
        first = self.first.get(key)
        network = self.given if first is None else first.task.model
        personal = PersonalModel(own, shared, network, where, tried=True)
        if first is None:
            self.first[key] = personal
            _share(personal)
        else:
            personal.task, personal.classes, personal.inputs = first.task, first.classes, first.inputs
            personal.algorithm = first.algorithm
        return personal

    def _about(self, about: dict[str, Any]) -> dict[str, Any]:
        return {key: self.values.setdefault(json.dumps(value), value) for key, value in about.items()}

    def _tensor(self, leaf: Tensor) -> Tensor:
        """The tensor of this content that is there already; in the precision that models compute with."""
        leaf = leaf.float() if leaf.dtype == torch.float16 else leaf
        content = leaf.contiguous().flatten().view(torch.uint8).numpy()
        key = hashlib.sha256(f"{leaf.dtype}{tuple(leaf.shape)}".encode() + content.tobytes()).digest()
        if key not in self.tensors:
            self.tensors[key] = self.blocks.put(leaf)
        return self.tensors[key]


class _Blocks:
    """Tensors one behind the other in large blocks: each for itself, they would leave holes in memory between them."""

    SIZE, STEP = 2**23, 64  # bytes; a tensor of its own begins at a multiple of 64, too

    def __init__(self) -> None:
        self.block, self.used = torch.empty(0, dtype=torch.uint8), 0

    def put(self, leaf: Tensor) -> Tensor:
        """The tensor at its new place; large ones stay where they are."""
        if not 0 < leaf.nbytes <= self.SIZE // 8:
            return leaf
        if self.used + leaf.nbytes > len(self.block):
            self.block, self.used = torch.empty(self.SIZE, dtype=torch.uint8), 0
        place = self.block[self.used : self.used + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        self.used += -(-leaf.nbytes // self.STEP) * self.STEP
        return place.copy_(leaf)


def _share(personal: PersonalModel) -> None:
    """Let the template hold W itself where the model has one: it is called with explicit parameters anyway."""
    W = getattr(personal._tree, "W", None)
    for name, p in personal.task.model.named_parameters():
        if isinstance(W, dict) and p.requires_grad and name in W and W[name].shape == p.shape:
            p.data = W[name]


def _try(models: list[tuple[str, PersonalModel]]) -> None:
    """Ask all of them together, on zeros; if that fails, one after the other, to find out whose file it is."""
    try:
        zeros = [Asked.of(model, example(model.inputs)) for _, model in models]
        found = [model.concluded(given) for (_, model), given in zip(models, samples(zeros), strict=True)]
        fine = all(p.probability.shape == (1, len(p.classes)) for p in found)
    except Exception:  # a file may hold anything, and this is where it meets the model
        fine = False
    if not fine:
        for where, model in models:
            model.check(where)
        raise BadInput(f"the models from {models[0][0]} to {models[-1][0]} cannot be asked together")


def _release_memory() -> None:
    """Ask the C library to give back to the kernel what loading took and freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
