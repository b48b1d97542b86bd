"""The numbers a result reports: for one client, and over all of them."""

import math
from collections.abc import Mapping

import numpy as np

from lrbpfl.metrics import calibration
from lrbpfl.metrics.predictions import Bools, Floats, Predictions
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
    return _scores(p, calibration.null_gaps(p.confidence, rng=numpy_generator(seed, "floor", *path)))


def _scores(p: Predictions, gaps: Floats) -> dict[str, float]:
    """A client's scores, from its predictions and the gaps (draws, bins) it would show if it were calibrated."""
    correct = p.correct
    bins = calibration.reliability(p.confidence, correct)
    return {
        "accuracy": float(correct.mean()),
        "nll": float(nll(p).mean()),
        "brier": float(brier(p).mean()),
        "ece": calibration.ece(bins),
        "mce": calibration.mce(bins),
        "ece_floor": float(np.abs(gaps).sum(axis=1).mean() / len(p.y)),
        "ece_debiased": calibration.debiased(bins),
        "total": float(p.total.mean()),
        "aleatoric": float(p.aleatoric.mean()),
        "epistemic": float(p.epistemic.mean()),
        "examples": float(len(p.y)),
    }


class Summary:
    """Scores over clients, who come one at a time, by rising numbers.

    What is kept of a client is its scores, and of each example a confidence and whether it was right.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rows: list[tuple[float, ...]] = []
        self._keys: tuple[str, ...] = ()
        self._confidences: list[Floats] = []
        self._corrects: list[Bools] = []
        self._gaps: Floats = np.zeros(())  # (draws, bins) of all clients together, if all were calibrated
        self._worst: Floats = np.zeros(())  # (draws,) the largest ECE of any
        self._last = -1

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, client: int, p: Predictions, known: Mapping[str, float] | None = None) -> dict[str, float]:
        """One more client, and its scores, which may be known already."""
        if client <= self._last:
            raise ValueError(f"client {client} comes after client {self._last}")
        gaps = calibration.null_gaps(p.confidence, rng=numpy_generator(self.seed, "floor", client))
        own = _scores(p, gaps) if known is None else dict(known)
        self._last, self._keys = client, tuple(own)
        self._rows.append(tuple(own.values()))
        self._confidences.append(p.confidence)
        self._corrects.append(p.correct)
        self._gaps = self._gaps + gaps
        self._worst = np.maximum(self._worst, np.abs(gaps).sum(axis=1) / len(p.y))
        return own

    def result(self) -> dict[str, float]:
        """Scores over all clients: weighted by examples unless the name ends in mean, worst or worst_decile."""
        if not self._rows:
            raise ValueError("There are no clients to summarise.")
        columns = dict(zip(self._keys, np.array(self._rows).T, strict=True))
        floors = {
            "ece_pooled_floor": float(np.abs(self._gaps).sum(axis=1).mean() / columns["examples"].sum()),
            "ece_floor_worst": float(self._worst.mean()),
        }
        return {**_by_example(columns), **_by_client(columns), **self._pooled(), **floors}

    def _pooled(self) -> dict[str, float]:
        """Calibration of all examples put into one reliability diagram."""
        confidence, correct = np.concatenate(self._confidences), np.concatenate(self._corrects)
        bins = calibration.reliability(confidence, correct)
        owner = np.repeat(np.arange(len(self)), [len(own) for own in self._corrects])
        groups = owner if len(self) >= calibration.FEWEST_CLIENTS else None
        low, high = calibration.interval(
            confidence, correct, clients=groups, rng=numpy_generator(self.seed, "interval")
        )
        return {
            "ece_pooled": calibration.ece(bins),
            "mce_pooled": calibration.mce(bins),
            "ece_pooled_debiased": calibration.debiased(bins),
            "ece_pooled_low": low,
            "ece_pooled_high": high,
        }


def summarise(
    clients: Mapping[int, Predictions], per_client: Mapping[int, Mapping[str, float]] | None = None, *, seed: int
) -> dict[str, float]:
    """The `Summary` of clients who are all here; ``per_client`` takes their scores, where they are known already."""
    if per_client is not None and per_client.keys() != clients.keys():
        raise ValueError("The scores belong to other clients than the predictions do.")
    summary = Summary(seed)
    for k, p in sorted(clients.items()):  # the order of the mapping must not reach the random stream
        summary.add(k, p, None if per_client is None else per_client[k])
    return summary.result()


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
