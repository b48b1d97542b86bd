"""One client's examples, as arrays of its own: which train, which calibrate and which judge, on which scale."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs, fault, length, take
from lrbpfl.data import scaling, split
from lrbpfl.data.labels import Label, numbers_of
from lrbpfl.engines.work import ClientData
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

Standardise = Literal["no", "client", "pooled"]


class Gathered(NamedTuple):
    """Clients with their parts, the labels as their owners write them, and what is worth saying."""

    clients: Sequence[ClientData]
    classes: tuple[Label, ...]
    features: tuple[str, ...] | None  # names of columns, where inputs came from tables
    remarks: tuple[str, ...]
    digest: str = ""  # of clients that are loaded when they are needed; nobody has seen all of their data


class Parting(NamedTuple):
    """How every client's examples are parted and scaled."""

    seed: int
    hold_out: float
    calibration: float
    standardise: Standardise

    def remark(self) -> str:
        """What judges models, where nobody brought other examples."""
        share = f"{self.hold_out:.0%} of each client's examples, chosen by seed {self.seed}"
        return f"{share}, test its model (test= brings others)"


def is_several(own: Any) -> bool:
    """Whether a client's inputs are several."""
    return isinstance(own, tuple | list) and len(own) == 2 and isinstance(own[0], tuple | dict)


def several_inputs(name: str, x: Any, labels: Any, classes: tuple[Label, ...]) -> Data:
    """A client's several inputs and its labels (n,)."""
    inputs: Inputs = {key: _tensor(part) for key, part in x.items()} if isinstance(x, dict) else tuple(map(_tensor, x))
    n, wrong = len(labels), fault(inputs)
    if wrong or length(inputs) != n:
        wrong = wrong or f"have {length(inputs)} rows, and it has {n} labels: give as many of both"
        raise BadInput(f"client {name!r}: its inputs {wrong}")
    return Data(inputs, torch.from_numpy(numbers_of([labels], classes)))


def plain(y: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return y.detach().cpu().numpy() if isinstance(y, Tensor) else y


def _tensor(part: Any) -> Tensor:
    """One of several inputs: whole numbers as int64, anything else as float32; images of bytes stay."""
    found = torch.as_tensor(part)
    if found.dtype == torch.uint8 and found.ndim in (3, 4):
        return found
    return found.float() if found.is_floating_point() else found.long()


def parted(name: str, data: Data, test: Data | None, how: Parting) -> ClientData:
    """A client's training, test and calibration parts, each with the client's class proportions."""
    seed, hold_out, calibration, _ = how
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


def standardised(clients: list[ClientData], how: Standardise) -> list[ClientData]:
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
