"""What a model said about labelled examples, reduced from samples to what the scores need."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Half precision leaves a softmax's sum within a hundredth of one; logits do not come that near.
SUM_TOLERANCE = 1e-2


class Predictions(NamedTuple):
    """The predictions for one client, or for a pool of clients, beside the true labels."""

    probs: Floats  # (n, classes) mean over samples
    y: Ints  # (n,)
    total: Floats  # (n,) entropy of the mean, in nats
    aleatoric: Floats  # (n,) mean entropy of the samples, in nats

    @property
    def epistemic(self) -> Floats:
        """Mutual information of label and parameters, total - aleatoric, with rounding below 0 cut off; (n,)."""
        return np.maximum(self.total - self.aleatoric, 0.0)

    @property
    def confidence(self) -> Floats:
        """Probability of the most probable class; (n,)."""
        return np.asarray(self.probs.max(axis=1), dtype=np.float64)

    @property
    def correct(self) -> Bools:
        """Whether the most probable class, the first one in a tie, is the label; (n,)."""
        return np.asarray(self.probs.argmax(axis=1) == self.y)


def reduce(samples: Tensor, y: Tensor) -> Predictions:
    """Average sampled probabilities (samples, n, classes) for the labels y (n,), in float64.

    Rows are divided by their sum first, so that float32 rounding cannot push a confidence above 1.
    """
    _check(samples, y)
    mean = np.zeros(tuple(samples.shape[1:]))
    aleatoric = np.zeros(samples.shape[1])
    # One sample at a time: a float64 copy of all of them may not fit.
    for sample in samples.detach():
        probs = _normalise(sample.double().cpu().numpy())
        mean += probs
        aleatoric += entropy(probs)
    mean /= len(samples)
    labels = y.detach().cpu().numpy().astype(np.int64)
    return Predictions(probs=mean, y=labels, total=entropy(mean), aleatoric=aleatoric / len(samples))


def pool(predictions: Iterable[Predictions]) -> Predictions:
    """Put the examples of several clients behind one another."""
    parts = list(predictions)
    if not parts:
        raise ValueError("There are no predictions to pool.")
    if len(widths := {p.probs.shape[1] for p in parts}) > 1:
        raise ValueError(f"Predictions over different numbers of classes, {sorted(widths)}, cannot be pooled.")
    return Predictions(
        probs=np.concatenate([p.probs for p in parts]),
        y=np.concatenate([p.y for p in parts]),
        total=np.concatenate([p.total for p in parts]),
        aleatoric=np.concatenate([p.aleatoric for p in parts]),
    )


def entropy(probs: Floats) -> Floats:
    """Entropy of each row, H(p) = -sum_c p_c log p_c with 0 log 0 = 0, in nats; (n, classes) to (n,)."""
    logs = np.log(np.where(probs > 0.0, probs, 1.0))
    return np.asarray(np.maximum(-(probs * logs).sum(axis=1), 0.0))


def _check(samples: Tensor, y: Tensor) -> None:
    """Refuse shapes and labels that do not fit."""
    if samples.ndim != 3 or 0 in samples.shape:
        raise ValueError(f"Samples must have shape (samples, n, classes), none of them 0, not {tuple(samples.shape)}.")
    if y.shape != samples.shape[1:2]:
        raise ValueError(f"Labels of shape {tuple(y.shape)} do not fit samples of shape {tuple(samples.shape)}.")
    if y.is_floating_point() or y.is_complex():
        raise ValueError(f"Labels must be integers, not {y.dtype}.")
    if int(y.min()) < 0 or int(y.max()) >= samples.shape[2]:
        raise ValueError(f"Labels from {int(y.min())} to {int(y.max())} do not fit {samples.shape[2]} classes.")


def _normalise(probs: Floats) -> Floats:
    """Rows (n, classes) that sum to 1; refuses what is not a row of probabilities."""
    if not np.isfinite(probs).all():
        raise ValueError("Samples hold values that are not finite.")
    sums = probs.sum(axis=1, keepdims=True)
    if probs.min() < 0.0 or np.abs(sums - 1.0).max() > SUM_TOLERANCE:
        raise ValueError("Samples must be probabilities that sum to 1 over the classes, not logits.")
    return np.asarray(probs / sums)
