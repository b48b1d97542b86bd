"""Binary GP classification against scikit-learn, dense algebra, known moments and numerical integration."""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor

from lrbpfl.core import gp
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator, numpy_generator

SCALES = {"output_scale": 8.0, "length_scale": 1.0}


def points(n: int, *path: str) -> Tensor:
    x = torch.randn(n, 5, dtype=torch.float64, generator=generator(0, "points", *path))
    unit: Tensor = x / x.norm(dim=1, keepdim=True)
    return unit


def problem(n: int, chains: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points, their covariance, labels and a positive omega for each chain."""
    x, omega = points(n), torch.rand(chains, n, dtype=torch.float64, generator=generator(0, "omega")) / 4
    return x, gp.jittered(gp.rbf(x, x, **SCALES)), (torch.arange(n) % 2).double() - 0.5, omega


def test_the_kernel_is_scikit_learns() -> None:
    a, b = points(6, "a"), points(4, "b")
    for output_scale, length_scale in ((8.0, 1.0), (3.0, 0.4)):
        expected = (ConstantKernel(output_scale) * RBF(length_scale))(a.numpy(), b.numpy())
        got = gp.rbf(a, b, output_scale=output_scale, length_scale=length_scale)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_the_kernel_has_a_gradient_where_points_coincide() -> None:
    x = points(3)[[0, 0, 1]].requires_grad_()
    gp.rbf(x, x, **SCALES).sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_the_jitter_is_on_the_diagonal_only() -> None:
    K = torch.full((3, 3), 2.0).double()
    torch.testing.assert_close(gp.jittered(K), K + torch.diag(torch.full((3,), 1e-3)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("mean", [0.0, -1.3])
def test_given_omega_it_is_regression_on_kappa_over_omega(mean: float) -> None:
    """With variances 1 / omega, by scikit-learn; a new point has the jitter in its own variance."""
    x, K, kappa, omega = problem(15, chains=3)
    new = points(7, "new")
    got = gp.predictive(gp.condition(K, kappa, omega, mean), gp.rbf(x, new, **SCALES), 8.0 + gp.JITTER, mean)
    for w, mu, variance in zip(omega.numpy(), *got, strict=True):
        kernel = ConstantKernel(8.0, "fixed") * RBF(1.0, "fixed")
        regression = GaussianProcessRegressor(kernel, alpha=gp.JITTER + 1 / w, optimizer=None)
        regression.fit(x.numpy(), kappa.numpy() / w - mean)
        expected, std = regression.predict(new.numpy(), return_std=True)
        np.testing.assert_allclose(mu.numpy(), mean + expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(variance.numpy(), std**2 + gp.JITTER, rtol=1e-10)


def test_the_matrix_identities_behind_it() -> None:
    """S = (K^-1 + W)^-1 = K - K (K + W^-1)^-1 K, and S (kappa + K^-1 m) = m + K alpha, by plain inverses."""
    _, K, kappa, omega = problem(10, chains=2)
    m = torch.full_like(kappa, 0.7)
    given = gp.condition(K, kappa, omega, 0.7)
    for c, w in enumerate(omega):
        S = torch.linalg.inv(torch.linalg.inv(K) + torch.diag(w))
        inner = torch.diag(given.root[c]) @ torch.cholesky_inverse(given.L[c]) @ torch.diag(given.root[c])
        torch.testing.assert_close(inner, torch.linalg.inv(K + torch.diag(1 / w)), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(K - K @ inner @ K, S, rtol=1e-9, atol=1e-9)
        expected = S @ (kappa + torch.linalg.solve(K, m))
        torch.testing.assert_close(0.7 + K @ given.alpha[c], expected, rtol=1e-9, atol=1e-9)


def test_draws_of_f_have_the_posteriors_mean_and_covariance() -> None:
    """The draw is linear in two independent standard normal vectors: its moments are read off exactly."""
    _, K, kappa, omega = problem(6, chains=1)
    root, m = torch.linalg.cholesky(K), torch.linspace(-1, 1, 6).double()[None]

    def draw(z: Tensor) -> Tensor:
        return gp.draw_f(K, kappa, omega, prior=m + (root @ z[:6])[None], noise=z[6:][None])[0]

    S = torch.linalg.inv(torch.linalg.inv(K) + torch.diag(omega[0]))
    zero = torch.zeros(12, dtype=torch.float64)
    torch.testing.assert_close(draw(zero), S @ (kappa + torch.linalg.solve(K, m[0])), rtol=1e-9, atol=1e-9)
    J = torch.stack([draw(unit) - draw(zero) for unit in torch.eye(12).double()], dim=1)
    torch.testing.assert_close(J @ J.T, S, rtol=1e-9, atol=1e-9)


def test_an_omega_near_zero_does_no_harm() -> None:
    """Its point then weighs in by exp(kappa f) alone: the posterior mean is m + K kappa."""
    x, K, kappa, omega = problem(5, chains=1)
    k = gp.rbf(x, x, **SCALES)
    mu, variance = gp.predictive(gp.condition(K, kappa, omega * 1e-300, 0.2), k, 8.0 + gp.JITTER, 0.2)
    torch.testing.assert_close(mu[0], 0.2 + k @ kappa)
    torch.testing.assert_close(variance[0], torch.full_like(kappa, 8.001))


@pytest.mark.parametrize("c", [0.0, 0.5, -2.0, 8.0])
def test_polya_gamma_draws_have_the_known_moments(c: float) -> None:
    n = 200_000
    draws = gp.polya_gamma(torch.full((n,), c, dtype=torch.float64), numpy_generator(0, "moments"))
    a = abs(c)
    mean = math.tanh(a / 2) / (2 * a) if a else 1 / 4
    variance = (math.sinh(a) - a) / (4 * a**3 * math.cosh(a / 2) ** 2) if a else 1 / 24
    assert draws.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / n))
    assert draws.var().item() == pytest.approx(variance, rel=0.05)
    assert bool((draws > 0).all()) and draws.dtype == torch.float64


def normal_mean(g: Callable[[Tensor], Tensor], mean: float, variance: float) -> float:
    """E[g(f)] under f ~ N(mean, variance), by a fine sum."""
    z = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    weights = torch.exp(-(z**2) / 2)
    return (g(mean + math.sqrt(variance) * z) * weights / weights.sum()).sum().item()


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 8.0), (2.0, 8.0), (-3.0, 1.0), (0.4, 0.001), (6.0, 4.0)])
def test_probabilities_are_integrals(mean: float, variance: float) -> None:
    args = torch.tensor([mean]).double(), torch.tensor([variance]).double()
    assert gp.probability(*args, "mean").item() == pytest.approx(normal_mean(torch.sigmoid, mean, variance), abs=1e-4)
    expected = math.exp(normal_mean(torch.nn.functional.logsigmoid, mean, variance))
    assert gp.probability(*args, "exp-log").item() == pytest.approx(expected, abs=2e-3)


def test_only_the_mean_treats_both_sides_alike() -> None:
    mean, variance = torch.tensor([0.0, 1.7, -4.0]).double(), torch.tensor([2.83**2, 3.0, 8.0]).double()
    both = gp.probability(mean, variance, "mean") + gp.probability(-mean, variance, "mean")
    torch.testing.assert_close(both, torch.ones(3).double(), rtol=0, atol=1e-12)
    left = gp.probability(mean, variance, "exp-log")[0].item()
    assert left == pytest.approx(0.263, abs=1e-3) and 1 - left == pytest.approx(0.737, abs=1e-3)


@pytest.mark.parametrize("mean", [0.0, 1.5])
def test_gibbs_reaches_the_posterior(mean: float) -> None:
    """Two points with labels + and -, and a third to predict, against integrals on a grid."""
    K = torch.tensor([[8.001, 4.0], [4.0, 8.001]]).double()
    kappa, k, k_star = torch.tensor([0.5, -0.5]).double(), torch.tensor([[5.0], [1.0]]).double(), 8.001
    grid = torch.linspace(-18, 18, 301).double()
    f = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), dim=-1).reshape(-1, 2)
    prior = torch.distributions.MultivariateNormal(torch.full((2,), mean).double(), K).log_prob(f)
    weights = torch.softmax(prior + torch.nn.functional.logsigmoid(2 * kappa * f).sum(1), dim=0)
    a = torch.linalg.solve(K, k)[:, 0]
    star, rest = mean + (f - mean) @ a, k_star - (k[:, 0] @ a).item()
    expected_mean = (weights * star).sum()
    expected_variance = (weights * (star - expected_mean).square()).sum() + rest
    expected_p = (weights * gp.probability(star, torch.full_like(star, rest), "mean")).sum()

    omega = gp.gibbs(K, kappa, mean=mean, chains=40_000, sweeps=30, rng=generator(0, "gibbs"))
    mu, variance = gp.predictive(gp.condition(K, kappa, omega, mean), k, k_star, mean)
    p = gp.probability(mu, variance, "mean")
    assert mu.mean().item() == pytest.approx(expected_mean.item(), abs=4 * mu.std().item() / 200)
    assert (variance.mean() + mu.var()).item() == pytest.approx(expected_variance.item(), rel=0.02)
    assert p.mean().item() == pytest.approx(expected_p.item(), abs=4 * p.std().item() / 200)


def test_chains_start_from_the_prior() -> None:
    """Without a sweep, E[omega] is E[tanh(f / 2) / (2 f)] under f ~ N(m, K)."""
    K, kappa = torch.tensor([[2.0]]).double(), torch.tensor([0.5]).double()
    omega = gp.gibbs(K, kappa, mean=3.0, chains=100_000, sweeps=0, rng=generator(0))
    expected = normal_mean(lambda f: torch.tanh(f / 2) / (2 * f), 3.0, 2.0)
    assert omega.mean().item() == pytest.approx(expected, abs=4 * omega.std().item() / math.sqrt(100_000))


def test_gibbs_draws_from_its_generator_only() -> None:
    _, K, kappa, _ = problem(8, chains=1)
    one, same, other = (gp.gibbs(K, kappa, mean=0.0, chains=4, sweeps=2, rng=generator(s)) for s in (0, 0, 1))
    assert one.shape == (4, 8) and torch.equal(one, same)
    assert len(torch.cat([one, other]).unique()) == 64  # chains are independent


def test_gradients_pass_through_the_kernel() -> None:
    x, _, kappa, omega = problem(5, chains=2)
    new = points(3, "new")

    def p(x: Tensor, new: Tensor) -> Tensor:
        given = gp.condition(gp.jittered(gp.rbf(x, x, **SCALES)), kappa, omega, 0.3)
        mu, variance = gp.predictive(given, gp.rbf(x, new, **SCALES), 8.0 + gp.JITTER, 0.3)
        return gp.probability(mu, variance, "mean")

    assert torch.autograd.gradcheck(p, (x.requires_grad_(), new.requires_grad_()))


def test_a_missing_sampler_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polyagamma", None)
    with pytest.raises(
        BadInput, match=r"^pFedGP draws Polya-Gamma variables: install lrbpfl\[gp\], on Python 3.13 or older$"
    ):
        gp.sampler()
