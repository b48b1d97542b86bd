"""A client's own model: what it predicts, how sure it is, and the file it lives in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lrbpfl import algorithms, trees
from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.core.inputs import length
from lrbpfl.data.table_files import frame_table, is_frame
from lrbpfl.data.tables import features_of
from lrbpfl.engines.work import one_thread
from lrbpfl.errors import BadInput
from lrbpfl.metrics import Predictions, reduce, tempering
from lrbpfl.metrics.conformal import Promise, needed, promise_of, too_few
from lrbpfl.metrics.predictions import Floats
from lrbpfl.personal import files, identity
from lrbpfl.personal.checks import address_of, calibration_of, check_fields, check_personal, scaling_of, temperature_of
from lrbpfl.personal.files import Document
from lrbpfl.personal.signature import as_inputs, checked, example, shape_of
from lrbpfl.rng import generator

Class = int | str  # a label as its owner writes it


class Prediction(NamedTuple):
    """What a client's model says of some inputs."""

    probability: Floats  # (n, classes)
    total: Floats  # (n,) uncertainty, in nats: the entropy of the probabilities
    aleatoric: Floats  # (n,) the part that more data of this client would not take away
    epistemic: Floats  # (n,) the part that they would
    classes: tuple[Class, ...]  # in the order of the columns of `probability`
    promise: Promise | None = None  # of the sets; None: the client kept too few examples from training for one
    refusal: str = ""  # then: how many are needed

    @property
    def label(self) -> npt.NDArray[Any]:
        """The likeliest class of each input, as its owner writes it; (n,)."""
        found: npt.NDArray[Any] = np.asarray(self.classes)[self.probability.argmax(axis=1)]
        return found

    @property
    def set(self) -> list[tuple[Class, ...]]:
        """For each input the classes, likeliest first, among which the true one is with the promised probability."""
        if self.promise is None:
            raise BadInput(self.refusal)
        held = self.promise.sets(self.probability)
        order = np.argsort(-self.probability, axis=1, kind="stable")
        return [tuple(self.classes[c] for c in row if own[c]) for row, own in zip(order, held, strict=True)]


class PersonalModel:
    """One client's model, ready to predict; made by `Federation.personal`, `Federation.onboard` or `load`."""

    def __init__(self, own: Document, shared: Document | None, model: nn.Module | None, where: str) -> None:
        self.about, self._own, self._shared = own.about, own, shared
        self.algorithm = algorithm_of(own.about, where)
        self.inputs = checked(own.about.get("inputs"), where)
        self.classes = classes_of(own.about, where)
        self.features = features_in(own.about)
        check_personal(own, message_of(shared) if shared else {}, where)
        self.temperature = temperature_of(own.about, where)  # what its probabilities are tempered by; 1 if by nothing
        self.scaling = scaling_of(own, where)  # of its features; None if they are taken as they come
        self.calibration = calibration_of(own, where).numpy()  # the scores that sets are made of, rising
        self._address = address_of(own.about, where)
        self.task = task_of(own.about, model, where)
        self._tree = self._assembled(where)
        self._try(where)

    @property
    def client(self) -> str:
        """The client's name."""
        return str(self.about.get("client", ""))

    def predict(self, x: Any, *, coverage: float = 0.9, confidence: float | None = None) -> Prediction:
        """Probabilities and uncertainties for inputs (n, ...): an array, a tensor, or a tuple or dict of them.

        `set` keeps a promise of this coverage, on average over calibration sets, or with this confidence.
        """
        if self.features and is_frame(x):
            x = features_of(frame_table(x, "the table"), self.features, set())
        inputs = as_inputs(x, self.inputs)
        if not length(inputs):
            raise BadInput("the inputs have no rows: give at least one")
        try:
            p = self.predictions(inputs)
        except BadInput:
            raise
        except (RuntimeError, IndexError, ValueError) as error:  # of the owner's network, e.g. over unknown tokens
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise BadInput(f"client {self.client!r}: its model fails on these inputs with {reason}") from error
        said = Prediction(p.probs, p.total, p.aleatoric, p.epistemic, self.classes)
        n = len(self.calibration)
        if n < needed(coverage, confidence):
            return said._replace(refusal=f"client {self.client!r}: {too_few(n, coverage, confidence)}")
        return said._replace(promise=promise_of(self.calibration, coverage, confidence))

    def predictions(self, x: Any) -> Predictions:
        """The same for tensors as they come from their owner, in the form that metrics take; labels are 0."""
        scaled = x if self.scaling is None else self.scaling.apply(x)
        with one_thread():  # the same bits as in a run
            samples = self.algorithm.predict(self.task, self._tree, scaled, generator(*self._address))
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
            own = own._replace(tensors={name: _halved(name, leaf) for name, leaf in own.tensors.items()})
        if self._shared and own.about["shared"] and not (target := path.parent / shared_name(self._shared)).exists():
            files.write(target, self._shared)
        files.write(path, own)
        return path

    def __repr__(self) -> str:
        many = "class" if len(self.classes) == 1 else "classes"
        made = f"by {self.about['algorithm']['name']} from {self.about['examples']} examples"
        return f"<PersonalModel of client {self.client!r}: {len(self.classes)} {many}, made {made}>"

    def _leaves(self) -> dict[str, Tensor]:
        """Every tensor of the model by its name, its own and those it shares."""
        sources: dict[str, str | None] = self.about["leaves"]
        shared = message_of(self._shared) if self._shared else {}
        own = self._own.tensors
        found = {name: own[f"own/{name}"] if source is None else shared[source] for name, source in sources.items()}
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
        if not np.isfinite(found.probs).all():
            raise BadInput(f"{where} cannot be used: its probabilities are not finite")


