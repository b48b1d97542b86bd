"""Temperatures fitted after training: one number that makes predictions less sure, or surer, and changes no ranking."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from lrbpfl.metrics.predictions import Floats, Predictions, entropy, pool
from lrbpfl.metrics.scores import nll

COLDEST, HOTTEST = 0.05, 20.0
GRID = 61  # temperatures looked at before the search closes in on one
WIDTH = 1e-6  # of log T when the search ends


def temper(p: Predictions, temperature: float) -> Predictions:
    """The predictions with probabilities p^(1/T), normalised; a probability of 0 stays 0.

    What is epistemic stays as far as the new total leaves room for it; the rest is aleatoric.
    """
    if temperature == 1.0:
        return p
    with np.errstate(divide="ignore"):
        logs = np.log(p.probs) / temperature
    powers = np.exp(logs - logs.max(axis=1, keepdims=True))
    probs = powers / powers.sum(axis=1, keepdims=True)
    total = entropy(probs)
    return p._replace(probs=probs, total=total, aleatoric=np.maximum(total - p.epistemic, 0.0))


def fit(calibration: Sequence[Predictions]) -> float:
    """The temperature under which the labels of these predictions are likeliest; 1 without any.

    It minimises the NLL of all examples together + (log T)^2 / 2, a prior log T ~ N(0, 1) that counts once: a few
    examples, or many that are all right, cannot send T to a bound. A label with probability 0 has it at every T and
    takes no part. The labels are never less likely than at T = 1.
    """
    if not calibration:
        return 1.0
    p = pool(calibration)
    seen = p.probs[np.arange(len(p.y)), p.y] > 0.0
    loss = _loss(p.probs[seen], p.y[seen])
    grid = np.linspace(math.log(COLDEST), math.log(HOTTEST), GRID).tolist()
    best = min(range(GRID), key=lambda i: loss(grid[i]))
    found = math.exp(_golden(loss, grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]))
    return found if nll(temper(p, found)).sum() < nll(p).sum() else 1.0


def _loss(probs: Floats, y: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Callable[[float], float]:
    """What is minimised over log T, from probabilities (n, classes) of which those of the labels (n,) are above 0."""
    with np.errstate(divide="ignore"):
        logs = np.log(probs)
    above = logs - logs[np.arange(len(y)), y][:, None]  # log p_c - log p_y

    def loss(log_t: float) -> float:
        scaled = above * math.exp(-log_t)
        top = scaled.max(axis=1, keepdims=True)  # at least 0, the label's own
        nlls = top[:, 0] + np.log(np.exp(scaled - top).sum(axis=1))
        return float(nlls.sum()) + log_t**2 / 2

    return loss


def _golden(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where the loss is least between two numbers, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > WIDTH:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return (low + high) / 2
