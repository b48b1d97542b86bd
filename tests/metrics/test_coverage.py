"""How often the interval covers and what bias the estimates have, where the true calibration error is known.

`REPEATS=2000 pytest -s tests/metrics/test_coverage.py` makes the figures of docs/statistics.md.
"""

import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from lrbpfl.metrics import calibration, debiased, ece, interval, reliability
from lrbpfl.metrics.calibration import BINS, FEWEST_CLIENTS

Floats = npt.NDArray[np.float64]
REPEATS = int(os.environ.get("REPEATS", "100"))
GAPS: dict[str, Callable[[Floats], Floats]] = {  # confidence minus the probability of being right
    "no gap": lambda p: 0.0 * p,
    "0.05 everywhere": lambda p: 0.05 + 0.0 * p,
    "0.1 above 0.85": lambda p: np.where(p > 0.85, 0.1, 0.0),
    "0.08 above 0.75, -0.08 below": lambda p: np.where(p > 0.75, 0.08, -0.08),
}


def confidences(n: int, rng: np.random.Generator) -> Floats:
    return 0.4 + 0.6 * rng.beta(2, 1, n)


def samples(gap: str, n: int) -> Iterator[tuple[Floats, npt.NDArray[np.bool_]]]:
    rng = np.random.default_rng(n)
    for _ in range(REPEATS):
        p = confidences(n, rng)
        yield p, rng.random(n) < p - GAPS[gap](p)


def true_ece(gap: str, spread: float = 0.0) -> float:
    """From 400,000 draws of confidences; `spread` is that of the clients' own gaps."""
    rng = np.random.default_rng(0)
    p = confidences(400_000, rng)
    right = np.clip(p - GAPS[gap](p) + rng.normal(0.0, spread, p.size), 0.0, 1.0)
    index = np.minimum((p * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(index, weights=right - p)).sum() / p.size)


def coverage(intervals: list[tuple[float, float]], truth: float) -> tuple[float, float]:
    """How often the truth lies inside, and the mean width."""
    low, high = np.array(intervals).T
    return float(((low <= truth) & (truth <= high)).mean()), float((high - low).mean())


@pytest.mark.parametrize("n", [50, 150, 1000])
@pytest.mark.parametrize("gap", GAPS)
def test_the_interval_covers_the_error_of_endless_data(gap: str, n: int) -> None:
    rng, draws = np.random.default_rng(1), 200 if REPEATS < 1000 else 2000
    intervals = [interval(p, hit, rng=rng, draws=draws) for p, hit in samples(gap, n)]
    covered, width = coverage(intervals, true_ece(gap))
    print(f"\n{gap}, n = {n}: covers {100 * covered:.1f} %, width {width:.3f}")
    assert covered >= 0.93
    assert width < 2.3 * n**-0.5  # 1.5 if the sign of every bin's gap were known: 2 * 1.96 * sqrt(0.15)


@pytest.mark.parametrize("clients", [FEWEST_CLIENTS, 20])
@pytest.mark.parametrize("gap", ["no gap", "0.05 everywhere"])
def test_the_interval_covers_what_clients_differ_in(gap: str, clients: int) -> None:
    """Clients of 30 examples, each with a gap of its own; examples alone know nothing of that."""
    rng, spread = np.random.default_rng(clients), 0.2
    owner = np.repeat(np.arange(clients), 30)
    by_client, by_example = [], []
    for _ in range(REPEATS):
        p = confidences(owner.size, rng)
        right = np.clip(p - GAPS[gap](p) + rng.normal(0.0, spread, clients)[owner], 0.0, 1.0)
        hit = rng.random(p.size) < right
        by_client.append(interval(p, hit, clients=owner, rng=rng, draws=200))
        by_example.append(interval(p, hit, rng=rng, draws=200))
    truth = true_ece(gap, spread)
    covered, width = coverage(by_client, truth)
    print(f"\n{gap}, {clients} clients that differ by {spread}: covers {100 * covered:.1f} %, width {width:.3f}")
    assert covered >= 0.93
    assert coverage(by_example, truth)[0] < covered


def folded(mean: Floats, sigma: Floats) -> Floats:
    return np.array([calibration._folded(float(m), float(s)) for m, s in zip(mean, sigma, strict=True)])


def plugin(p: Floats, hit: npt.NDArray[np.bool_]) -> float:
    """ECE less the bias of its Gaussian plug-in, never below 0 (Kumar, Liang and Ma, NeurIPS 2019)."""
    bins = reliability(p, hit)
    size = np.maximum(bins.counts, 1)
    sigma = np.sqrt(bins.accuracy * (1.0 - bins.accuracy) / size)
    again = float(bins.counts @ folded(bins.accuracy - bins.confidence, sigma) / p.size)
    return max(2.0 * ece(bins) - again, 0.0)


def sweep(p: Floats, hit: npt.NDArray[np.bool_]) -> float:
    """ECE of as many equally filled bins as accuracy rises over (Roelofs et al., AISTATS 2022)."""
    order = np.argsort(p)
    best = [hit[order]]
    for b in range(2, p.size + 1):
        parts = np.array_split(hit[order], b)
        if (np.diff([part.mean() for part in parts]) < 0.0).any():
            break
        best = parts
    sums = [abs(part.sum() - own.sum()) for part, own in zip(best, np.array_split(p[order], len(best)), strict=True)]
    return float(sum(sums) / p.size)


def test_debiasing_has_less_bias_than_published_estimates() -> None:
    estimates: dict[str, Callable[[Floats, npt.NDArray[np.bool_]], float]] = {
        "ECE": lambda p, hit: ece(reliability(p, hit)),
        "debiased": lambda p, hit: debiased(reliability(p, hit)),
        "plug-in": plugin,
        "sweep": sweep,
    }
    total = dict.fromkeys(estimates, 0.0)
    for gap in GAPS:
        truth, drawn = true_ece(gap), list(samples(gap, 50))
        bias = {name: float(np.mean([f(p, hit) for p, hit in drawn])) - truth for name, f in estimates.items()}
        print(f"\n{gap}, n = 50, true {truth:.3f}: {', '.join(f'{name} {b:+.3f}' for name, b in bias.items())}")
        total = {name: total[name] + abs(bias[name]) / len(GAPS) for name in bias}
    print(f"\nmean size of these: {', '.join(f'{name} {b:.3f}' for name, b in total.items())}")
    assert total["debiased"] < 0.9 * min(total[name] for name in ("ECE", "plug-in", "sweep"))
