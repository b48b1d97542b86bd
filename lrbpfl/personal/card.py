"""What a client's model is, in a page for people and as plain values: nothing is said that its file does not say."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from lrbpfl import documents, trees
from lrbpfl.core import gates as gating
from lrbpfl.documents import Document
from lrbpfl.errors import BadInput
from lrbpfl.personal.description import message_of
from lrbpfl.personal.model import read_documents
from lrbpfl.personal.signature import checked

GATES, SCALING, CALIBRATION = "own/gates/", "scaling/", "calibration"


def card(path: str | Path, client: str | None = None) -> dict[str, Any]:
    """Everything that a client's file says of its model, as plain values; None where it does not say."""
    path, own, shared = read_documents(path, client)
    try:
        return _told(path, own, shared)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path} cannot be used: its description is not one that lrbpfl writes ({error})") from None


def _told(path: Path, own: Document, shared: Document | None) -> dict[str, Any]:
    about, judged = own.about, own.about.get("judged")
    scores = _numbers(about.get("scores"))
    temperature = documents.named({"temperature": 1.0, **about}, "temperature", (int, float), str(path))
    seed, *address = documents.named(about, "address", list, str(path))
    return {
        "client": str(about.get("client", "")),
        "algorithm": documents.named(about, "algorithm", dict, str(path)),
        "model": documents.named(about, "model", dict, str(path)),
        "inputs": checked(about.get("inputs"), str(path)),
        "classes": documents.named(about, "classes", list, str(path)),
        "training_examples": about.get("examples"),
        "evaluated": dict(judged) if scores and isinstance(judged, Mapping) else None,
        "scores": scores or None,
        "temperature": None if temperature == 1.0 else temperature,
        "label_prior": documents.named(about, "label_prior", (int, float), str(path)) or None,
        "ranks": _ranks(own.tensors) or None,
        "own": _size(own.tensors) | {"file_bytes": path.stat().st_size},
        "shared": _size(_taken(about, shared)) if shared else None,
        "noise": {"seed": seed, "address": address},
        "digests": {"own": own.digest, "shared": shared.digest if shared else None},
        "versions": dict(about.get("versions") or {}),
        "holds": _holds(own),
    }


def _numbers(scores: Any) -> dict[str, float]:
    """The scores that are numbers."""
    found = scores.items() if isinstance(scores, Mapping) else ()
    return {str(k): v for k, v in found if isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v)}


def _ranks(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """How many ranks of each mask are open, and of how many, by the name of the layer."""
    gates = {name.removeprefix(GATES): leaf for name, leaf in tensors.items() if name.startswith(GATES)}
    return {
        name.removesuffix(".weight"): {"rank": gating.rank(gamma), "of": gamma.numel()} for name, gamma in gates.items()
    }


def _taken(about: Mapping[str, Any], shared: Document) -> dict[str, Tensor]:
    """What the model takes over from the shared document, once each."""
    message = message_of(shared)
    return {source: message[source] for source in about.get("leaves", {}).values() if source in message}


def _size(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    found = dict(tensors)
    return {"numbers": trees.count(found), "bytes": trees.nbytes(found)}


def _holds(own: Document) -> list[str] | None:
    """What the file tells about its client's data; None if it does not say."""
    said = own.about.get("holds")
    more = ["The mean and the spread of its features."] if any(n.startswith(SCALING) for n in own.tensors) else []
    if CALIBRATION in own.tensors:
        kept = own.tensors[CALIBRATION].numel()
        more.append(f"How well its model fits the labels of {kept} examples that were kept from training.")
    if not isinstance(said, list):
        return None  # a part of it would pass for all
    return [*map(str, said), *more]
