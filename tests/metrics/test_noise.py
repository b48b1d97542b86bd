"""The noise floor, the debiased ECE and the interval, on data whose true calibration is known."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from lrbpfl.metrics import calibration, debiased, ece, floor, interval, null_gaps, reliability
from lrbpfl.metrics.calibration import Bins

Floats = npt.NDArray[np.float64]


def confidences(n: int, rng: np.random.Generator) -> Floats:
    """Beta-shaped, mean 0.8, as of a client with few classes."""
    return 0.4 + 0.6 * rng.beta(2, 1, n)


def diagrams(n: int, *, gap: float, trials: int = 200, seed: int = 0) -> list[Bins]:
    """Reliability diagrams of a model whose accuracy is its confidence less a constant gap."""
    rng = np.random.default_rng(seed)
    drawn = (confidences(n, rng) for _ in range(trials))
    return [reliability(p, rng.random(n) < p - gap) for p in drawn]


def test_the_floor_is_the_mean_error_of_a_calibrated_model() -> None:
    rng = np.random.default_rng(1)
    p = confidences(300, rng)
    simulated = np.array([ece(reliability(p, rng.binomial(1, p))) for _ in range(2000)])
    error = simulated.std() * math.sqrt(1 / 2000 + 1 / 2000)
    assert floor(p, rng=rng, draws=2000) == pytest.approx(simulated.mean(), abs=4 * error)
    assert 4 * error < 0.05 * simulated.mean()


def test_the_floor_of_one_bin_is_a_binomial_mean_deviation() -> None:
    n, hits = 8, np.arange(9)
    exact = sum(math.comb(n, h) * 0.3**h * 0.7 ** (n - h) * abs(h / n - 0.3) for h in hits.tolist())
    assert floor([0.3] * n, rng=np.random.default_rng(0), draws=20_000) == pytest.approx(exact, rel=0.02)


def test_the_floor_falls_with_the_root_of_the_examples() -> None:
    rng = np.random.default_rng(2)
    small, large = (floor(confidences(n, rng), rng=rng) for n in (500, 8000))
    assert small / large == pytest.approx(4.0, rel=0.15)


def test_certainty_has_no_floor() -> None:
    assert floor([0.0, 1.0, 1.0], rng=np.random.default_rng(0)) == 0.0


def test_the_floor_ignores_the_order_of_examples() -> None:
    p = confidences(100, np.random.default_rng(3))
    assert floor(p, rng=np.random.default_rng(4)) == floor(p[::-1], rng=np.random.default_rng(4))


def test_null_gaps_are_those_of_the_drawn_labels() -> None:
    p = np.sort(confidences(50, np.random.default_rng(5)))
    hits = np.random.default_rng(6).random((3, 50)) < p
    bins = [reliability(p, row) for row in hits]
    gaps = null_gaps(p, rng=np.random.default_rng(6), draws=3)
    np.testing.assert_allclose(gaps, [b.counts * (b.accuracy - b.confidence) for b in bins], atol=1e-12)


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    p = confidences(64, np.random.default_rng(7))
    whole = null_gaps(p, rng=np.random.default_rng(8))
    monkeypatch.setattr(calibration, "CHUNK", 64 * 7)
    np.testing.assert_array_equal(null_gaps(p, rng=np.random.default_rng(8)), whole)


@pytest.mark.parametrize("n", [50, 300, 1080])
def test_debiasing_removes_most_of_a_calibrated_models_error(n: int) -> None:
    bins = diagrams(n, gap=0.0)
    assert np.mean([debiased(b) for b in bins]) < 0.45 * np.mean([ece(b) for b in bins])


@pytest.mark.parametrize("n", [50, 100, 300])
def test_debiasing_comes_nearer_to_a_known_gap(n: int) -> None:
    bins = diagrams(n, gap=0.1)
    bias, plain = (abs(float(np.mean([f(b) for b in bins])) - 0.1) for f in (debiased, ece))
    assert bias < 0.75 * plain
    assert plain > 0.005  # there was something to remove


def test_debiasing_leaves_large_gaps_alone() -> None:
    (bins,) = diagrams(50_000, gap=0.2, trials=1)
    assert debiased(bins) == pytest.approx(ece(bins), rel=1e-3)


def test_debiasing_gives_zero_at_the_floor() -> None:
    bins = reliability([0.5] * 100, [1] * 52 + [0] * 48)
    assert ece(bins) == pytest.approx(0.02)  # below sqrt(2 / pi) * 0.05 = 0.04
    assert debiased(bins) == 0.0


def test_debiasing_solves_its_equation() -> None:
    bins = reliability([0.5] * 100, [1] * 58 + [0] * 42)
    scale = debiased(bins) / ece(bins)
    assert 0.0 < scale < 1.0
    draws = np.abs(np.random.default_rng(9).normal(scale * 0.08, 0.05, 1_000_000))
    assert draws.mean() == pytest.approx(0.08, abs=4 * draws.std() / 1000)


def test_debiasing_counts_gaps_without_noise_in_full() -> None:
    # Half the examples are certain and wrong in 20 %, half are as above.
    bins = reliability([1.0] * 50 + [0.5] * 50, [1] * 40 + [0] * 10 + [1] * 29 + [0] * 21)
    scale = debiased(bins) / ece(bins)
    draws = np.abs(np.random.default_rng(9).normal(scale * 0.08, 0.5 / math.sqrt(50), 1_000_000))
    assert (scale * 0.2 + draws.mean()) / 2 == pytest.approx(0.14, abs=4 * draws.std() / 1000)


def test_debiasing_uses_the_spread_inside_a_bin() -> None:
    # One bin: confidences of 0 and 1 make no noise, so a gap of 0.02 is real here and was noise above.
    assert debiased(reliability([0.0, 1.0] * 50, [1] * 52 + [0] * 48, bins=1)) == pytest.approx(0.02)


def test_the_interval_narrows_with_examples_and_widens_with_the_level() -> None:
    rng = np.random.default_rng(11)
    p = confidences(64_000, rng)
    hit = rng.random(64_000) < p - 0.15

    def width(n: int, level: float) -> float:
        low, high = interval(p[:n], hit[:n], rng=np.random.default_rng(12), level=level)
        return high - low

    assert width(4000, 0.95) / width(64_000, 0.95) == pytest.approx(4.0, rel=0.2)
    assert width(4000, 0.95) > 1.3 * width(4000, 0.7)


def test_the_interval_of_one_sure_bin_is_that_of_a_mean() -> None:
    """Where the sign of every gap is known, an ECE is a plain mean."""
    hit = np.arange(400) < 240
    low, high = interval([0.9] * 400, hit, rng=np.random.default_rng(13), draws=20_000)
    half = 1.96 * math.sqrt(0.6 * 0.4 / 400)
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.03 * half)


def test_the_interval_of_a_calibrated_model_begins_at_zero_and_at_any_level_holds_what_was_observed() -> None:
    """Noise only adds to such a model's ECE: at low levels both ends would lie below it."""
    rng = np.random.default_rng(15)
    for level in (0.05, 0.999):
        for _ in range(20):
            p = confidences(100, rng)
            hit = rng.random(100) < p
            low, high = interval(p, hit, rng=rng, level=level)
            assert low <= ece(reliability(p, hit)) <= high + 1e-12
            assert low == 0.0 or level == 0.05


