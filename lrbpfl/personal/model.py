"""A client's own model: what it predicts, how sure it is, and the file it lives in."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lrbpfl import documents, trees
from lrbpfl.core.inputs import length
from lrbpfl.data.table_files import frame_table, is_frame
from lrbpfl.data.tables import features_of
from lrbpfl.disk import usable
from lrbpfl.documents import Document
from lrbpfl.engines.work import one_thread
from lrbpfl.errors import BadInput
from lrbpfl.metrics import Predictions, reduce, tempering
from lrbpfl.metrics.conformal import Promise, needed, promise_of, too_few
from lrbpfl.metrics.predictions import Floats
from lrbpfl.personal.checks import address_of, calibration_of, check_personal, scaling_of, temperature_of
from lrbpfl.personal.description import Class, algorithm_of, classes_of, features_in, message_of, task_of
from lrbpfl.personal.signature import Inputs, as_inputs, checked, example
from lrbpfl.rng import generator


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

    def __init__(
        self, own: Document, shared: Document | None, model: nn.Module | None, where: str, *, tried: bool = False
    ) -> None:
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
        if not tried:  # somebody who makes many tries them together
            self.check(where)

    @property
    def client(self) -> str:
        """The client's name."""
        return str(self.about.get("client", ""))

    def predict(self, x: Any, *, coverage: float = 0.9, confidence: float | None = None) -> Prediction:
        """Probabilities and uncertainties for inputs (n, ...): an array, a tensor, or a tuple or dict of them.

        `set` keeps a promise of this coverage, on average over calibration sets, or with this confidence.
        """
        return self.concluded(self.samples(self.taken(x)), coverage=coverage, confidence=confidence)

    def taken(self, x: Any) -> Inputs:
        """What somebody gave, as the tensors that the network takes in; refused in a sentence if it cannot be."""
        if self.features and is_frame(x):
            x = features_of(frame_table(x, "the table"), self.features, set())
        inputs = as_inputs(x, self.inputs)
        if not length(inputs):
            raise BadInput("the inputs have no rows: give at least one")
        return self._scaled(inputs)

    def samples(self, x: Inputs) -> Tensor:
        """Probabilities under every sample of the model, (samples, n, classes); always the same samples."""
        try:
            with one_thread():  # the same bits as in a run
                return self.algorithm.predict(self.task, self._tree, x, self.noise())
        except BadInput:
            raise
        except (RuntimeError, IndexError, ValueError) as error:  # of the owner's network, e.g. over unknown tokens
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise BadInput(f"client {self.client!r}: its model fails on these inputs with {reason}") from error

    def concluded(self, samples: Tensor, *, coverage: float = 0.9, confidence: float | None = None) -> Prediction:
        """What the samples (samples, n, classes) say together."""
        p = self._tempered(samples)
        said = Prediction(p.probs, p.total, p.aleatoric, p.epistemic, self.classes)
        n = len(self.calibration)
        if n < needed(coverage, confidence):
            return said._replace(refusal=f"client {self.client!r}: {too_few(n, coverage, confidence)}")
        return said._replace(promise=promise_of(self.calibration, coverage, confidence))

    def predictions(self, x: Inputs) -> Predictions:
        """The same for tensors as they come from their owner, in the form that metrics take; labels are 0."""
        return self._tempered(self.samples(self._scaled(x)))

    def noise(self) -> torch.Generator:
        """Where its samples come from: every call starts the same stream."""
        return generator(*self._address)

    def _scaled(self, x: Inputs) -> Inputs:
        return x if self.scaling is None else self.scaling.apply(x)

    def _tempered(self, samples: Tensor) -> Predictions:
        labels = torch.zeros(samples.shape[1], dtype=torch.int64)
        return tempering.temper(reduce(samples, labels), self.temperature)

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
            documents.write(target, self._shared)
        documents.write(path, own)
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

    def check(self, where: str) -> None:
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


def shared_name(shared: Document) -> str:
    """The file that holds what clients share, named after its content."""
    return f"W-{shared.digest[:16]}.safetensors"


def load(path: str | Path, *, client: str | int | None = None, model: nn.Module | None = None) -> PersonalModel:
    """A client's model from its file, or from the directory of a finished run by the client's name.

    A model of your own has to be given; the package's own are made by name.
    """
    path, own, shared = read_documents(path, client)
    return PersonalModel(own, shared, model, str(path))


def read_documents(path: str | Path, client: str | int | None = None) -> tuple[Path, Document, Document | None]:
    """A client's file, by itself or by the client's name in a run, what it holds, and what it shares with others."""
    path = usable(path)
    if path.is_dir():
        path = _of_client(path, client)
    elif client is not None:
        raise BadInput(f"{path} is no run directory, so it has no client {client!r}: give the file alone")
    own = documents.read(path, "personal")
    return path, own, shared_of(own, path)


def shared_of(own: Document, path: Path, known: Mapping[str, Document] | None = None) -> Document | None:
    """What the file's owner shares with others: it must be the very one the file was made with.

    Those that are known already, by their digests, are not read again.
    """
    digest = own.about.get("shared")
    if digest is None:
        return None
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadInput(f"{path} cannot be used: its description does not say which shared network it belongs to")
    if known and digest in known:
        return known[digest]
    name = f"W-{digest[:16]}.safetensors"
    for folder in (path.parent, path.parent.parent.parent):  # beside it, or where the run keeps it
        if (folder / name).is_file():
            shared = documents.read(folder / name, "shared")
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
    file = run / "clients" / f"{names.index(str(client)):05d}" / "personal.safetensors"
    if not file.exists():
        raise BadInput(f"{run} holds no model of {client!r}: it was not judged after the last round, or could not be")
    return file


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


def _halved(name: str, leaf: Tensor) -> Tensor:
    """A number of the model in 16 bits; scales of features stay as they are."""
    if leaf.dtype != torch.float32 or not name.startswith("own/"):
        return leaf
    if not torch.equal(leaf.half().isfinite(), leaf.isfinite()):
        raise BadInput(f"{name.removeprefix('own/')} holds numbers that 16 bits cannot: save without half")
    return leaf.half()
