"""From what an engine leaves behind to documents: what clients share, and each client's own model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.engines.work import ClientData, Evaluated, Setup
from lrbpfl.metrics import Predictions, interval
from lrbpfl.personal.files import Document
from lrbpfl.personal.model import description
from lrbpfl.personal.signature import signature
from lrbpfl.rng import Address, numpy_generator
from lrbpfl.trees import Tree


class Told(NamedTuple):
    """What a client's file says besides its tensors."""

    address: tuple[Address, ...]  # of the noise it predicts with: a seed and a path
    scores: Mapping[str, float] = {}  # on data it did not train on
    judged: str = ""  # on which
    judged_examples: int = 0
    temperature: float = 1.0


def shared_document(setup: Setup, name: str, server: Tree) -> Document:
    """What all clients have in common: the message that somebody new would get, and what it takes to use it."""
    algorithm, task, clients, *_ = setup
    newcomer = algorithm.broadcast(task, server, len(setup.training))
    tensors = {name: leaf.detach().cpu() for name, leaf in trees.named_leaves(newcomer)}
    about = description("shared", name, algorithm, task, signature(clients[0].train.x), setup.classes)
    return Document({**about, "clients": len(setup.training), "seed": setup.seed}, tensors)


def personal_document(
    shared: Document, client: ClientData, result: Evaluated, message: Mapping[str, Tensor], told: Told
) -> Document:
    """A client's own model, as far as it is its own: what it took over from its message lies in the shared document."""
    leaves: dict[str, str | None] = {}
    own = dict(result.personal)
    for name, sent in result.shared.items():
        if sent in shared.tensors and trees.equal(shared.tensors[sent], message[sent]):
            leaves[name] = sent
        else:
            own[name] = message[sent]
    leaves |= dict.fromkeys(own)
    about = {
        **{key: value for key, value in shared.about.items() if key not in ("clients", "seed")},
        "kind": "personal",
        "client": client.name,
        "address": list(told.address),
        "temperature": told.temperature,
        "examples": len(client.train.y),
        "scores": {key: value for key, value in _scores(result.predictions, told).items() if _is_number(value)},
        "judged": {"on": told.judged, "examples": told.judged_examples},
        "holds": holdings(shared.about),
        "leaves": leaves,
        "shared": shared.digest if any(leaves.values()) else None,
    }
    return Document(about, {f"own/{name}": leaf for name, leaf in own.items()})


def holdings(about: Mapping[str, Any]) -> list[str]:
    """What a file of this description tells about its client's data, in sentences."""
    said = getattr(ALGORITHMS[about["algorithm"]["name"]], "HOLDS", None)
    frequencies = ["How frequent each class is among its training examples."] if about["label_prior"] else []
    return [*([said] if said else []), *frequencies]


def _scores(p: Predictions, told: Told) -> dict[str, float]:
    """The scores, and the interval of the ECE that endless data of this client would show."""
    if not told.scores:
        return {}
    low, high = interval(p.confidence, p.correct, rng=numpy_generator(int(told.address[0]), "interval", *told.address))
    return {**told.scores, "ece_low": low, "ece_high": high}


def _is_number(value: Any) -> bool:
    return bool(torch.isfinite(torch.tensor(float(value))))
