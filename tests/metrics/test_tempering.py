"""Temperatures: the right one is found, few examples do not move it far, and uncertainties follow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from lrbpfl.metrics import Predictions, pool, reduce
from lrbpfl.metrics.tempering import COLDEST, HOTTEST, fit, temper


def said(logits: torch.Tensor, y: torch.Tensor) -> Predictions:
    """One sample of a model with these logits (n, classes)."""
    return reduce(torch.softmax(logits.double(), dim=1)[None], y)


def planted(n: int, sureness: float, *, seed: int = 0, classes: int = 5) -> Predictions:
    """Labels drawn from a model's softmax, and predictions with logits so many times as large."""
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=rng)
    y = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=rng)[:, 0]
    return said(sureness * logits, y)


def cost(p: Predictions, temperature: float) -> float:
    """What `fit` is to minimise, by someone else's softmax."""
    logits = torch.from_numpy(np.log(p.probs)) / temperature
    likelihood = torch.nn.functional.cross_entropy(logits, torch.from_numpy(p.y), reduction="sum")
    return likelihood.item() + math.log(temperature) ** 2 / 2


@pytest.mark.parametrize("sureness", [0.4, 1.0, 3.0])
def test_a_planted_temperature_is_found(sureness: float) -> None:
    found = fit([planted(8000, sureness, seed=1), planted(8000, sureness, seed=2)])
    assert found == pytest.approx(sureness, rel=0.05)


@pytest.mark.parametrize(("n", "sureness"), [(3, 4.0), (10, 0.2), (40, 2.0), (200, 6.0)])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_on_a_fine_grid_is_better(n: int, sureness: float, seed: int) -> None:
    p = planted(n, sureness, seed=seed)
    grid = np.exp(np.linspace(np.log(COLDEST), np.log(HOTTEST), 3001))
    best = min(grid, key=lambda temperature: cost(p, temperature))
    assert cost(p, fit([p])) <= cost(p, best) + 1e-9


def test_clients_are_fitted_together() -> None:
    parts = [planted(50, 3.0, seed=1), planted(80, 0.5, seed=2)]
    assert fit(parts) == fit([pool(parts)])
    assert fit(parts[1:]) < fit(parts) < fit(parts[:1])


def test_few_examples_do_not_move_it_far_and_many_stay_between_the_bounds() -> None:
    right = said(torch.tensor([[1.0, 0.0]]).expand(3, 2), torch.zeros(3, dtype=torch.int64))
    assert 0.3 < fit([right]) < 0.8
    wrong = right._replace(y=1 - right.y)
    assert 1.2 < fit([wrong]) < 3
    crowd = said(torch.tensor([[2.0, 0.0, 0.0]]).expand(5000, 3), torch.zeros(5000, dtype=torch.int64))
    assert COLDEST < fit([crowd]) < 0.4
    assert fit([crowd._replace(y=crowd.y + 1)]) <= HOTTEST


def test_without_anything_to_learn_it_is_one() -> None:
    assert fit([]) == 1.0
    assert fit([said(torch.zeros(9, 4), torch.arange(9) % 4)]) == 1.0
    assert fit([said(torch.zeros(9, 1), torch.zeros(9, dtype=torch.int64))]) == 1.0


def test_impossible_labels_take_no_part() -> None:
    p = planted(60, 3.0)
    zero = Predictions(np.eye(5)[[0, 1]], np.array([3, 2]), np.zeros(2), np.zeros(2))
    assert fit([p, zero]) == fit([p])
    assert fit([zero]) == 1.0
    half = Predictions(np.array([[0.5, 0.5, 0.0]] * 4), np.array([0, 1, 0, 0]), np.zeros(4), np.zeros(4))
    assert np.isfinite(fit([half]))
    assert temper(half, 7.0).probs == pytest.approx(half.probs)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 10_000), st.floats(0.0, 400.0), st.booleans())
def test_the_labels_it_is_fitted_on_never_become_less_likely(
    n: int, classes: int, seed: int, scale: float, one_class: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(1 if one_class else classes, (n,), generator=rng)
    samples = torch.softmax(scale * torch.randn(3, n, classes, generator=rng), dim=2)  # zeros where scale is large
    p = reduce(samples, y)
    t = fit([p])
    after = temper(p, t)
    own = np.arange(n), p.y
    tiny = float(np.finfo(np.float32).tiny)
    assert np.log(np.maximum(after.probs[own], tiny)).sum() >= np.log(np.maximum(p.probs[own], tiny)).sum()
    assert COLDEST <= t <= HOTTEST
    assert after.probs.sum(axis=1) == pytest.approx(np.ones(n))
    second, first = np.sort(p.probs, axis=1)[:, -2:].T
    assert (after.correct == p.correct)[first - second > 1e-9].all()
    assert (after.aleatoric >= 0).all() and (after.epistemic <= p.epistemic + 1e-12).all()


def test_probabilities_and_uncertainties_at_a_temperature() -> None:
    logits = torch.randn(4, 30, 5, generator=torch.Generator().manual_seed(0)).double()
    p = reduce(torch.softmax(2 * logits, dim=2), torch.arange(30) % 5)
    assert temper(p, 1.0) is p
    for temperature in (0.1, 0.5, 3.0):
        after = temper(p, temperature)
        expected = torch.softmax(torch.from_numpy(p.probs).log() / temperature, dim=1)
        torch.testing.assert_close(torch.from_numpy(after.probs), expected)
        entropies = Categorical(expected).entropy().numpy()
        assert after.total == pytest.approx(entropies)
        assert after.epistemic == pytest.approx(np.minimum(p.epistemic, entropies))
        assert after.aleatoric + after.epistemic == pytest.approx(after.total)
        assert (after.y == p.y).all()
    assert (temper(p, 0.1).epistemic < p.epistemic).any(), "a sure prediction has no room for it"
