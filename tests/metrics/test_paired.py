"""Paired differences: against other people's arithmetic, and on data where it is known who is better."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from lrbpfl.metrics.calibration import BINS
from lrbpfl.metrics.paired import best_and_ties, ece_difference, mean_difference, student

Floats = npt.NDArray[np.float64]
VALUES = {"a": 0.9, "b": 0.8, "c": 0.5}


def known(a: str, b: str) -> tuple[float, float]:
    """Intervals as wide as 0.2 around the difference of VALUES."""
    return VALUES[a] - VALUES[b] - 0.2, VALUES[a] - VALUES[b] + 0.2


def test_ties_share_the_first_place() -> None:
    assert best_and_ties(VALUES, known, larger=True) == {"a", "b"}
    assert best_and_ties(VALUES, known, larger=False) == {"c"}


def test_nobody_is_best_if_all_are_tied_or_one_cannot_be_compared() -> None:
    assert best_and_ties({"a": 0.9, "b": 0.8}, known, larger=True) == set()
    assert best_and_ties({"a": 0.9}, known, larger=True) == best_and_ties({}, known, larger=True) == set()
    assert best_and_ties(VALUES, lambda a, b: None if b == "b" else known(a, b), larger=True) == set()


@pytest.mark.parametrize("freedom", [1, 2, 7, 40, 5000])
def test_students_quantiles(freedom: int) -> None:
    for level in (0.5, 0.95, 0.999):
        assert student(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-4)


def test_a_difference_of_seeds_is_that_of_a_paired_t_test() -> None:
    a, b = np.array([0.71, 0.69, 0.74]), np.array([0.70, 0.66, 0.72])
    wanted = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert mean_difference(a, b) == pytest.approx((wanted.low, wanted.high))
    assert mean_difference(a[:1], b[:1]) is None


def test_a_weighted_difference_covers_zero_as_often_as_it_says() -> None:
    """Clients of very different sizes, whose scores are the noisier the smaller they are."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(1000):
        sizes = rng.exponential(100, 20) + 20
        a, b = (rng.normal(0.7, 0.5 / np.sqrt(sizes)) for _ in range(2))
        interval = mean_difference(a, b, sizes)
        assert interval is not None
        assert interval[0] < (a - b) @ sizes / sizes.sum() < interval[1]
        covered.append(interval[0] <= 0.0 <= interval[1])
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def gaps(overconfidence: float, clients: int, rng: np.random.Generator) -> Floats:
    """Correct less confidence of clients with 40 examples each, in bins."""
    p = 0.4 + 0.6 * rng.beta(2, 1, (clients, 40))
    hit = rng.random(p.shape) < p - overconfidence
    return np.array([np.bincount((own * BINS).astype(int), h - own, BINS) for own, h in zip(p, hit, strict=True)])


@pytest.mark.parametrize(("worse", "told"), [(0.0, (0.0, 0.025)), (0.15, (0.95, 1.0))])
def test_pooled_errors_are_told_apart_where_they_differ(worse: float, told: tuple[float, float]) -> None:
    rng, found = np.random.default_rng(1), []
    for _ in range(100):
        a, b = gaps(0.0, 40, rng), gaps(worse, 40, rng)
        interval = ece_difference(a, b, np.full(40, 40.0), rng=rng, draws=400)
        assert interval is not None
        found.append(interval[1] < 0.0)
    assert told[0] <= np.mean(found) <= told[1]


def test_the_difference_of_errors_changes_its_sign_with_the_order() -> None:
    rng = np.random.default_rng(2)
    a, b, sizes = gaps(0.0, 20, rng), gaps(0.2, 20, rng), np.full(20, 40.0)
    there, back = (ece_difference(*pair, sizes, rng=rng, draws=20_000) for pair in ((a, b), (b, a)))
    assert there is not None and back is not None
    assert there == pytest.approx((-back[1], -back[0]), abs=0.01)
    assert ece_difference(a[:7], b[:7], sizes[:7], rng=rng) is None


def test_a_model_cannot_be_told_from_itself() -> None:
    rng = np.random.default_rng(3)
    a = gaps(0.2, 40, rng)
    interval = ece_difference(a, a, np.full(40, 40.0), rng=rng)
    assert interval is not None and interval[0] <= 0.0 <= interval[1]
