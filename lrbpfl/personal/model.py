"""A client's own model: what it predicts, how sure it is, and the file it lives in."""

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.engines.work import one_thread
from lrbpfl.errors import BadInput
from lrbpfl.metrics import Predictions, reduce, tempering
from lrbpfl.metrics.predictions import Floats
from lrbpfl.personal import files, identity
from lrbpfl.personal.files import FORMAT, Document
from lrbpfl.personal.signature import as_inputs, checked, example, shape_of
from lrbpfl.rng import Address, generator

Class = int | str  # a label as its owner writes it


class Prediction(NamedTuple):
    """What a client's model says of some inputs."""

    probability: Floats  # (n, classes)
    total: Floats  # (n,) uncertainty, in nats: the entropy of the probabilities
    aleatoric: Floats  # (n,) the part that more data of this client would not take away
    epistemic: Floats  # (n,) the part that they would
    classes: tuple[Class, ...]  # in the order of the columns of `probability`

    @property
    def label(self) -> npt.NDArray[Any]:
        """The likeliest class of each input, as its owner writes it; (n,)."""
        found: npt.NDArray[Any] = np.asarray(self.classes)[self.probability.argmax(axis=1)]
        return found


class PersonalModel:
    """One client's model, ready to predict; made by `Federation.personal`, `Federation.onboard` or `load`."""

    def __init__(self, own: Document, shared: Document | None, model: nn.Module | None, where: str) -> None:
        self.about, self._own, self._shared = own.about, own, shared
        self.algorithm = _algorithm(own.about, where)
        self.inputs = checked(own.about.get("inputs"), where)
        self.classes = _classes(own.about, where)
        shape = shape_of(self.inputs)
        network = identity.restored(own.about.get("model"), len(self.classes), shape, model, where)
        self.task = Task(
            model=network,
            num_classes=len(self.classes),
            label_prior=float(files.named(own.about, "label_prior", (int, float), Path(where))),
            class_names=tuple(map(str, self.classes)),
        )
        self._tree = self._assembled(where)
        self._try(where)

    @property
    def client(self) -> str:
        """The client's name."""
        return str(self.about.get("client", ""))

    def predict(self, x: Any) -> Prediction:
        """Probabilities and uncertainties for inputs (n, ...): an array, a tensor, or a tuple or dict of them."""
        p = self.predictions(as_inputs(x, self.inputs))
        return Prediction(p.probs, p.total, p.aleatoric, p.epistemic, self.classes)

    def predictions(self, x: Any) -> Predictions:
        """The same for tensors, in the form that metrics take; labels are 0."""
        with one_thread():  # the same bits as in a run
            samples = self.algorithm.predict(self.task, self._tree, x, generator(*self._address))
        rows = samples.shape[1]
        return tempering.temper(reduce(samples, torch.zeros(rows, dtype=torch.int64)), self.temperature)

    def save(self, path: str | Path, *, whole: bool = False, half: bool = False) -> Path:
        """Write the model into one file, for its owner's eyes alone; the path.

        What all clients share is written once beside it, as W-....safetensors; `whole` puts it inside. `half` stores
        numbers of 32 bits in 16.
        """
        path = Path(path)
        own = self._whole() if whole and self._shared else self._own
        if half:
            own = own._replace(tensors={name: _halved(leaf) for name, leaf in own.tensors.items()})
        if self._shared and not whole and not (target := path.parent / shared_name(self._shared)).exists():
            files.write(target, self._shared)
        files.write(path, own)
        return path

    @cached_property
    def temperature(self) -> float:
        """What its probabilities are tempered by; 1 if by nothing."""
        return float(self.about.get("temperature", 1.0))

    @cached_property
    def _address(self) -> tuple[int, *tuple[Address, ...]]:
        seed, *path = self.about["address"]
        return (seed, *path)

    def _leaves(self) -> dict[str, Tensor]:
        """Every tensor of the model by its name, its own and those it shares."""
        sources: dict[str, str | None] = self.about["leaves"]
        shared = self._shared.tensors if self._shared else {}
        found = {
            name: self._own.tensors[f"own/{name}"] if source is None else shared[source]
            for name, source in sources.items()
        }
        return {name: leaf.float() if leaf.dtype == torch.float16 else leaf for name, leaf in found.items()}

    def _whole(self) -> Document:
        tensors = {**self._own.tensors, **{f"own/{name}": leaf for name, leaf in self._leaves().items()}}
        about = {**self.about, "leaves": dict.fromkeys(self.about["leaves"]), "shared": None}
        return Document(about, tensors)

    def _assembled(self, where: str) -> trees.Tree:
        try:
            hints = get_type_hints(type(self.algorithm).personalise)
            return trees.typed(hints["return"], self._leaves())
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{where} cannot be used: what it holds is not a model of {type(self.algorithm).__name__} ({error})"
            ) from None

    def _try(self, where: str) -> None:
        """Predict once, on zeros: whatever does not fit shows here, and not when somebody relies on it."""
        try:
            _ = self._address, self.temperature
            found = self.predictions(example(self.inputs))
        except Exception as error:  # a file may hold anything, and this is where it meets the model
            reason = " ".join(str(error).split())[:200]
            raise BadInput(
                f"{where} cannot be used: its tensors do not fit the model ({type(error).__name__}: {reason})"
            ) from None
        if found.probs.shape != (1, len(self.classes)):
            raise BadInput(
                f"{where} cannot be used: it predicts {found.probs.shape[1]} classes and names {len(self.classes)}"
            )