def message_of(shared: Document) -> dict[str, Tensor]:
    """The tensors of the message that lies in a shared document, by their names there."""
    return {name.removeprefix("message/"): leaf for name, leaf in shared.tensors.items() if name.startswith("message/")}


def shared_name(shared: Document) -> str:
    """The file that holds what clients share, named after its content."""
    return f"W-{shared.digest[:16]}.safetensors"


def load(path: str | Path, *, client: str | int | None = None, model: nn.Module | None = None) -> PersonalModel:
    """A client's model from its file, or from the directory of a finished run by the client's name.

    A model of your own has to be given; the package's own are made by name.
    """
    path = Path(path)
    if path.is_dir():
        path = _of_client(path, client)
    elif client is not None:
        raise BadInput(f"{path} is no run directory, so it has no client {client!r}: give the file alone")
    own = files.read(path, "personal")
    return PersonalModel(own, _shared_of(own, path), model, str(path))


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


def _of_client(run: Path, client: str | int | None) -> Path:
    """The file of a client of a finished run."""
    names = _client_names(run / "clients.json")
    if client is None or str(client) not in names:
        some = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        wrong = f"{run} has models of many clients: name one" if client is None else f"{run} has no client {client!r}"
        raise BadInput(f"{wrong}; its clients: {some}")
    return run / "clients" / f"{names.index(str(client)):05d}" / "personal.safetensors"


def _client_names(file: Path) -> list[str]:
    if not file.is_file():
        raise BadInput(f"{file.parent} holds no {file.name}: it is no finished run")
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{file} cannot be read: {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput(f"{file} cannot be used: it holds no list of names")
    return names


def algorithm_of(about: Mapping[str, Any], where: str) -> Algorithm:
    """The algorithm that a description names, with its fields."""
    said = about.get("algorithm")
    said = said if isinstance(said, dict) else {}
    name = said.get("name")
    if not isinstance(name, str) or name not in algorithms.names():
        raise BadInput(f"{where} cannot be used: it names an algorithm that is not here, {str(name)[:40]!r}")
    check_fields(said.get("fields"), where)
    try:
        return algorithms.find(name)(**said["fields"])
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{where} cannot be used: its fields of {name} are not those of this version ({reason})"
        ) from None


def classes_of(about: Mapping[str, Any], where: str) -> tuple[Class, ...]:
    """The labels as their owners write them, in the order of their numbers."""
    found = about.get("classes")
    plain = isinstance(found, list) and found and all(type(name) in (int, str) for name in found)
    if not plain or len(set(map(type, found or []))) > 1 or len(set(found or [])) < len(found or []):
        raise BadInput(f"{where} cannot be used: its description does not name its classes")
    return tuple(found or ())


def features_in(about: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the columns that a model takes in, in their order; None if it was not trained on tables."""
    found = about.get("features")
    return tuple(map(str, found)) if isinstance(found, list) and found else None


def task_of(about: Mapping[str, Any], model: nn.Module | None, where: str) -> Task:
    """The task of a description, as far as a single client needs it."""
    classes, shape = classes_of(about, where), shape_of(checked(about.get("inputs"), where))
    if files.named(about, "label_prior", (int, float), where) < 0:
        raise BadInput(f"{where} cannot be used: its label prior is negative")
    return Task(
        model=identity.restored(about.get("model"), len(classes), shape, model, where),
        num_classes=len(classes),
        label_prior=float(about["label_prior"]),
        class_names=tuple(map(str, classes)),
    )


def _halved(name: str, leaf: Tensor) -> Tensor:
    """A number of the model in 16 bits; scales of features stay as they are."""
    if leaf.dtype != torch.float32 or not name.startswith("own/"):
        return leaf
    if not torch.equal(leaf.half().isfinite(), leaf.isfinite()):
        raise BadInput(f"{name.removeprefix('own/')} holds numbers that 16 bits cannot: save without half")
    return leaf.half()
