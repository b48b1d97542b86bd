"""Reliability bins, ECE and MCE against other people's arithmetic."""

from collections.abc import Callable
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from lrbpfl.metrics import Bins, debiased, ece, floor, interval, mce, null_gaps, reliability

Floats = npt.NDArray[np.float64]
Outcomes = list[tuple[float, bool]]
outcomes = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


def synthetic(n: int, *, seed: int = 0) -> tuple[Floats, npt.NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    confidence = rng.random(n)
    return confidence, rng.random(n) < confidence**2


def diagram(pairs: Outcomes, bins: int = 15) -> Bins:
    return reliability([p for p, _ in pairs], [hit for _, hit in pairs], bins)


def slow(confidence: Floats, correct: npt.NDArray[np.bool_], bins: int) -> tuple[float, float]:
    """ECE and MCE by the definition, one bin and one example at a time."""
    total, largest = 0.0, 0.0
    edges = [b / bins for b in range(bins + 1)]
    for b in range(bins):
        last = b == bins - 1
        inside = [i for i, c in enumerate(confidence) if edges[b] <= c and (last or c < edges[b + 1])]
        if inside:
            hits = sum(bool(correct[i]) for i in inside) / len(inside)
            gap = abs(hits - sum(float(confidence[i]) for i in inside) / len(inside))
            total, largest = total + gap * len(inside) / len(confidence), max(largest, gap)
    return total, largest


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 40])
@pytest.mark.parametrize("n", [1, 7, 500])
def test_errors_match_a_slow_loop(n: int, bins: int) -> None:
    confidence, correct = synthetic(n, seed=n)
    got = reliability(confidence, correct, bins)
    assert (ece(got), mce(got)) == pytest.approx(slow(confidence, correct, bins), abs=1e-12)


def test_bins_match_scikit_learn() -> None:
    confidence, correct = synthetic(400)
    confidence = 0.3 + 0.7 * confidence  # the lowest bins stay empty
    accuracy, mean = calibration_curve(correct, confidence, n_bins=15, strategy="uniform")
    bins = reliability(confidence, correct)
    filled = bins.counts > 0
    assert filled.sum() == len(accuracy) < 15
    np.testing.assert_allclose(bins.accuracy[filled], accuracy)
    np.testing.assert_allclose(bins.confidence[filled], mean)
    assert ece(bins) == pytest.approx(bins.counts[filled] @ np.abs(accuracy - mean) / 400)
    assert mce(bins) == pytest.approx(np.abs(accuracy - mean).max())


def test_full_confidence_shares_the_last_bin() -> None:
    bins = reliability([0.95, 1.0], [1, 0], bins=10)
    assert bins.counts.tolist() == [0] * 9 + [2]
    assert (ece(bins), mce(bins)) == pytest.approx((0.475, 0.475))


def test_edges_belong_to_the_bin_above() -> None:
    edges = np.linspace(0, 1, 16)
    assert reliability(edges, np.ones(16)).counts.tolist() == [1] * 14 + [2]
    below = np.nextafter(edges[1:], 0)
    assert reliability(below, np.ones(15)).counts.tolist() == [1] * 15


def test_empty_bins_hold_zeros() -> None:
    bins = reliability([0.5], [1], bins=3)
    assert [field.tolist() for field in bins] == [[0, 1, 0], [0, 0.5, 0], [0, 1, 0], [0, 0.25, 0]]


@pytest.mark.parametrize(
    ("confidence", "correct", "error"),
    [
        ([1.0, 1.0], [1, 1], 0.0),
        ([1.0, 1.0], [0, 0], 1.0),
        ([0.0, 0.0], [0, 0], 0.0),
        ([0.0, 0.0], [1, 1], 1.0),
        ([0.7], [1], 0.3),
        ([0.7], [0], 0.7),
        ([0.5, 0.5], [1, 0], 0.0),
    ],
)
def test_extremes(confidence: list[float], correct: list[int], error: float) -> None:
    bins = reliability(confidence, correct)
    assert (ece(bins), mce(bins)) == pytest.approx((error, error))
    assert 0.0 <= debiased(bins) <= ece(bins)
    low, high = interval(confidence, correct, rng=np.random.default_rng(0))
    assert 0.0 <= low <= high <= 1.0


@given(outcomes, st.integers(1, 20), st.randoms(use_true_random=False))
def test_order_does_not_matter(pairs: Outcomes, bins: int, random: Random) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)
    one, other = (diagram(p, bins) for p in (pairs, shuffled))
    for got, wanted in zip(one, other, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-12)


@given(outcomes, st.integers(1, 20))
def test_errors_are_ordered_and_bounded(pairs: Outcomes, bins: int) -> None:
    got = diagram(pairs, bins)
    assert 0.0 <= debiased(got) <= ece(got) <= mce(got) + 1e-12
    assert mce(got) <= 1.0
    assert got.counts.sum() == len(pairs)


@given(outcomes)
def test_two_equal_pools_double_the_counts_only(pairs: Outcomes) -> None:
    once, twice = (diagram(p) for p in (pairs, pairs * 2))
    assert twice.counts.tolist() == (2 * once.counts).tolist()
    for got, wanted in zip(twice[1:], once[1:], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(outcomes, st.integers(0, 100))
def test_intervals_are_ordered_and_bounded(pairs: Outcomes, seed: int) -> None:
    low, high = interval([p for p, _ in pairs], [h for _, h in pairs], rng=np.random.default_rng(seed), draws=50)
    assert 0.0 <= low <= high <= 1.0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: reliability([], []), "at least one example"),
        (lambda: floor([], rng=np.random.default_rng(0)), "at least one example"),
        (lambda: interval([], [], rng=np.random.default_rng(0)), "at least one example"),
        (lambda: reliability([[0.5]], [[1]]), "one dimension"),
        (lambda: reliability([0.5], [1, 0]), "do not fit"),
        (lambda: reliability([1.1], [1]), "between 0 and 1"),
        (lambda: reliability([-0.1], [1]), "between 0 and 1"),
        (lambda: reliability([float("nan")], [1]), "between 0 and 1"),
        (lambda: reliability([0.5], [2]), "0 or 1"),
        (lambda: reliability([0.5], [1], bins=0), "one bin"),
        (lambda: null_gaps([0.5], rng=np.random.default_rng(0), draws=0), "one draw"),
        (lambda: interval([0.5], [1], rng=np.random.default_rng(0), level=1.0), "level"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
