"""Gates: their values, their pruning, what held-out examples make of them, and that what is closed stays closed."""

import math

import pytest
import torch
from torch import Tensor

from lrbpfl.core import gates as gating
from lrbpfl.core.descent import Data, OptimiserName, Rate, descend

NO_DATA = Data(x=torch.zeros(0), y=torch.zeros(0))


def test_initial_values() -> None:
    gamma = gating.init(4)
    assert gating.gate_values(gamma).tolist() == [1.0, *[pytest.approx(1 / (1 + math.exp(-3.5)))] * 3]
    assert gating.gate_values(gamma)[1].item() == pytest.approx(0.9707, abs=5e-5)
    assert gating.gate_values(gating.init(1)).tolist() == [1.0]


@pytest.mark.parametrize("off", [-1e-4, 1e-4])
def test_the_threshold_is_log_19(off: float) -> None:
    gamma = gating.prune(torch.tensor([math.inf, math.log(19) + off]))
    assert gating.rank(gamma) == (2 if off > 0 else 1)
    assert gating.gate_values(gamma)[1].item() == (pytest.approx(0.95, abs=1e-4) if off > 0 else 0.0)


def test_a_gate_at_the_threshold_stays() -> None:
    assert gating.rank(gating.prune(torch.tensor([math.inf, 0.0, -1e-3]), 0.5)) == 2


def test_pruning_leaves_open_gates_and_its_argument_alone() -> None:
    gamma = torch.tensor([math.inf, 3.5, 1.0, 7.25, -math.inf])
    before = gamma.clone()
    assert gating.prune(gamma).tolist() == [math.inf, 3.5, -math.inf, 7.25, -math.inf]
    assert torch.equal(gamma, before)


@pytest.mark.parametrize("threshold", [0.5, 0.95, 1.0])
def test_the_first_gate_is_never_pruned(threshold: float) -> None:
    gamma = gating.prune(gating.init(3, -5.0), threshold)
    assert gating.is_open(gamma).tolist() == [True, False, False] and gating.gate_values(gamma)[0] == 1


def test_rank_counts_open_gates_not_large_ones() -> None:
    gamma = torch.tensor([math.inf, -20.0, 3.5, -math.inf, -math.inf])
    assert gating.rank(gamma) == 3
    assert gating.is_open(gamma).tolist() == [True, True, True, False, False]


def test_gradients_are_zero_at_both_ends_and_right_between() -> None:
    gamma = torch.tensor([math.inf, 0.7, -math.inf], requires_grad=True)
    (gradient,) = torch.autograd.grad((gating.gate_values(gamma) * torch.tensor([5.0, 2.0, 3.0])).sum(), gamma)
    value = 1 / (1 + math.exp(-0.7))
    assert gradient.tolist() == [0.0, pytest.approx(2 * value * (1 - value)), 0.0]


def test_the_penalty_by_hand() -> None:
    gamma = torch.tensor([math.inf, 3.5, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    penalty = gating.penalty(gamma)
    assert penalty.item() == pytest.approx((1 / (1 + math.exp(-3.5))) ** 2 + 0.25)
    (gradient,) = torch.autograd.grad(0.1 * penalty, gamma)
    assert gradient[1].item() == pytest.approx(0.0055, abs=1e-4)  # 0.2 lambda^2 (1 - lambda) at gamma = 3.5
    assert gradient[0] == gradient[3] == 0


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_ends_survive_training(optimiser: OptimiserName) -> None:
    """Closed gates stay closed and the first stays open, though the objective pulls at both."""
    gamma = torch.tensor([math.inf, 3.5, -math.inf, -math.inf])
    gradients: list[Tensor] = []

    def F(gamma: Tensor, batch: Data) -> Tensor:
        lam = gating.gate_values(gamma)
        loss = 3 * lam[0] - 5 * lam[2:].sum() + gating.penalty(gamma)
        gradients.extend(torch.autograd.grad(loss, gamma, retain_graph=True))
        return loss

    (after,), _ = descend(F, (gamma,), [NO_DATA] * 25, (Rate(optimiser, 0.1),))
    assert len(gradients) == 25 and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    assert after[[0, 2, 3]].tolist() == [math.inf, -math.inf, -math.inf]
    assert math.isfinite(after[1]) and after[1] < 3.5


def test_a_rank_is_worth_its_gains_less_their_error_and_its_price() -> None:
    """Gains of 1, 2, 3, 6: 12 in all, a standard deviation of sqrt(3.5), so an error of sqrt(4 * 3.5)."""
    gamma = torch.tensor([math.inf, 3.5, 0.5, 1.0, -math.inf])
    gains = torch.tensor([[1.0, 2.0, 3.0, 6.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    before = gamma.clone()
    after = gating.weighed(gamma, gains, price=0.25)
    old = [0.0, -0.75 * 3.0, -0.75 * 2.5]  # three quarters of how far they had gone from 3.5
    worth = [12 - math.sqrt(14) - 1, 8 - 1, -1]
    expected = [math.inf, *(3.5 + was + new for was, new in zip(old, worth, strict=True)), -math.inf]
    assert after.tolist() == [pytest.approx(value) for value in expected]
    assert torch.equal(gamma, before)


def test_rounds_open_what_is_useful_and_close_what_is_not_and_what_was_useful_once_may_close() -> None:
    useful, useless = torch.full((1, 10), 0.1), torch.zeros(1, 10)
    gamma = gating.init(3)
    for _ in range(20):
        gamma = gating.weighed(gamma, torch.cat([useful, useless]), price=0.1 / 4)
    assert gating.is_open(gating.prune(gamma)).tolist() == [True, True, False]
    for _ in range(20):
        gamma = gating.weighed(gamma, torch.cat([useless, useful]), price=0.1 / 4)
    assert gating.is_open(gating.prune(gamma)).tolist() == [True, False, True]
