"""Factorised Gaussians: a mean and a standard deviation for every number."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf


class Gaussian(NamedTuple):
    """N(mean, softplus(rho)^2), element by element; both fields have the same shape or broadcast."""

    mean: Tensor
    rho: Tensor


def gaussian(mean: Tensor | float, std: float) -> Gaussian:
    """The Gaussian of this mean and standard deviation: rho is the inverse softplus of std."""
    mean = torch.as_tensor(mean)
    return Gaussian(mean=mean, rho=torch.full_like(mean, std + math.log(-math.expm1(-std))))


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
