"""From what an engine leaves behind to documents: what clients share, and each client's own model."""

import dataclasses
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrbpfl import algorithms, trees
from lrbpfl.data.scaling import Scaling
from lrbpfl.documents import FORMAT, Document
from lrbpfl.engines.work import Setup
from lrbpfl.metrics import Predictions, interval
from lrbpfl.metrics.conformal import label_scores
from lrbpfl.personal import identity
from lrbpfl.personal.description import message_of
from lrbpfl.personal.signature import shape_of, signature
from lrbpfl.rng import Address, numpy_generator
from lrbpfl.trees import Tree


class Told(NamedTuple):
    """What a client's file says besides its model."""

    client: str
    examples: int  # that it trained on
    address: tuple[Address, ...]  # of the noise it predicts with: a seed and a path
    judged: str = ""  # on which data that it did not train on
    predictions: Predictions | None = None  # there
    scores: Mapping[str, float] = {}  # of these
    temperature: float = 1.0
    calibration: Predictions | None = None  # of what was kept from training: what sets are made of
    scaling: Scaling | None = None  # of its features


class Parts(NamedTuple):
    """A model in two: tensors of the client's own, and the names in the message of those it took over from there."""

    own: Mapping[str, Tensor]
    shared: Mapping[str, str]


def shared_document(setup: Setup, name: str, server: Tree, standardise: str = "no") -> Document:
    """What all clients have in common, from the server's state."""
    newcomer = setup.algorithm.broadcast(setup.task, server, len(setup.training))
    return newcomer_document(setup, name, newcomer, standardise)


def newcomer_document(setup: Setup, name: str, newcomer: Tree, standardise: str = "no") -> Document:
    """What all clients have in common: the message that somebody new would get, and what it takes to use it.

    `standardise` says whether features are put on the scale of each client, or on that of all (`pooled`), told along.
    """
    tensors = {f"message/{name}": leaf.detach().cpu() for name, leaf in trees.named_leaves(newcomer)}
    about = description("shared", name, setup)
    if standardise == "pooled" and (scaled := setup.clients[0].scaling):
        tensors |= {"scaling/mean": scaled[0], "scaling/std": scaled[1]}
    told = {"clients": len(setup.training), "seed": setup.seed, "standardise": standardise}
    return Document({**about, **told}, tensors)


def personal_document(shared: Document, parts: Parts, message: Mapping[str, Tensor], told: Told) -> Document:
    """A client's own model, as far as it is its own: what it took over from its message lies in the shared document."""
    leaves: dict[str, str | None] = {}
    own, common = dict(parts.own), message_of(shared)
    for name, sent in parts.shared.items():
        if sent in common and trees.equal(common[sent], message[sent]):
            leaves[name] = sent
        else:
            own[name] = message[sent]
    leaves |= dict.fromkeys(own)
    about = {
        **{key: value for key, value in shared.about.items() if key not in ("clients", "seed", "standardise")},
        "kind": "personal",
        "client": told.client,
        "address": list(told.address),
        "temperature": told.temperature,
        "examples": told.examples,
        "scores": {key: value for key, value in _scores(told).items() if math.isfinite(value)},
        "judged": {"on": told.judged, "examples": 0 if told.predictions is None else len(told.predictions.y)},
        "holds": holdings(shared.about),
        "leaves": leaves,
        "shared": shared.digest if any(leaves.values()) else None,
    }
    return Document(about, {**{f"own/{name}": leaf for name, leaf in own.items()}, **_kept(told)})


def _kept(told: Told) -> dict[str, Tensor]:
    """What a client's predictions need besides its model.

    A part that fitted a temperature makes no promise: its examples would look likelier than new ones.
    """
    kept: dict[str, Tensor] = {}
    if told.calibration is not None and told.temperature == 1.0:
        kept["calibration"] = torch.from_numpy(label_scores(told.calibration))
    if told.scaling is not None:
        kept |= {"scaling/mean": told.scaling.mean, "scaling/std": told.scaling.std}
    return kept


def holdings(about: Mapping[str, Any]) -> list[str]:
    """What a file of this description tells about its client's data, in sentences."""
    said = getattr(algorithms.find(about["algorithm"]["name"]), "HOLDS", None)
    frequencies = ["How frequent each class is among its training examples."] if about["label_prior"] else []
    return [*([said] if said else []), *frequencies]


def _scores(told: Told) -> dict[str, float]:
    """The scores, and the interval of the ECE that endless data of this client would show."""
    if told.predictions is None:
        return {}
    p, seed = told.predictions, int(told.address[0])
    low, high = interval(p.confidence, p.correct, rng=numpy_generator(seed, "interval", *told.address))
    return {**told.scores, "ece_low": low, "ece_high": high}


def versions() -> dict[str, str]:
    """What a file was made with."""
    return {"lrbpfl": version("lrbpfl"), "torch": str(torch.__version__)}


def description(kind: str, name: str, setup: Setup) -> dict[str, Any]:
    """What all files of a federation say."""
    algorithm, task = setup.algorithm, setup.task
    inputs = signature(setup.at_hand[0].train.x)
    return {
        "format": FORMAT,
        "kind": kind,
        "versions": versions(),
        "algorithm": {"name": name, "fields": dataclasses.asdict(algorithm)},
        "label_prior": task.label_prior or 0.0,
        "classes": list(setup.classes or task.class_names or range(task.num_classes)),
        "features": None if setup.features is None else list(setup.features),
        "model": identity.describe(task.model, task.num_classes, shape_of(inputs)),
        "inputs": inputs,
    }
