"""Which of several scores are best, by intervals of paired differences: seed by seed or client by client."""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

from lrbpfl.metrics.calibration import FEWEST_CLIENTS, excess, noise
from lrbpfl.metrics.predictions import Floats

Name = TypeVar("Name", bound=Hashable)
Interval = tuple[float, float]


def best_and_ties(
    values: Mapping[Name, float], difference: Callable[[Name, Name], Interval | None], *, larger: bool
) -> set[Name]:
    """The best value's name and those that it cannot be told from; nobody if that is everybody.

    ``difference(a, b)`` is the interval of a's score minus b's: one that holds 0 does not tell the two apart. None says
    that they cannot be compared; if the best cannot with somebody, nobody is best.
    """
    if not values:
        return set()
    best = (max if larger else min)(values, key=values.__getitem__)
    ties = {best}
    for other in values.keys() - {best}:
        interval = difference(best, other)
        if interval is None:
            return set()
        if not (interval[0] > 0.0 if larger else interval[1] < 0.0):
            ties.add(other)
    return ties if len(ties) < len(values) else set()


def mean_difference(a: Floats, b: Floats, weights: Floats | None = None, *, level: float = 0.95) -> Interval | None:
    """Student's interval of the weighted mean of a - b over pairs (n,); None of fewer than two pairs."""
    if len(a) < 2:
        return None
    difference = a - b
    shares = np.full(len(a), 1.0 / len(a)) if weights is None else weights / weights.sum()
    mean = float(shares @ difference)
    error = math.sqrt(float((shares**2) @ (difference - mean) ** 2) * len(a) / (len(a) - 1))
    half = student(level, len(a) - 1) * error
    return mean - half, mean + half


def ece_difference(
    a: Floats, b: Floats, sizes: Floats, *, rng: np.random.Generator, draws: int = 2000, level: float = 0.95
) -> Interval | None:
    """Interval of the pooled ECE of a minus that of b, on the same clients; None if they are too few.

    ``a`` and ``b`` (clients, bins) add up correct - confidence over each client's examples, ``sizes`` (clients,) counts
    them. Noise is drawn for both at once; at either end it raised the larger ECE as much, and the smaller as little,
    as it can (`excess`).
    """
    if len(sizes) < FEWEST_CLIENTS:
        return None
    gaps, e = noise(np.hstack([a, b]), sizes, rng=rng, draws=draws)
    (gap_a, gap_b), (e_a, e_b) = np.split(gaps, 2), np.split(e, 2, axis=1)
    mean = float(np.abs(gap_a).sum() - np.abs(gap_b).sum())
    high_a, high_b = excess(gap_a, e_a), excess(gap_b, e_b)
    low_a, low_b = e_a @ np.sign(gap_a), e_b @ np.sign(gap_b)
    tail = (1.0 + level) / 2.0
    return mean - float(np.quantile(high_a - low_b, tail)), mean + float(np.quantile(high_b - low_a, tail))


def student(level: float, freedom: int) -> float:
    """The t within which Student's variable lies with probability `level`: t = sqrt(f) tan(u), u ~ cos(u)^(f - 1)."""
    angles = np.linspace(0.0, math.pi / 2.0, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(level * mass[-1], mass, angles)))
