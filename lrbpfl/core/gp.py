"""Binary Gaussian process classification by Polya-Gamma augmentation (Polson, Scott and Windle, 2013).

Labels are kappa = +1/2 and -1/2; f ~ N(m, K), K with the jitter on its diagonal. Given omega ~ PG(1, f) the
likelihood is Gaussian in f, as if kappa / omega had been observed with variances 1 / omega. With W = diag(omega),
everything is written through B = I + W^1/2 K W^1/2, so that no omega is ever divided by and nothing is near singular.
All of it is in double precision, over many independent chains at once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as nnf

from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

Link = Literal["mean", "exp-log"]  # E[sigma(f)], or exp(E[log sigma(f)]), which treats the two sides unequally

JITTER = 1e-3  # added to the prior variance of every point
QUADRATURE = 20  # points of Gauss-Hermite


class Given(NamedTuple):
    """f given the labels and each chain's omega, in the form that predictions need."""

    root: Tensor  # (chains, N), W^1/2
    L: Tensor  # (chains, N, N), the Cholesky factor of B
    alpha: Tensor  # (chains, N), (K + W^-1)^-1 (W^-1 kappa - m)


def rbf(a: Tensor, b: Tensor, *, output_scale: float, length_scale: float) -> Tensor:
    """output_scale exp(-|a_i - b_j|^2 / (2 length_scale^2)) of points (n, d) and (m, d): (n, m)."""
    squares = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T
    return output_scale * torch.exp(-squares / (2 * length_scale**2))


def jittered(K: Tensor) -> Tensor:
    """The covariance of the points themselves: K (n, n) with the jitter on its diagonal."""
    return K + JITTER * torch.eye(len(K)).to(K)


def sampler() -> Callable[..., Any]:
    """The exact Polya-Gamma sampler, from a package that is not always there."""
    try:
        from polyagamma import random_polyagamma
    except ImportError:
        raise BadInput("pFedGP draws Polya-Gamma variables: install lrbpfl[gp], on Python 3.13 or older") from None
    draw: Callable[..., Any] = random_polyagamma
    return draw


def polya_gamma(f: Tensor, rng: np.random.Generator) -> Tensor:
    """One exact draw from PG(1, f) for each number of f."""
    draws = sampler()(h=1, z=f.detach().cpu().numpy(), method="devroye", random_state=rng)
    return torch.from_numpy(draws).to(f)


def condition(K: Tensor, kappa: Tensor, omega: Tensor, mean: Tensor | float) -> Given:
    """Condition on the labels kappa (N,), given K (N, N) and omega (chains, N).

    alpha = (K + W^-1)^-1 (W^-1 kappa - m) is written as kappa - (K + W^-1)^-1 (K kappa + m).
    """
    root = omega.sqrt()
    L = torch.linalg.cholesky(root[:, :, None] * K * root[:, None, :] + torch.eye(len(K)).to(K))
    alpha = kappa - root * _solve(L, root * (K @ kappa + mean))
    return Given(root=root, L=L, alpha=alpha)


def predictive(given: Given, k: Tensor, k_star: float, mean: Tensor | float) -> tuple[Tensor, Tensor]:
    """Means and variances (chains, n) of f at new points, from k (N, n) and their own prior variance.

    m + k' alpha  and  k_star - k' (K + W^-1)^-1 k, where k_star has the jitter.
    """
    half = torch.linalg.solve_triangular(given.L, given.root[:, :, None] * k, upper=False)
    return mean + given.alpha @ k, k_star - half.square().sum(1)


def draw_f(K: Tensor, kappa: Tensor, omega: Tensor, prior: Tensor, noise: Tensor) -> Tensor:
    """A draw of f | omega ~ N(S (kappa + K^-1 m), S), S = (K^-1 + W)^-1, for each chain: (chains, N).

    From draws of the prior N(m, K) and of N(0, I), both (chains, N), moved by what was observed.
    """
    given = condition(K, kappa, omega, prior)
    return prior + (given.alpha - given.root * _solve(given.L, noise)) @ K


@torch.no_grad()
def gibbs(K: Tensor, kappa: Tensor, *, mean: Tensor | float, chains: int, sweeps: int, rng: Generator) -> Tensor:
    """The omega of every chain's last state, (chains, N): f from the prior, then omega | f and f | omega in turn."""

    def normal() -> Tensor:
        return torch.randn(chains, len(K), dtype=torch.float64, generator=rng).to(K)

    numpy_rng = numpy_generator(int(torch.randint(2**62, (), generator=rng)))
    root = torch.linalg.cholesky(K)
    f = mean + normal() @ root.T
    for _ in range(sweeps):
        omega = polya_gamma(f, numpy_rng)
        f = draw_f(K, kappa, omega, prior=mean + normal() @ root.T, noise=normal())
    return polya_gamma(f, numpy_rng)


def probability(mean: Tensor, variance: Tensor, link: Link) -> Tensor:
    """The probability of the side with kappa = +1/2 under f ~ N(mean, variance), by Gauss-Hermite quadrature."""
    points, weights = (torch.from_numpy(part).to(mean) for part in _hermite())
    f = mean[..., None] + (2 * variance)[..., None].sqrt() * points
    if link == "mean":
        return torch.sigmoid(f) @ weights
    return torch.exp(nnf.logsigmoid(f) @ weights)


@cache
def _hermite() -> tuple[Any, Any]:
    points, weights = np.polynomial.hermite.hermgauss(QUADRATURE)
    return points, weights / weights.sum()


def _solve(L: Tensor, v: Tensor) -> Tensor:
    """B^-1 v for v (chains, N)."""
    return torch.cholesky_solve(v[..., None], L)[..., 0]
