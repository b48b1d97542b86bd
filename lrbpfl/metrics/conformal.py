"""Prediction sets that keep a promise: split conformal prediction (Vovk, Gammerman and Shafer, 2005).

Examples that took no part in training fix a threshold; the set of a new example holds every class whose score is not
above it.  The score is 1 - p_y of the mean probabilities (LAC: Sadinle, Lei and Wasserman, JASA 2019,
arXiv:1609.00451), which gives the smallest sets on average where the probabilities are right.  The promise takes for
granted that new examples come from where the calibration examples came from, and nothing else: how good the model is
decides the size of the sets, not their coverage.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, betaln, gammaln

from lrbpfl.errors import BadInput
from lrbpfl.metrics.predictions import SUM_TOLERANCE, Bools, Floats, Predictions

SPREAD = 0.95  # of clients that keep their promise lie within `chance`


class Promise(NamedTuple):
    """A set holds the true class with probability `coverage`: on average over calibration sets, or with confidence."""

    coverage: float
    confidence: float | None  # that it holds given this very calibration set; None: on average over calibration sets
    threshold: float  # the largest score, 1 - p, of a class in the set
    examples: int  # that it was fitted on

    def sets(self, probabilities: npt.ArrayLike) -> Bools:
        """Which classes the set of each row (n, classes) holds: those at the threshold too, and always the likeliest.

        A set is never empty so; where the threshold alone would leave it empty, the likeliest class only adds coverage.
        """
        probs = _single(probabilities)
        held = 1.0 - probs <= self.threshold
        held[np.arange(len(probs)), probs.argmax(axis=1)] = True
        return np.asarray(held)


def needed(coverage: float, confidence: float | None = None) -> int:
    """How many calibration examples a promise needs at least.

    On average: the smallest n with ceil((n + 1) coverage) <= n.  With confidence: with 1 - coverage^n >= confidence,
    where the largest score is the threshold.  So 9 for a coverage of 0.9, and 29 with confidence 0.95.
    """
    share = _shares(coverage, confidence)
    if confidence is None:
        return math.ceil(share / (1 - share))
    n = max(math.floor(math.log1p(-confidence) / math.log(coverage)), 1)  # rounding may have made it one too few
    return n if bdtr(n - 1, n, coverage) >= confidence else n + 1


def rank(n: int, coverage: float, confidence: float | None = None) -> int:
    """Which of n rising scores is the threshold: the smallest k that keeps the promise.

    On average, k = ceil((n + 1) coverage).  Given the calibration set, the coverage is Beta(k, n + 1 - k) for scores
    without ties, and larger with them: P(Beta >= coverage) = P(Binomial(n, coverage) < k) must reach the confidence.
    """
    if n < needed(coverage, confidence):
        raise too_few(n, coverage, confidence)
    if confidence is None:
        return math.ceil((n + 1) * _shares(coverage, confidence))
    return 1 + int(np.argmax(bdtr(np.arange(n), n, coverage) >= confidence))


def too_few(n: int, coverage: float, confidence: float | None = None) -> BadInput:
    """The sentence about calibration examples that are too few."""
    sure = "" if confidence is None else f" with confidence {confidence:g}"
    least = needed(coverage, confidence)
    return BadInput(f"a coverage of {coverage:g}{sure} needs {least} calibration examples at least, not {n}")


def promise(predictions: Predictions, coverage: float, confidence: float | None = None) -> Promise:
    """The promise that these calibration predictions, of examples that took no part in training, can keep."""
    return promise_of(label_scores(predictions), coverage, confidence)


def label_scores(predictions: Predictions) -> Floats:
    """The scores of the true classes, rising, (n,): all that a promise is made of."""
    return np.sort(1.0 - _single(predictions.probs)[np.arange(len(predictions.y)), predictions.y])


def promise_of(scores: Floats, coverage: float, confidence: float | None = None) -> Promise:
    """The promise that calibration examples with these rising scores (n,) can keep."""
    n = len(scores)
    k = rank(n, coverage, confidence)
    return Promise(coverage=coverage, confidence=confidence, threshold=float(scores[k - 1]), examples=n)


def set_scores(given: Promise, p: Predictions) -> dict[str, float]:
    """How the sets of these predictions fare: the share that holds the truth, mean size, share that holds one class."""
    held = given.sets(p.probs)
    sizes = held.sum(axis=1)
    return {
        "coverage": float(held[np.arange(len(p.y)), p.y].mean()),
        "set_size": float(sizes.mean()),
        "singletons": float((sizes == 1).mean()),
    }


def summarise_sets(per_client: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Over clients with a promise, from their `set_scores` and numbers of `examples`: means over examples, extremes."""
    rows = list(per_client.values())
    if not rows:
        return {"promises": 0}
    examples, coverage, size = (np.array([row[key] for row in rows]) for key in ("examples", "coverage", "set_size"))
    return {
        "promises": len(rows),
        "coverage": float(coverage @ examples / examples.sum()),
        "coverage_worst": float(coverage.min()),
        "set_size": float(size @ examples / examples.sum()),
        "set_size_worst": float(size.max()),
    }


def chance(given: Promise, tested: int) -> tuple[float, float]:
    """Between which shares of so many test examples a kept promise covers in 95 of 100 cases, ties aside.

    Both parts are small: the coverage given the calibration set is Beta(k, n + 1 - k), so the number of covered test
    examples is beta-binomial.
    """
    n = given.examples
    k = rank(n, given.coverage, given.confidence)
    j = np.arange(tested + 1)
    ways = gammaln(tested + 1) - gammaln(j + 1) - gammaln(tested - j + 1)
    below = np.cumsum(np.exp(ways + betaln(j + k, tested - j + n + 1 - k) - betaln(k, n + 1 - k)))
    low, high = (int(np.argmax(below >= tail * below[-1])) for tail in ((1 - SPREAD) / 2, (1 + SPREAD) / 2))
    return low / tested, high / tested


def _single(probabilities: npt.ArrayLike) -> Floats:
    """Probabilities (n, classes) rounded to single precision, in which predictions are stored.

    Scores at the threshold are frequent where a model is sure: they must come out the same before and after.
    """
    probs = np.asarray(np.asarray(probabilities), dtype=np.float32).astype(np.float64)
    if probs.ndim != 2 or not probs.shape[1]:
        raise BadInput(f"sets are made of probabilities (n, classes), not of numbers of shape {probs.shape}")
    wrong = ~(np.abs(probs.sum(axis=1) - 1.0) <= SUM_TOLERANCE) | (probs < 0.0).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise BadInput(f"sets are made of probabilities that sum to 1 over the classes, and row {row} does not")
    return probs


def _shares(coverage: float, confidence: float | None) -> Fraction:
    """The coverage as the decimal fraction it was written as; refuses what is not strictly between 0 and 1."""
    for name, value in (("coverage", coverage), ("confidence", confidence)):
        if value is not None and not 0 < value < 1:
            raise BadInput(f"{name} is {value}, and must lie strictly between 0 and 1")
    return Fraction(str(float(coverage)))  # 100 times 0.55 is 55, not a little more
