"""The numbers a result reports: for one client, and over all of them."""

import math
from collections.abc import Mapping

import numpy as np

from lrbpfl.metrics import calibration
from lrbpfl.metrics.predictions import Floats, Predictions
from lrbpfl.rng import Address, numpy_generator

# A probability below float32's smallest normal number counts as that: no example costs more than 87.3 nats.
SMALLEST = float(np.finfo(np.float32).tiny)


def nll(p: Predictions) -> Floats:
    """Negative log-likelihood of each label, -log max(p_y, SMALLEST), in nats; (n,)."""
    return -np.log(np.maximum(p.probs[np.arange(len(p.y)), p.y], SMALLEST))


def brier(p: Predictions) -> Floats:
    """Multi-class Brier score of each example, sum_c (p_c - 1{c = y})^2, between 0 and 2; (n,)."""
    errors = p.probs.copy()
    errors[np.arange(len(p.y)), p.y] -= 1.0
    return np.asarray((errors**2).sum(axis=1))


def scores(p: Predictions, *, seed: int, path: tuple[Address, ...] = ()) -> dict[str, float]:
    """One client's scores, means over its examples; ``path`` is the client's address in the random stream."""
    confidence, correct = p.confidence, p.correct
    bins = calibration.reliability(confidence, correct)
    return {
        "accuracy": float(correct.mean()),
        "nll": float(nll(p).mean()),
        "brier": float(brier(p).mean()),
        "ece": calibration.ece(bins),
        "mce": calibration.mce(bins),
        "ece_floor": calibration.floor(confidence, rng=numpy_generator(seed, "floor", *path)),
        "ece_debiased": calibration.debiased(bins),
        "total": float(p.total.mean()),
        "aleatoric": float(p.aleatoric.mean()),
        "epistemic": float(p.epistemic.mean()),
        "examples": float(len(p.y)),
    }


def summarise(
    clients: Mapping[int, Predictions], per_client: Mapping[int, Mapping[str, float]] | None = None, *, seed: int
) -> dict[str, float]:
    """Scores over all clients: weighted by examples unless the name ends in mean, worst or worst_decile.

    ``per_client`` takes what ``scores(p, seed=seed, path=(client,))`` gave, when that is already known.
    """
    if not clients:
        raise ValueError("There are no clients to summarise.")
    if per_client is None:
        per_client = {k: scores(p, seed=seed, path=(k,)) for k, p in clients.items()}
    if per_client.keys() != clients.keys():
        raise ValueError("The scores belong to other clients than the predictions do.")
    clients = dict(sorted(clients.items()))  # the order of the mapping must not reach the random stream
    columns = {key: np.array([per_client[k][key] for k in clients]) for key in next(iter(per_client.values()))}
    return {
        **_by_example(columns),
        **_by_client(columns),
        **_pooled(clients, seed=seed),
        **_floors(clients, seed=seed),
    }


def _by_example(columns: Mapping[str, Floats]) -> dict[str, float]:
    """Means over all examples, from columns (clients,) of client scores."""
    examples = columns["examples"]
    keys = ("accuracy", "nll", "brier", "total", "aleatoric", "epistemic")
    means = {key: float(columns[key] @ examples / examples.sum()) for key in keys}
    return {**means, "clients": float(len(examples)), "examples": float(examples.sum())}


def _by_client(columns: Mapping[str, Floats]) -> dict[str, float]:
    """Means and extremes in which every client counts the same, from columns (clients,) of client scores."""
    falling = np.sort(columns["ece"])[::-1]
    return {
        "accuracy_mean": float(columns["accuracy"].mean()),
        "accuracy_worst": float(columns["accuracy"].min()),
        "nll_worst": float(columns["nll"].max()),
        "ece_mean": float(falling.mean()),
        "ece_worst": float(falling[0]),
        "ece_worst_decile": float(falling[: math.ceil(len(falling) / 10)].mean()),
        "ece_floor_mean": float(columns["ece_floor"].mean()),
        "ece_debiased_mean": float(columns["ece_debiased"].mean()),
    }


def _pooled(clients: Mapping[int, Predictions], *, seed: int) -> dict[str, float]:
    """Calibration of all examples put into one reliability diagram."""
    confidence = np.concatenate([p.confidence for p in clients.values()])
    correct = np.concatenate([p.correct for p in clients.values()])
    bins = calibration.reliability(confidence, correct)
    owner = np.repeat(np.arange(len(clients)), [len(p.y) for p in clients.values()])
    groups = owner if len(clients) >= calibration.FEWEST_CLIENTS else None
    low, high = calibration.interval(confidence, correct, clients=groups, rng=numpy_generator(seed, "interval"))
    return {
        "ece_pooled": calibration.ece(bins),
        "mce_pooled": calibration.mce(bins),
        "ece_pooled_debiased": calibration.debiased(bins),
        "ece_pooled_low": low,
        "ece_pooled_high": high,
    }


def _floors(clients: Mapping[int, Predictions], *, seed: int) -> dict[str, float]:
    """The pool's noise floor, and the mean over draws of the worst client's ECE if all were perfectly calibrated."""
    # The addresses are those of `scores`: a client's floor, the pool's and the worst one see the same labels.
    rngs = {client: numpy_generator(seed, "floor", client) for client in clients}
    gaps = np.stack([calibration.null_gaps(p.confidence, rng=rngs[client]) for client, p in clients.items()])
    sizes = np.array([len(p.y) for p in clients.values()])
    eces = np.abs(gaps).sum(axis=2) / sizes[:, None]  # (clients, draws)
    return {
        "ece_pooled_floor": float(np.abs(gaps.sum(axis=0)).sum(axis=1).mean() / sizes.sum()),
        "ece_floor_worst": float(eces.max(axis=0).mean()),
    }
