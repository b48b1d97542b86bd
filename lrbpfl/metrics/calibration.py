"""Top-label calibration: reliability bins, ECE and MCE, and how much of an ECE is noise.

Bins have equal width on [0, 1] and are closed on the left: a confidence on an inner edge belongs to the bin above it.
The last bin is closed on both sides, so 0.0 falls into the first bin and exactly 1.0 into the last.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lrbpfl.metrics.predictions import Floats, Ints

BINS = 15
# Random numbers held at once: draws are cut into chunks of about this many, which does not change the stream.
CHUNK = 2**20
# Halvings of [0, 1] in a search: past the resolution of a float.
HALVINGS = 60
# Standard deviations of noise past which the sign of a bin's gap is taken as known.
SURE = 3.0
# From so many clients on, an interval is about clients like them; of fewer, it is about these very ones.
FEWEST_CLIENTS = 8


class Bins(NamedTuple):
    """A reliability diagram; an empty bin holds 0 everywhere."""

    counts: Ints  # (bins,) n_b
    confidence: Floats  # (bins,) conf_b, mean confidence
    accuracy: Floats  # (bins,) acc_b, share of correct predictions
    variance: Floats  # (bins,) mean of p (1 - p) over the confidences p in the bin


def reliability(confidence: npt.ArrayLike, correct: npt.ArrayLike, bins: int = BINS) -> Bins:
    """Sort examples into bins by confidence (n,) and compare with correct (n,), which holds booleans or 0 and 1."""
    p, hit = _pair(confidence, correct)
    index = _index(p, bins)
    count = np.bincount(index, minlength=bins)
    size = np.maximum(count, 1)
    return Bins(
        counts=count.astype(np.int64),
        confidence=np.bincount(index, weights=p, minlength=bins) / size,
        accuracy=np.bincount(index, weights=hit, minlength=bins) / size,
        variance=np.bincount(index, weights=p * (1.0 - p), minlength=bins) / size,
    )


def ece(bins: Bins) -> float:
    """Expected calibration error, ECE = sum_b (n_b / n) |acc_b - conf_b|."""
    return float(bins.counts @ np.abs(bins.accuracy - bins.confidence) / bins.counts.sum())


def mce(bins: Bins) -> float:
    """Maximum calibration error, MCE = max_b |acc_b - conf_b| over the bins that are not empty."""
    return float(np.abs(bins.accuracy - bins.confidence).max())


def null_gaps(confidence: npt.ArrayLike, *, rng: np.random.Generator, draws: int = 200, bins: int = BINS) -> Floats:
    """Simulated gaps n_b (acc_b - conf_b) of a perfectly calibrated model with these confidences (n,); (draws, bins).

    Every draw takes correct_i ~ Bernoulli(confidence_i). A row's ECE is the sum of its absolute values over n, and the
    gaps of clients add up to those of their pool.
    """
    p = np.sort(_confidences(confidence))
    filled, starts = np.unique(_index(p, bins), return_index=True)
    gaps = np.zeros((draws, bins))
    for rows in _chunks(draws, len(p)):
        hits = rng.random((rows.stop - rows.start, len(p))) < p
        gaps[rows, filled] = np.add.reduceat(hits, starts, axis=1, dtype=np.float64) - np.add.reduceat(p, starts)
    return gaps


def floor(confidence: npt.ArrayLike, *, rng: np.random.Generator, draws: int = 200, bins: int = BINS) -> float:
    """Noise floor: the mean ECE of a perfectly calibrated model with these very confidences (n,)."""
    gaps = null_gaps(confidence, rng=rng, draws=draws, bins=bins)
    return float(np.abs(gaps).sum(axis=1).mean() / np.size(confidence))


def debiased(bins: Bins) -> float:
    """ECE with its noise matched and removed: s ECE, where s in [0, 1] solves E(s) = ECE and

        E(s) = sum_b (n_b / n) E|N(s (acc_b - conf_b), variance_b / n_b)|.

    E(s) is the ECE to expect if the true gaps were s times the observed ones. The result is 0 when the ECE is at or
    below the noise floor E(0), and tends to the ECE itself as the gaps outgrow the noise. E(1) >= ECE, so s exists.
    """
    filled = bins.counts > 0
    weights = bins.counts[filled] / bins.counts.sum()
    gaps = (bins.accuracy - bins.confidence)[filled].tolist()
    noise = np.sqrt(bins.variance[filled] / bins.counts[filled]).tolist()

    def expected(s: float) -> float:
        return float(weights @ [_folded(s * gap, sigma) for gap, sigma in zip(gaps, noise, strict=True)])

    observed = ece(bins)
    if observed <= expected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if expected(middle) < observed else (low, middle)
    return high * observed


def interval(
    confidence: npt.ArrayLike,
    correct: npt.ArrayLike,
    *,
    rng: np.random.Generator,
    clients: npt.ArrayLike | None = None,
    draws: int = 2000,
    level: float = 0.95,
    bins: int = BINS,
) -> tuple[float, float]:
    """Interval of the ECE that endless data would show; it covers that at least as often as its level says.

    ECE = sum_b |g_b| with g_b = (1 / n) sum_{i in b} (correct_i - p_i), whose noise e is that of examples or, where
    ``clients`` (n,) tells whose each one is, of clients. Both ends assume the gaps that suit them least: below, noise
    has added `excess`; above, t is spread such that noise hides as much of it as it can, |a_b| ~ sd(e_b) with the
    signs of the noise's main direction, and the end is the largest t at which sum_b |t a_b + e_b| is as small as the
    ECE in (1 - level) / 2 of all draws.
    """
    p, hit = _pair(confidence, correct)
    if not 0.0 < level < 1.0:
        raise ValueError(f"The level of an interval lies between 0 and 1, unlike {level}.")
    groups = np.arange(len(p)) if clients is None else np.unique(np.asarray(clients), return_inverse=True)[1]
    sizes = np.bincount(groups).astype(np.float64)
    if len(sizes) < 2:
        return 0.0, 1.0  # nothing shows how large the noise is
    cells = groups * bins + _index(p, bins)
    sums = np.bincount(cells, weights=hit - p, minlength=len(sizes) * bins).astype(np.float64)
    gaps, e = noise(sums.reshape(len(sizes), bins), sizes, rng=rng, draws=draws)
    observed, spread = float(np.abs(gaps).sum()), e.std(axis=0)
    if not spread.any():
        return observed, observed
    low = observed - float(np.quantile(excess(gaps, e), (1.0 + level) / 2.0))
    along = np.linalg.eigh(e.T @ e)[1][:, -1]  # where most of the noise is
    thin = np.where(along < 0.0, -spread, spread) / spread.sum()
    t, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (t + high) / 2.0
        fits = np.quantile(np.abs(middle * thin + e).sum(axis=1), (1.0 - level) / 2.0) <= observed
        t, high = (middle, high) if fits else (t, middle)
    return max(low, 0.0), max(high, observed)


def noise(sums: Floats, sizes: Floats, *, rng: np.random.Generator, draws: int) -> tuple[Floats, Floats]:
    """Gaps (columns,) of all groups together, and draws of their noise (draws, columns).

    ``sums`` (groups, columns) adds up correct - p over each group's examples, ``sizes`` (groups,) counts them. Noise
    has the covariance of the groups' deviations and, as that is itself estimated, Student's tails.
    """
    k, n = len(sizes), sizes.sum()
    gaps = sums.sum(axis=0) / n
    apart = (sums - sizes[:, None] * gaps) / n
    values, vectors = np.linalg.eigh(apart.T @ apart * (k / (k - 1)))
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T  # symmetric, so no sign is left to chance
    student = np.sqrt(rng.chisquare(k - 1, size=(draws, 1)) / (k - 1))
    return gaps, rng.standard_normal((draws, len(gaps))) @ root / student


def excess(gaps: Floats, e: Floats) -> Floats:
    """The most by which noise e (draws, bins) may have raised sum_b |gap_b|, draw by draw; (draws,).

    That is |e_b|, as if there were no gap at all, and sign(gap_b) e_b in a bin where the sign of the gap is sure.
    """
    sure = np.abs(gaps) > SURE * e.std(axis=0)
    return np.asarray(np.where(sure, np.sign(gaps) * e, np.abs(e)).sum(axis=1))


def _folded(mean: float, sigma: float) -> float:
    """E|N(mean, sigma^2)| = sigma sqrt(2 / pi) exp(-z^2 / 2) + mean erf(z / sqrt 2), z = mean / sigma."""
    if sigma == 0.0:
        return abs(mean)
    z = mean / sigma
    return sigma * math.sqrt(2.0 / math.pi) * math.exp(-z * z / 2.0) + mean * math.erf(z / math.sqrt(2.0))


def _index(confidence: Floats, bins: int) -> Ints:
    """The bin of each confidence, by the rule at the top of this file; (n,)."""
    if bins < 1:
        raise ValueError(f"Calibration needs at least one bin, not {bins}.")
    return np.digitize(confidence, np.linspace(0.0, 1.0, bins + 1)[1:-1]).astype(np.int64)


def _chunks(draws: int, n: int) -> Iterator[slice]:
    """Slices of range(draws) that hold about CHUNK numbers each when a draw takes n."""
    if draws < 1:
        raise ValueError(f"Resampling needs at least one draw, not {draws}.")
    step = max(1, CHUNK // n)
    return (slice(start, min(start + step, draws)) for start in range(0, draws, step))


def _confidences(confidence: npt.ArrayLike) -> Floats:
    """Confidences (n,) in float64, refused unless there are some and all lie in [0, 1]."""
    p = np.asarray(confidence, dtype=np.float64)
    if p.ndim != 1 or p.size == 0:
        raise ValueError(f"Calibration needs the confidences of at least one example in one dimension, not {p.shape}.")
    if not ((p >= 0.0) & (p <= 1.0)).all():
        raise ValueError("Confidences must lie between 0 and 1.")
    return p


def _pair(confidence: npt.ArrayLike, correct: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Confidences and outcomes (n,) in float64, refused unless every outcome is 0 or 1."""
    p, hit = _confidences(confidence), np.asarray(correct, dtype=np.float64)
    if p.shape != hit.shape:
        raise ValueError(f"{p.size} confidences do not fit outcomes of shape {hit.shape}.")
    if not ((hit == 0.0) | (hit == 1.0)).all():
        raise ValueError("Outcomes must be 0 or 1.")
    return p, hit
