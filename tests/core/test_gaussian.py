"""Factorised Gaussians against torch.distributions and Monte Carlo."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from lrbpfl.core.gaussian import Gaussian, draws_and_kl, gaussian, kl, prior, sample, slopes, std, widened
from lrbpfl.rng import generator


def random(*shape: int, name: str = "q") -> Gaussian:
    rng = generator(0, name)
    return Gaussian(*torch.randn(2, *shape, generator=rng, dtype=torch.float64).unbind())


def normal(q: Gaussian) -> Normal:
    return Normal(q.mean, torch.log1p(torch.exp(q.rho)))


def double(mean: float) -> Tensor:
    return torch.tensor(mean, dtype=torch.float64)


def test_kl_matches_torch() -> None:
    q, p = random(5, 3), random(5, 3, name="p")
    torch.testing.assert_close(kl(q, p=p), kl_divergence(normal(q), normal(p)).sum())


def test_the_prior_broadcasts_and_every_element_of_q_counts() -> None:
    q, p = random(5, 3), gaussian(double(0.5), 0.3)
    torch.testing.assert_close(kl(q, p=p), kl_divergence(normal(q), normal(p)).sum())


def test_kl_matches_monte_carlo() -> None:
    q, p = random(1), random(1, name="p")
    draws = sample(q, torch.randn(400_000, 1, generator=generator(0, "noise"), dtype=torch.float64))
    log_q, log_p = (normal(g).log_prob(draws) for g in (q, p))
    log_ratio = log_q - log_p
    error = log_ratio.std() / len(draws) ** 0.5
    assert abs(log_ratio.mean() - kl(q, p=p)) < 4 * error
    assert error < 0.01 * kl(q, p=p)


def test_kl_is_zero_at_the_prior_and_nowhere_else() -> None:
    q = random(4)
    assert kl(q, p=q).item() == pytest.approx(0, abs=1e-14)
    assert kl(Gaussian(q.mean + 1e-3, q.rho), p=q) > 1e-8
    assert kl(Gaussian(q.mean, q.rho + 1e-3), p=q) > 1e-8


def test_the_direction_matters() -> None:
    narrow, wide = gaussian(double(0.0), 0.1), gaussian(double(0.0), 1.0)
    assert kl(narrow, p=wide).item() == pytest.approx(2.302585 + 0.005 - 0.5, rel=1e-5)
    assert kl(wide, p=narrow).item() == pytest.approx(-2.302585 + 50 - 0.5, rel=1e-5)


@pytest.mark.parametrize("value", [1e-6, 0.05, 0.1**0.5, 1.0, 20.0])
def test_the_std_comes_back(value: float) -> None:
    torch.testing.assert_close(std(gaussian(torch.zeros(3), value)), torch.full((3,), value))
    assert std(gaussian(double(0.0), value)).item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("times", [1 / 6, 0.5, 1.0, 2.0, 40.0])
def test_a_widened_gaussian_has_so_many_times_the_std_and_the_same_mean(times: float) -> None:
    """Over all sizes that occur, from standard deviations of 1e-7 to 30."""
    q = Gaussian(mean=torch.randn(5), rho=torch.tensor([-16.0, -3.0, 0.0, 2.0, 30.0]))
    wide = widened(q, times)
    assert torch.equal(wide.mean, q.mean)
    torch.testing.assert_close(std(wide), times * torch.logaddexp(q.rho, torch.zeros(())), rtol=1e-5, atol=0)


def test_the_mean_comes_back() -> None:
    mean = torch.randn(4, 2)
    assert torch.equal(gaussian(mean, 0.1).mean, mean) and gaussian(mean, 0.1).rho.shape == mean.shape
    assert gaussian(0.25, 0.1).mean.item() == 0.25


def test_sample_moments() -> None:
    q = gaussian(torch.tensor([-1.0, 0.0, 2.0]), 0.5)
    draws = sample(q, torch.randn(200_000, 3, generator=generator(0, "noise")))
    torch.testing.assert_close(draws.mean(0), q.mean, atol=5 * 0.5 / 200_000**0.5, rtol=0)
    torch.testing.assert_close(draws.std(0), torch.full((3,), 0.5), atol=0.005, rtol=0)


def test_sample_is_mean_plus_std_times_noise() -> None:
    q, noise = random(3), torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close((sample(q, noise) - q.mean) / torch.log1p(torch.exp(q.rho)), noise)


def gradients(q: Gaussian, weights: Tensor, *, fused: bool, p: Gaussian, noise: Tensor) -> tuple[Tensor, ...]:
    """The draws, the KL, and the gradients in q of a sum over all of them."""
    q = Gaussian(*(part.clone().requires_grad_() for part in q))
    if fused:
        draws, divergence = draws_and_kl(q, noise, p=prior(p))
    else:
        draws, divergence = tuple(sample(q, row) for row in noise), kl(q, p=p)
    total = 1.7 * divergence + (weights * torch.stack(draws)).sum()
    total.backward()
    assert q.mean.grad is not None and q.rho.grad is not None
    return *draws, divergence, q.mean.grad, q.rho.grad


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("samples", [1, 3])
def test_draws_and_kl_are_what_sample_and_kl_are(size: int, samples: int) -> None:
    q, p = random(size), random(size, name="p")
    noise, weights = torch.randn(2, samples, size, generator=generator(0, "noise"), dtype=torch.float64)
    one, other = (gradients(q, weights, fused=fused, p=p, noise=noise) for fused in (True, False))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one[samples].detach(), kl_divergence(normal(q), normal(p)).sum())


def test_the_gradients_of_draws_and_kl_are_differences() -> None:
    q, p = random(5), prior(random(5, name="p"))
    noise = torch.randn(2, 5, generator=generator(0, "noise"), dtype=torch.float64)

    def outputs(mean: Tensor, rho: Tensor) -> tuple[Tensor, ...]:
        draws, divergence = draws_and_kl(Gaussian(mean, rho), noise, p=p)
        return *draws, divergence

    assert torch.autograd.gradcheck(outputs, tuple(part.clone().requires_grad_() for part in q))


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_slopes_are_those_of_the_draw_and_of_torchs_kl(weight: float) -> None:
    q, p = Gaussian(*(part.requires_grad_() for part in random(6))), random(6, name="p")
    noise, by_draw = torch.randn(2, 6, generator=generator(0, "noise"), dtype=torch.float64)
    total = (by_draw * sample(q, noise)).sum() + weight * kl_divergence(normal(q), normal(p)).sum()
    with torch.no_grad():
        found = slopes(q, noise, by_draw, p=prior(p), weight=weight)
    torch.testing.assert_close(tuple(found), torch.autograd.grad(total, q))


def test_the_gradients_of_kl_in_both_gaussians_are_differences() -> None:
    parts = tuple(part.clone().requires_grad_() for part in (*random(5), *random(5, name="p")))
    assert torch.autograd.gradcheck(lambda a, b, c, d: kl(Gaussian(a, b), p=Gaussian(c, d)), parts)


def test_draws_and_kl_change_no_argument_and_give_the_same_gradients_twice() -> None:
    q, p = Gaussian(*(part.requires_grad_() for part in random(6))), random(6, name="p")
    noise, fixed = torch.ones(1, 6, dtype=torch.float64), prior(p)
    before = [part.detach().clone() for part in (*q, *fixed, noise)]
    (draw,), divergence = draws_and_kl(q, noise, p=fixed)
    total = draw.sum() + divergence
    one, two = (torch.autograd.grad(total, q, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.testing.assert_close([part.detach() for part in (*q, *fixed, noise)], before, rtol=0, atol=0)


def test_a_small_kl_of_many_numbers_is_exact_in_single_precision() -> None:
    """A million terms that nearly cancel: log s and s^2 / s_p^2 are not summed apart."""
    q = gaussian(torch.zeros(1_000_001), 0.05)
    p = Gaussian(q.mean, q.rho + 0.01)
    _, divergence = draws_and_kl(q, torch.zeros(1, 1_000_001), p=prior(p))
    exact = kl(Gaussian(*(part.double() for part in q)), p=Gaussian(*(part.double() for part in p)))
    assert divergence.item() == pytest.approx(exact.item(), rel=0.01)