def test_clients_that_repeat_themselves_are_no_more_evidence() -> None:
    """Ten clients of 50 equal examples tell as much as ten of one."""
    p, hit, own = np.linspace(0.55, 0.95, 10), np.arange(10) % 3 > 0, np.arange(10)
    one = interval(p, hit, clients=own, rng=np.random.default_rng(16))
    many = interval(*(np.repeat(x, 50) for x in (p, hit)), clients=np.repeat(own, 50), rng=np.random.default_rng(16))
    assert many == pytest.approx(one)


def test_the_interval_of_a_sure_bin_over_few_clients_is_a_ratio_s() -> None:
    """Clients of unequal sizes: the textbook's variance of sum(hits) / sum(sizes), and Student's quantile."""
    sizes, hits = np.array([20, 40, 60, 200, 80]), np.array([7, 11, 21, 58, 26])
    n, k, share = sizes.sum(), len(sizes), hits.sum() / sizes.sum()
    hit = np.concatenate([np.arange(size) < h for size, h in zip(sizes, hits, strict=True)])
    error = math.sqrt(k / (k - 1) * ((hits - share * sizes) ** 2).sum()) / n
    half = stats.t.ppf(0.975, k - 1) * error
    owner = np.repeat(np.arange(k), sizes)
    got = interval([0.95] * n, hit, clients=owner, rng=np.random.default_rng(18), draws=100_000)
    assert got == pytest.approx((0.95 - share - half, 0.95 - share + half), abs=0.03 * half)


def test_the_interval_of_a_single_group_is_everything() -> None:
    rng = np.random.default_rng(17)
    assert interval([0.7], [1], rng=rng) == (0.0, 1.0)
    assert interval([0.7, 0.8], [1, 0], clients=[4, 4], rng=rng) == (0.0, 1.0)
    assert interval([1.0, 1.0], [1, 1], rng=rng) == (0.0, 0.0)
