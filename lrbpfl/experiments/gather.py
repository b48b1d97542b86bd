"""Everybody's data as the front door takes them, parted into what trains, what calibrates and what judges."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lrbpfl.core.descent import Data
from lrbpfl.data import Dataset, LazyClients, lazy_folder, read_clients, remarks
from lrbpfl.data.clients import Integers
from lrbpfl.data.labels import Label, as_labels, classes_of
from lrbpfl.data.order import natural_order
from lrbpfl.errors import BadInput
from lrbpfl.experiments.lazily import gather_lazily
from lrbpfl.experiments.parting import (
    Gathered,
    Parting,
    Standardise,
    is_several,
    parted,
    plain,
    several_inputs,
    standardised,
)


class Source(NamedTuple):
    """Everybody's examples by name, before they are parted."""

    data: dict[str, Data]
    classes: tuple[Label, ...]
    dataset: Dataset | None  # None where inputs are several tensors


def gather(
    clients: Any,
    test: Any,
    *,
    seed: int,
    hold_out: float,
    calibration: float,
    standardise: Standardise,
    tokens: bool = False,
    client: str | None = None,
    label: str | None = None,
    at_once: bool = False,
) -> Gathered:
    """Read everybody's data, part them by the seed, and put them on one scale if asked to.

    A large folder's clients are loaded when they are needed, unless somebody needs the data of all of them `at_once`.
    """
    if not 0 < hold_out < 1 or not 0 <= calibration < 1:
        found = f"hold_out is {hold_out} and calibration {calibration}"
        raise BadInput(f"{found}: give shares, hold_out above 0 and both below 1")
    how = Parting(seed, hold_out, calibration, standardise)
    if lazy := _lazy(clients, at_once or test is not None or standardise == "pooled" or bool(client or label)):
        return gather_lazily(lazy, test, how, tokens=tokens, column=client or label)
    integers: Integers = "tokens" if tokens else "numbers"
    source = _read(clients, client, label, integers)
    judged = None if test is None else _tests(_read(test, client, label, integers), source)
    whole = {
        name: parted(name, data, None if judged is None else judged[name], how) for name, data in source.data.items()
    }
    said = _remarks(source, standardise)
    if judged is None:
        said.append(how.remark())
    return Gathered(
        clients=tuple(standardised(list(whole.values()), standardise)),
        classes=source.classes,
        features=source.dataset.feature_names if source.dataset else None,
        remarks=tuple(said),
    )


def _lazy(clients: Any, at_once: bool) -> LazyClients | None:
    """Clients that are to be loaded when they are needed: one's own, or those of a large folder."""
    if isinstance(clients, LazyClients):
        return clients
    return lazy_folder(Path(clients)) if isinstance(clients, str | PathLike) and not at_once else None


def _read(source: Any, client: str | None, label: str | None, integers: Integers) -> Source:
    if isinstance(source, Mapping) and any(is_several(own) for own in source.values()):
        return _several_inputs(source)
    dataset = read_clients(source, client=client, label=label, integers=integers)
    assert dataset.owner is not None and dataset.client_names is not None
    data = {}
    for number, name in enumerate(dataset.client_names):
        own = torch.from_numpy(np.flatnonzero(dataset.owner == number))
        data[name] = Data(dataset.x[own], dataset.y[own])
    return Source(data, dataset.classes or tuple(range(dataset.num_classes)), dataset)


def _several_inputs(source: Mapping[Any, Any]) -> Source:
    """Clients whose models take several inputs: pairs of a tuple or dict of arrays, and labels."""
    named = {str(name): own for name, own in source.items()}
    if len(named) < len(source):
        raise BadInput("two clients have the same name: every client needs a name of its own")
    pairs = {name: _pair(name, named[name]) for name in natural_order(named)}
    labels = {name: as_labels(plain(y), f"client {name!r}") for name, (_, y) in pairs.items()}
    classes = classes_of(labels)
    data = {name: several_inputs(name, x, labels[name], classes) for name, (x, _) in pairs.items()}
    return Source(data, classes, None)


def _pair(name: str, own: Any) -> tuple[Any, Any]:
    if not is_several(own):
        raise BadInput(f"client {name!r} has no pair of several inputs (a tuple or dict of arrays) and labels")
    x, y = own
    return x, y


def _tests(test: Source, source: Source) -> dict[str, Data]:
    """Everybody's test data, with labels as the training data count them."""
    if test.data.keys() != source.data.keys():
        odd = sorted(test.data.keys() ^ source.data.keys())[0]
        raise BadInput(f"client {odd!r} is in one of clients and test only: every client needs both")
    if unknown := [label for label in test.classes if label not in source.classes]:
        raise BadInput(f"test data have the label {unknown[0]!r}, which no client's training data have")
    places = torch.tensor([source.classes.index(label) for label in test.classes])
    return {name: Data(data.x, places[data.y]) for name, data in test.data.items()}


def _remarks(source: Source, standardise: Standardise) -> list[str]:
    return [] if source.dataset is None else remarks(source.dataset, standardise=standardise)