def shared_name(shared: Document) -> str:
    """The file that holds what clients share, named after its content."""
    return f"W-{shared.digest[:16]}.safetensors"


def load(path: str | Path, *, client: str | None = None, model: nn.Module | None = None) -> PersonalModel:
    """A client's model from its file, or from the directory of a finished run by the client's name.

    A model of your own has to be given; the package's own are made by name.
    """
    path, own, shared = documents(path, client)
    return PersonalModel(own, shared, model, str(path))


def documents(path: str | Path, client: str | None = None) -> tuple[Path, Document, Document | None]:
    """A client's file, by itself or by the client's name in a run, what it holds, and what it shares with others."""
    path = Path(path)
    if path.is_dir():
        path = _of_client(path, client)
    elif client is not None:
        raise BadInput(f"{path} is no run directory, so it has no client {client!r}: give the file alone")
    own = files.read(path, "personal")
    return path, own, _shared_of(own, path)


def _shared_of(own: Document, path: Path) -> Document | None:
    """What the file's owner shares with others: it must be the very one the file was made with."""
    digest = own.about.get("shared")
    if digest is None:
        return None
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadInput(f"{path} cannot be used: its description does not say which shared network it belongs to")
    name = f"W-{digest[:16]}.safetensors"
    for folder in (path.parent, path.parent.parent.parent):  # beside it, or where the run keeps it
        if (folder / name).is_file():
            shared = files.read(folder / name, "shared")
            if shared.digest != digest:
                raise BadInput(f"{folder / name} is not the shared network that {path} belongs to")
            return shared
    raise BadInput(f"{path} belongs to a shared network that is not beside it: {name} is missing")


def _of_client(run: Path, client: str | None) -> Path:
    """The file of a client of a finished run."""
    file = run / "clients.json"
    if not file.is_file():
        raise BadInput(f"{run} holds no clients.json: it is no finished run")
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from None
    if client not in names:
        some = ", ".join(map(str, names[:20])) + (", ..." if len(names) > 20 else "")
        wrong = f"has no client {client!r}" if client is not None else "is a run of several clients, and none is named"
        raise BadInput(f"{run} {wrong}; its clients: {some}")
    return run / "clients" / f"{names.index(client):05d}" / "personal.safetensors"


def _algorithm(about: Mapping[str, Any], where: str) -> Algorithm:
    said = about.get("algorithm")
    said = said if isinstance(said, dict) else {}
    name = said.get("name")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise BadInput(f"{where} cannot be used: it names an algorithm that is not here, {str(name)[:40]!r}")
    try:
        return ALGORITHMS[name](**said["fields"])
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{where} cannot be used: its fields of {name} are not those of this version ({reason})"
        ) from None


def _classes(about: Mapping[str, Any], where: str) -> tuple[Class, ...]:
    found = about.get("classes")
    plain = isinstance(found, list) and found and all(type(name) in (int, str) for name in found)
    if not plain or len(set(map(type, found or []))) > 1 or len(set(found or [])) < len(found or []):
        raise BadInput(f"{where} cannot be used: its description does not name its classes")
    return tuple(found or ())


def _halved(leaf: Tensor) -> Tensor:
    return leaf.half() if leaf.dtype == torch.float32 else leaf


def versions() -> dict[str, str]:
    """What a file was made with."""
    return {name: version(name) for name in ("lrbpfl", "torch")}


def description(
    kind: str, name: str, algorithm: Algorithm, task: Task, inputs: Any, classes: tuple[Class, ...] | None
) -> dict[str, Any]:
    """What files of a federation have in common."""
    return {
        "format": FORMAT,
        "kind": kind,
        "versions": versions(),
        "algorithm": {"name": name, "fields": dataclasses.asdict(algorithm)},
        "label_prior": task.label_prior or 0.0,
        "classes": list(classes or task.class_names or range(task.num_classes)),
        "model": identity.describe(task.model, task.num_classes, shape_of(inputs)),
        "inputs": inputs,
    }
