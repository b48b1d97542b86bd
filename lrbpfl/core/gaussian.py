"""Factorised Gaussians: a mean and a standard deviation for every number."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as nnf


class Gaussian(NamedTuple):
    """N(mean, softplus(rho)^2), element by element; both fields have the same shape or broadcast."""

    mean: Tensor
    rho: Tensor


def gaussian(mean: Tensor | float, std: float) -> Gaussian:
    """The Gaussian of this mean and standard deviation: rho is the inverse softplus of std."""
    mean = torch.as_tensor(mean)
    return Gaussian(mean=mean, rho=torch.full_like(mean, std + math.log(-math.expm1(-std))))


def widened(q: Gaussian, times: float) -> Gaussian:
    """The Gaussian with its standard deviations so many times as large."""
    if times == 1.0:
        return q
    wide = times * std(q)
    return Gaussian(mean=q.mean, rho=wide + torch.log(-torch.expm1(-wide)))


def std(q: Gaussian) -> Tensor:
    """The standard deviations, softplus(rho) = log(1 + exp(rho))."""
    return nnf.softplus(q.rho)


def sample(q: Gaussian, noise: Tensor) -> Tensor:
    """A draw by the reparameterisation mean + std * noise, noise ~ N(0, 1) of the mean's shape."""
    return q.mean + std(q) * noise


def kl(q: Gaussian, *, p: Gaussian) -> Tensor:
    """KL(q || p), summed over the elements of q; p broadcasts.

    Per element: log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2.
    """
    s_q, s_p = std(q), std(p)
    return (torch.log(s_p / s_q) + (s_q**2 + (q.mean - p.mean) ** 2) / (2 * s_p**2) - 0.5).sum()


class Prior(NamedTuple):
    """A Gaussian that stays as it is while others move against it: its means and its precisions, 1 / s_p^2."""

    mean: Tensor
    precision: Tensor


def prior(p: Gaussian) -> Prior:
    """What `draws_and_kl` needs of p, computed once for many steps; without a graph."""
    return Prior(mean=p.mean.detach(), precision=std(p).detach().square_().reciprocal_())


def draws_and_kl(q: Gaussian, noise: Tensor, *, p: Prior) -> tuple[tuple[Tensor, ...], Tensor]:
    """A draw of q (n,) for each row of the noise (samples, n), and KL(q || p), p fixed.

    The values and gradients of `sample` and `kl` in about half of their time: what they share is computed once, and the
    gradients are written down instead of recorded. With d = m_q - m_p and s = s_q,
    dKL/dm = d / s_p^2,  dKL/ds = s / s_p^2 - 1 / s,  ds/drho = sigmoid(rho).
    """
    apply: Callable[..., tuple[Tensor, ...]] = _DrawsAndKL.apply  # torch's own is not typed
    *draws, divergence = apply(q.mean, q.rho, p.mean, p.precision, *noise.unbind())
    return tuple(draws), divergence


def slopes(q: Gaussian, noise: Tensor, by_draw: Tensor, *, p: Prior, weight: float) -> Gaussian:
    """The gradients in q (n,) of f(draw) + weight * KL(q || p), from that of f in the draw with this noise (n,).

    As in `draws_and_kl`, for whoever wants neither the KL nor a graph.
    """
    s = std(q)
    of_mean = torch.addcmul(by_draw, q.mean - p.mean, p.precision, value=weight)
    of_std = (by_draw * noise).addcmul_(s, p.precision, value=weight).sub_(s.reciprocal(), alpha=weight)
    return Gaussian(mean=of_mean, rho=of_std.mul_(torch.sigmoid(q.rho)))


class _DrawsAndKL(torch.autograd.Function):
    """Few passes over memory, most of them in place: for a million numbers that is what takes the time."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, prior_mean: Tensor, precision: Tensor, *noise: Tensor
    ) -> tuple[Tensor, ...]:
        s = nnf.softplus(rho)
        draws = [torch.addcmul(mean, s, g) for g in noise]
        d = mean - prior_mean
        by_mean, by_std = d * precision, s * precision
        distance = torch.dot(d, by_mean)
        ratio = torch.mul(s, by_std, out=d)  # s_q^2 / s_p^2
        logs = _sum_of_logs(ratio)
        divergence = 0.5 * (distance + ratio.sub_(1).sum() - logs)
        by_std.sub_(s.reciprocal_())
        ctx.save_for_backward(by_mean, by_std, torch.sigmoid(rho, out=d), *noise)
        return *draws, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_mean, by_std, slope, *noise = ctx.saved_tensors
        *by_draws, weight = gradients
        of_mean, of_std = by_mean * weight, by_std * weight
        for by_draw, g in zip(by_draws, noise, strict=True):
            of_mean.add_(by_draw)
            of_std.addcmul_(by_draw, g)
        return of_mean, of_std.mul_(slope), None, None, *(None for _ in noise)


def _sum_of_logs(x: Tensor) -> Tensor:
    """The sum of log x (n,), from the logarithms of products of two: half as many."""
    half = len(x) // 2
    return (x[:half] * x[half : 2 * half]).log_().sum() + x[2 * half :].log().sum()
