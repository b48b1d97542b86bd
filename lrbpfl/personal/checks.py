"""What a client's file must hold to be used: everything that it says of itself is looked at before it counts."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lrbpfl.algorithms.protocol import MOST
from lrbpfl.data.scaling import Scaling
from lrbpfl.documents import Document
from lrbpfl.errors import BadInput
from lrbpfl.personal.signature import shape_of
from lrbpfl.rng import Address

LONGEST = 16  # parts of an address
NUMBERS = 2**29  # that all samples of one prediction may draw


def check_personal(own: Document, shared: Mapping[str, Tensor], where: str) -> None:
    """Refuse a client's file by what is wrong with it, whoever wrote it."""
    address_of(own.about, where)
    temperature_of(own.about, where)
    _check_told(own.about, where)
    _check_leaves(own, shared, where)
    check_numbers(own, where)
    _check_effort(own, where)
    calibration_of(own, where)
    scaling_of(own, where)


def check_numbers(document: Document, where: str) -> None:
    """Refuse NaN; infinite are gates that are open or closed for good."""
    for name, leaf in document.tensors.items():
        if leaf.is_floating_point() and bool(leaf.isnan().any()):
            raise BadInput(f"{where} cannot be used: {name[:80]} holds what is not a number (NaN)")


def check_fields(fields: Any, where: str) -> None:
    """Refuse counts that nobody would ask for: a file must not keep us busy for ever, nor take all memory."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, int) and abs(value) > MOST:
            raise BadInput(f"{where} cannot be used: its {str(name)[:40]} is beyond {MOST}")


def _check_effort(own: Document, where: str) -> None:
    """A prediction draws each number of the client's own once for every sample."""
    size = sum(leaf.numel() for name, leaf in own.tensors.items() if name.startswith("own/"))
    for name, value in own.about["algorithm"]["fields"].items():
        if name.startswith("predict") and isinstance(value, int) and value * size > NUMBERS:
            raise BadInput(f"{where} cannot be used: {name[:40]} = {value} asks for too much memory")


def address_of(about: Mapping[str, Any], where: str) -> tuple[int, *tuple[Address, ...]]:
    """Where the noise of a client's predictions begins: a seed and a path."""
    found = about.get("address")
    fine = isinstance(found, list) and 0 < len(found) <= LONGEST and all(type(part) in (int, str) for part in found)
    if not fine or not found or type(found[0]) is not int:
        raise _improper(where, "address")
    return (found[0], *found[1:])


def temperature_of(about: Mapping[str, Any], where: str) -> float:
    """What a client's probabilities are tempered by; 1 if by nothing."""
    found = about.get("temperature", 1.0)
    if type(found) not in (int, float) or not 0 < found < math.inf:
        raise _improper(where, "temperature")
    return float(found)


def calibration_of(own: Document, where: str) -> Tensor:
    """The rising scores, (n,) float64 from 0 to 1, of examples that a client kept from training."""
    found = own.tensors.get("calibration", torch.zeros(0, dtype=torch.float64))
    fine = found.ndim == 1 and found.dtype == torch.float64 and bool(((found >= 0) & (found <= 1)).all())
    if not fine or not bool((found.diff() >= 0).all()):
        raise BadInput(f"{where} cannot be used: its calibration scores are not rising numbers from 0 to 1")
    return found


def scaling_of(document: Document, where: str) -> Scaling | None:
    """The scale of the features that clients trained on; None if they came as they were."""
    mean, std = (document.tensors.get(f"scaling/{part}") for part in ("mean", "std"))
    if mean is None and std is None:
        return None
    inputs = document.about.get("inputs")
    shape = shape_of(inputs) if isinstance(inputs, dict) else None
    fine = all(part is not None and part.dtype == torch.float32 and part.shape == shape for part in (mean, std))
    if not fine or mean is None or std is None or not bool((std > 0).all()):
        raise BadInput(f"{where} cannot be used: its scaling does not fit its inputs")
    return Scaling(mean, std)


def _check_told(about: Mapping[str, Any], where: str) -> None:
    """What people read in a file: a name, how much it trained on, what it scored, its columns."""
    if not isinstance(about.get("client"), str):
        raise _improper(where, "client")
    if type(about.get("examples")) is not int:
        raise _improper(where, "examples")
    scores, judged, features = about.get("scores"), about.get("judged"), about.get("features")
    if not isinstance(scores, dict) or any(type(value) not in (int, float) for value in scores.values()):
        raise _improper(where, "scores")
    if not isinstance(judged, dict) or type(judged.get("examples")) is not int or type(judged.get("on")) is not str:
        raise _improper(where, "judged")
    if features is not None:
        _check_features(features, about.get("inputs"), where)


def _check_features(features: Any, inputs: Any, where: str) -> None:
    names = isinstance(features, list) and all(isinstance(name, str) for name in features)
    shape = shape_of(inputs) if isinstance(inputs, dict) else None
    if not names or len(set(features)) < len(features) or shape != (len(features),):
        raise _improper(where, "features")


def _check_leaves(own: Document, shared: Mapping[str, Tensor], where: str) -> None:
    """Every tensor of the model lies in one place: in the file, or in what its owner shares with others."""
    leaves = own.about.get("leaves")
    if not isinstance(leaves, dict) or not all(source is None or isinstance(source, str) for source in leaves.values()):
        raise _improper(where, "leaves")
    held = {name.removeprefix("own/") for name in own.tensors if name.startswith("own/")}
    for name in sorted(held ^ {name for name, source in leaves.items() if source is None}):
        raise BadInput(f"{where} cannot be used: its description and its tensors disagree about {name[:80]!r}")
    for name, source in leaves.items():
        if source is not None and source not in shared:
            raise BadInput(f"{where} cannot be used: {name[:80]!r} is not among what it shares with others")


def _improper(where: str, key: str) -> BadInput:
    return BadInput(f"{where} cannot be used: its description has no proper {key!r}")
