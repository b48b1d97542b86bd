"""From rows as JSON writes them to answers: every fault is a sentence that names the row."""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.errors import BadInput
from lrbpfl.personal.description import Class
from lrbpfl.personal.model import PersonalModel
from lrbpfl.personal.signature import DTYPES, Inputs
from lrbpfl.serving.batching import Asked, samples

Array = npt.NDArray[Any]
DEEPEST = 8  # dimensions that an example may have

# A network takes its parameters by having them put in place, so that two calls at once would mix them up.
_one_at_a_time = threading.Lock()


class Question(NamedTuple):
    """One example: whose it is, and the numbers, nested as one example of that client's data."""

    client: str
    input: Any


class UnknownClient(BadInput):
    """There is no model of this name, and nobody else's may answer."""


@dataclass(frozen=True)
class Answer:
    """What a client's model says of one row; uncertainties in nats."""

    client: str
    label: Class
    probability: dict[str, float]  # by the classes' names
    total: float
    aleatoric: float
    epistemic: float
    set: list[Class] | None = None  # that holds the label with the coverage that was promised, if one was


def answers(models: Mapping[str, PersonalModel], rows: Sequence[Question]) -> list[Answer]:
    """An answer to each row, from its client's own model."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.client not in models:
            raise UnknownClient(f"row {i}: there is no client {short(row.client)}")
        places[row.client].append(i)
    asked = [Asked.of(models[name], _taken(models[name], rows, at)) for name, at in places.items()]
    found: dict[int, Answer] = {}
    for one, at, drawn in zip(asked, places.values(), _samples(asked, list(places.values())), strict=True):
        _check(drawn, at)
        found |= dict(zip(at, _told(one.model, one.model.concluded(drawn)), strict=True))
    return [found[i] for i in range(len(rows))]


def short(value: object) -> str:
    """A value that somebody sent, for a sentence: of bounded length, and whatever is odd in it escaped."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _told(model: PersonalModel, said: Any) -> Iterator[Answer]:
    """A `Prediction` row by row; with its sets where the model can promise some."""
    names = [str(name) for name in said.classes]
    sets = None if getattr(said, "promise", None) is None else said.set
    for i, best in enumerate(said.probability.argmax(axis=1)):
        yield Answer(
            client=model.client,
            label=said.classes[int(best)],
            probability=dict(zip(names, said.probability[i].tolist(), strict=True)),
            total=float(said.total[i]),
            aleatoric=float(said.aleatoric[i]),
            epistemic=float(said.epistemic[i]),
            set=None if sets is None else list(sets[i]),
        )


def _samples(asked: list[Asked], places: list[list[int]]) -> list[Tensor]:
    """The samples of each; what the network itself does not take is blamed on the row that brings it."""
    with _one_at_a_time:
        try:
            return samples(asked)
        except (IndexError, RuntimeError, ValueError):
            for (model, x, rows), at in zip(asked, places, strict=True):
                for i in range(rows):
                    _try(model, trees.tree_map(lambda part, i=i: part[i : i + 1], x), at[i])
            raise


def _try(model: PersonalModel, x: Inputs, place: int) -> None:
    try:
        model.samples(x)
    except (IndexError, RuntimeError, ValueError):
        raise BadInput(f"row {place}: the model of client {short(model.client)} cannot take these numbers") from None


def _check(drawn: Tensor, places: list[int]) -> None:
    fine = drawn.isfinite().all(dim=2).all(dim=0)
    if not bool(fine.all()):
        place = places[int((~fine).nonzero()[0, 0])]
        raise BadInput(f"row {place}: its numbers are so large that the model has no answer")


def _taken(model: PersonalModel, rows: Sequence[Question], places: list[int]) -> Inputs:
    """The rows in these places, all of one client, as its model takes them."""
    read = [_read(rows[i].input, model.inputs, f"row {i}") for i in places]
    try:
        return model.taken(_stacked(read))
    except BadInput:
        for i, one in zip(places, read, strict=True):
            try:
                model.taken(_stacked([one]))
            except BadInput as error:
                raise BadInput(f"row {i}: {error}") from None
        raise


def _stacked(read: list[Any]) -> Any:
    return trees.tree_map(lambda *parts: np.stack(parts), *read)


def _read(given: Any, described: Any, where: str) -> Any:
    """One row as an array, or as a tuple or dict of them, in the shape that the model takes."""
    if "named" in described:
        wanted = described["named"]
        if not isinstance(given, dict) or set(given) != set(wanted):
            raise BadInput(f"{where} must be an object with {', '.join(map(ascii, wanted))}")
        return {name: _read(given[name], part, f"{where}, {name!a}") for name, part in wanted.items()}
    if "several" in described:
        wanted = described["several"]
        if not isinstance(given, list) or len(given) != len(wanted):
            raise BadInput(f"{where} must be a list of {len(wanted)} inputs")
        return tuple(
            _read(part, own, f"{where}, input {i}") for i, (part, own) in enumerate(zip(given, wanted, strict=True))
        )
    return _array(given, described, where)


def _array(given: Any, described: Any, where: str) -> Array:
    shape, kind = tuple(described["shape"]), DTYPES[described["dtype"]]
    odd = _odd(given)
    if odd is not None:
        raise BadInput(f"{where} holds {odd}, and only numbers are taken")
    try:
        found = np.asarray(given)
    except ValueError:  # lists of different lengths
        raise BadInput(f"{where} is no regular array, and the model takes one of shape {shape}") from None
    if found.shape != shape:
        raise BadInput(f"{where} has the shape {found.shape}, and the model takes {shape}")
    large = torch.finfo(kind).max if kind.is_floating_point else 2**63 - 1
    if found.dtype.kind not in "fi" or not bool((np.abs(found.astype(np.float64)) <= large).all()):
        raise BadInput(f"{where} holds a number that is not finite, or too large")
    return found


def _odd(given: Any, depth: int = 0) -> str | None:
    """The first thing in nested lists that is no number, if there is one; true and false are not numbers here."""
    if not isinstance(given, list):
        return None if type(given) in (int, float) else _named(given)
    if depth > DEEPEST:
        return "lists in too many lists"
    if {type(item) for item in given} <= {int, float}:
        return None
    return next((odd for item in given if (odd := _odd(item, depth + 1)) is not None), None)


def _named(given: Any) -> str:
    """What JSON calls it, of bounded length."""
    return "an object" if isinstance(given, dict) else json.dumps(given)[:60]
