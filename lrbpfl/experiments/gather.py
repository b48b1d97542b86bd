"""Everybody's data as the front door takes them, parted into what trains, what calibrates and what judges."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs, fault, length, take
from lrbpfl.data import Dataset, read_clients, remarks, scaling, split
from lrbpfl.data.clients import Integers
from lrbpfl.data.labels import Label, as_labels, classes_of, numbers_of
from lrbpfl.data.order import natural_order
from lrbpfl.engines.work import ClientData
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

Standardise = Literal["no", "client", "pooled"]


class Gathered(NamedTuple):
    """Clients with their parts, the labels as their owners write them, and what is worth saying."""

    clients: tuple[ClientData, ...]
    classes: tuple[Label, ...]
    features: tuple[str, ...] | None  # names of columns, where inputs came from tables
    remarks: tuple[str, ...]


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
) -> Gathered:
    """Read everybody's data, part them by the seed, and put them on one scale if asked to."""
    if not 0 < hold_out < 1 or not 0 <= calibration < 1:
        found = f"hold_out is {hold_out} and calibration {calibration}"
        raise BadInput(f"{found}: give shares, hold_out above 0 and both below 1")
    integers: Integers = "tokens" if tokens else "numbers"
    source = _read(clients, client, label, integers)
    judged = None if test is None else _tests(_read(test, client, label, integers), source)
    parted = {
        name: _parted(name, data, None if judged is None else judged[name], seed, hold_out, calibration)
        for name, data in source.data.items()
    }
    said = _remarks(source, standardise)
    if judged is None:
        said.append(
            f"{hold_out:.0%} of each client's examples, chosen by seed {seed}, test its model (test= brings others)"
        )
    return Gathered(
        clients=tuple(_standardised(list(parted.values()), standardise)),
        classes=source.classes,
        features=source.dataset.feature_names if source.dataset else None,
        remarks=tuple(said),
    )


def _read(source: Any, client: str | None, label: str | None, integers: Integers) -> Source:
    if isinstance(source, Mapping) and any(_several(own) for own in source.values()):
        return _several_inputs(source)
    dataset = read_clients(source, client=client, label=label, integers=integers)
    assert dataset.owner is not None and dataset.client_names is not None
    data = {}
    for number, name in enumerate(dataset.client_names):
        own = torch.from_numpy(np.flatnonzero(dataset.owner == number))
        data[name] = Data(dataset.x[own], dataset.y[own])
    return Source(data, dataset.classes or tuple(range(dataset.num_classes)), dataset)


def _several(own: Any) -> bool:
    return isinstance(own, tuple | list) and len(own) == 2 and isinstance(own[0], tuple | dict)


def _several_inputs(source: Mapping[Any, Any]) -> Source:
    """Clients whose models take several inputs: pairs of a tuple or dict of arrays, and labels."""
    named = {str(name): own for name, own in source.items()}
    if len(named) < len(source):
        raise BadInput("two clients have the same name: every client needs a name of its own")
    pairs = {name: _pair(name, named[name]) for name in natural_order(named)}
    labels = {name: as_labels(_plain(y), f"client {name!r}") for name, (_, y) in pairs.items()}
    classes = classes_of(labels)
    data = {}
    for name, (x, _) in pairs.items():
        inputs: Inputs = (
            {key: _tensor(part) for key, part in x.items()} if isinstance(x, dict) else tuple(map(_tensor, x))
        )
        n, wrong = len(labels[name]), fault(inputs)
        if wrong or length(inputs) != n:
            wrong = wrong or f"have {length(inputs)} rows, and it has {n} labels: give as many of both"
            raise BadInput(f"client {name!r}: its inputs {wrong}")
        data[name] = Data(inputs, torch.from_numpy(numbers_of([labels[name]], classes)))
    return Source(data, classes, None)


def _pair(name: str, own: Any) -> tuple[Any, Any]:
    if not _several(own):
        raise BadInput(f"client {name!r} has no pair of several inputs (a tuple or dict of arrays) and labels")
    x, y = own
    return x, y


def _plain(y: Any) -> Any:
    return y.detach().cpu().numpy() if isinstance(y, Tensor) else y


def _tensor(part: Any) -> Tensor:
    """One of several inputs: whole numbers as int64, anything else as float32; images of bytes stay."""
    found = torch.as_tensor(part)
    if found.dtype == torch.uint8 and found.ndim in (3, 4):
        return found
    return found.float() if found.is_floating_point() else found.long()


def _tests(test: Source, source: Source) -> dict[str, Data]:
    """Everybody's test data, with labels as the training data count them."""
    if test.data.keys() != source.data.keys():
        odd = sorted(test.data.keys() ^ source.data.keys())[0]
        raise BadInput(f"client {odd!r} is in one of clients and test only: every client needs both")
    if unknown := [label for label in test.classes if label not in source.classes]:
        raise BadInput(f"test data have the label {unknown[0]!r}, which no client's training data have")
    places = torch.tensor([source.classes.index(label) for label in test.classes])
    return {name: Data(data.x, places[data.y]) for name, data in test.data.items()}


def _parted(name: str, data: Data, test: Data | None, seed: int, hold_out: float, calibration: float) -> ClientData:
    """A client's training, test and calibration parts, each with the client's class proportions."""
    rng, labels, everything = numpy_generator(seed, "parts", name), data.y.numpy(), np.arange(len(data.y))
    if test is not None and not calibration:
        return ClientData(name, train=data, test=test)
    try:
        if test is not None:
            found = split(everything, train_fraction=1 - calibration, labels=labels, rng=rng)
            return ClientData(name, _taken(data, found.train), test, calibration=_taken(data, found.test))
        found = split(everything, train_fraction=1 - hold_out, labels=labels, calibration_fraction=calibration, rng=rng)
    except BadInput as error:
        raise BadInput(f"client {name!r}: {error}") from None
    kept = _taken(data, found.calibration) if len(found.calibration) else None
    return ClientData(name, _taken(data, found.train), _taken(data, found.test), calibration=kept)


def _taken(data: Data, places: Any) -> Data:
    chosen = torch.from_numpy(np.sort(places))
    return Data(take(data.x, chosen), data.y[chosen])


def _standardised(clients: list[ClientData], how: Standardise) -> list[ClientData]:
    """Everybody's features on a scale of its own, or on that of all together, fitted on training parts."""
    if how not in ("no", "client", "pooled"):
        raise BadInput(f"standardise is {how!r}, and must be 'no', 'client' or 'pooled'")
    if how == "no":
        return clients
    if not all(isinstance(client.train.x, Tensor) for client in clients):
        raise BadInput("several inputs cannot be standardised: do it before, or in the model")
    common = scaling.pooled(scaling.sums(client.train.x) for client in clients) if how == "pooled" else None
    return [_scaled(client, common or scaling.fit(client.train.x)) for client in clients]


def _scaled(client: ClientData, by: scaling.Scaling) -> ClientData:
    def scaled(part: Data) -> Data:
        return part._replace(x=by.apply(part.x))

    kept = None if client.calibration is None else scaled(client.calibration)
    return client._replace(train=scaled(client.train), test=scaled(client.test), calibration=kept, scaling=by)


def _remarks(source: Source, standardise: Standardise) -> list[str]:
    return [] if source.dataset is None else remarks(source.dataset, standardise=standardise)
