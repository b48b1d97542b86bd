"""Epsilon against the exact Gaussian mechanism, and what happens without the library."""

import math
import sys

import pytest
from scipy.stats import norm

from lrbpfl.engines.intake import Intake
from lrbpfl.engines.privacy import epsilon
from lrbpfl.errors import BadInput


def exact_delta(epsilon: float, distance: float) -> float:
    """Of the Gaussian mechanism, its two means so many standard deviations apart (Balle and Wang, 2018, Theorem 8)."""
    near, far = distance / 2 - epsilon / distance, -distance / 2 - epsilon / distance
    return float(norm.cdf(near) - math.exp(epsilon + norm.logcdf(far)))


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 1), (20.0, 50)])
def test_epsilon_of_whole_cohorts_is_a_little_above_the_exact_one(noise: float, rounds: int) -> None:
    """One client exchanged for another moves a sum by two clips: 2 / noise standard deviations in each round."""
    pytest.importorskip("dp_accounting.rdp")
    told = epsilon(Intake(clip=1.0, noise=noise), clients=10, cohort=10, rounds=rounds)
    distance = 2 / noise * math.sqrt(rounds)
    assert exact_delta(told, distance) < 1e-5 < exact_delta(0.8 * told, distance)


def test_epsilon_falls_with_noise_and_sampling_and_grows_with_rounds() -> None:
    pytest.importorskip("dp_accounting.rdp")

    def told(noise: float = 8.0, cohort: int = 10, rounds: int = 100, delta: float = 1e-5) -> float:
        return epsilon(Intake(clip=3.0, noise=noise, delta=delta), clients=50, cohort=cohort, rounds=rounds)

    assert told(noise=16.0) < told() < told(rounds=200) and told() < told(cohort=50) and told(delta=1e-3) < told()
    assert told(noise=1.0, rounds=1000) > 1000  # ten of fifty at noise 1: nothing is promised


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(BadInput, match=r"pip install lrbpfl\[dp\]"):
        epsilon(Intake(clip=1.0, noise=1.0), clients=3, cohort=2, rounds=1)


def test_too_little_noise_has_no_epsilon() -> None:
    pytest.importorskip("dp_accounting.rdp")
    for cohort in (2, 3):
        with pytest.raises(BadInput, match="noise = 1e-200 is too little"):
            epsilon(Intake(clip=1.0, noise=1e-200), clients=3, cohort=cohort, rounds=1)
