"""Low-rank Gaussian masks on the layers of a network: G = W o M, M = Q Lambda R^T.  Eqs. (4) and (5)"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lrbpfl.core import gates as gating
from lrbpfl.core.gaussian import Gaussian, gaussian, kl, sample
from lrbpfl.core.network import Layer, Params, bias_of


class Mask(NamedTuple):
    """The posterior of one layer's factors: phi describes Q (outputs, r_max), psi describes R (inputs, r_max)."""

    Q: Gaussian
    R: Gaussian


class Noise(NamedTuple):
    """Standard normal draws for the masks of one layer: Q (samples, r_max, outputs), R (samples, r_max, inputs)."""

    Q: Tensor
    R: Tensor


Masks = dict[str, Mask]  # by the name of the layer's weight
Gates = dict[str, Tensor]  # gamma (r_max,) by the same name
Noises = dict[str, Noise]


def prior_mean(gamma: Tensor, mask_mean: float = 1.0) -> float:
    """The prior mean of every factor, 1 / sqrt(r_k): the prior mask is 1 on average whatever the current rank.

    Or sqrt(mask_mean / r_k), so that it is `mask_mean` on average.
    """
    return math.sqrt(mask_mean) / math.sqrt(gating.rank(gamma))


def init(
    layers: dict[str, Layer], gates: Gates, *, spread: float, std: float, rng: Generator, mask_mean: float = 1.0
) -> Masks:
    """Fresh posteriors: means N(prior mean, spread^2), standard deviations std."""

    def factor(size: int, gamma: Tensor) -> Gaussian:
        noise = torch.randn(size, len(gamma), generator=rng).to(gamma)
        return gaussian(prior_mean(gamma, mask_mean) + spread * noise, std)

    return {
        name: Mask(Q=factor(layer.outputs, gates[name]), R=factor(layer.inputs, gates[name]))
        for name, layer in layers.items()
    }


def with_bias(layers: dict[str, Layer], W: Params) -> dict[str, Layer]:
    """The layers with a bias as one more input, [W, b] o (Q Lambda R^T); without one, or in groups, they stay."""

    def widened(name: str, layer: Layer) -> Layer:
        has_one = layer.groups == 1 and bias_of(name) in W
        return layer._replace(inputs=layer.inputs + 1) if has_one else layer

    return {name: widened(name, layer) for name, layer in layers.items()}


def draw(masks: Masks, samples: int, rng: Generator) -> Noises:
    """Noise for `samples` masks, drawn before anything is computed, so that no way of computing can change it."""

    def normal(q: Gaussian) -> Tensor:
        return torch.randn(samples, *q.mean.mT.shape, generator=rng).to(q.mean)

    return {name: Noise(Q=normal(mask.Q), R=normal(mask.R)) for name, mask in masks.items()}


def factors(mask: Mask, gamma: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Sampled factors of the open ranks, transposed: Lambda Q^T (samples, r_k, outputs) and R^T (samples, r_k, inputs).

    Closed ranks are dropped here, before anything is multiplied: neither their means nor their noise can reach a mask.
    """
    # Rank-major rows: the products of `matrix` and of its gradient are several times faster than with thin columns.
    kept = gating.is_open(gamma)

    def rows(q: Gaussian, noise: Tensor) -> Tensor:
        return sample(open_ranks(q, gamma, transpose=True), noise if bool(kept.all()) else noise[:, kept])

    return rows(mask.Q, noise.Q) * gating.gates(gamma)[kept, None], rows(mask.R, noise.R)


def open_ranks(q: Gaussian, gamma: Tensor, *, transpose: bool = False) -> Gaussian:
    """The columns of a factor whose gates are open: (size, r_max) -> (size, r_k), or (r_k, size) if transposed."""
    kept = gating.is_open(gamma)

    def keep(columns: Tensor) -> Tensor:
        columns = columns if bool(kept.all()) else columns[:, kept]
        return columns.T.contiguous() if transpose else columns

    return Gaussian(mean=keep(q.mean), rho=keep(q.rho))


def matrix(Q: Tensor, R: Tensor, groups: int = 1) -> Tensor:
    """One mask M = Q Lambda R^T from one draw of `factors`: (outputs, inputs / groups).  Eq. (5)

    Entry (o, i) belongs to output o and to the i-th input of its group.
    """
    if groups == 1:
        return Q.T @ R
    Q, R = (factor.reshape(len(factor), groups, -1).movedim(0, 1) for factor in (Q, R))  # (groups, r_k, size / groups)
    return (Q.mT @ R).flatten(0, 1)


def masked(W: Params, M: dict[str, Tensor]) -> Params:
    """The network under one mask, G = W o M on masked weights; all other parameters stay.  Eq. (4)

    A convolution's mask (outputs, inputs / groups) is the same at every position of the kernel. A mask with one column
    more than the weight has inputs masks the bias with it.
    """
    G = dict(W)
    for name, m in M.items():
        inputs = W[name].shape[1]
        if m.shape[1] > inputs:
            G[bias_of(name)] = W[bias_of(name)] * m[:, inputs]
            m = m[:, :inputs]
        G[name] = W[name] * m.reshape(m.shape + (1,) * (W[name].dim() - 2))
    return G


def kl_divergence(masks: Masks, gates: Gates, prior_std: float, mask_mean: float = 1.0) -> Tensor:
    """KL(q || p) of all factors in closed form, p = N(prior mean, prior_std^2); closed ranks are no part of it."""
    factors = [
        (open_ranks(q, gates[name]), prior_mean(gates[name], mask_mean)) for name, mask in masks.items() for q in mask
    ]
    q = Gaussian(
        mean=torch.cat([q.mean.flatten() for q, _ in factors]),
        rho=torch.cat([q.rho.flatten() for q, _ in factors]),
    )
    means = torch.cat([torch.full_like(q.mean, mean).flatten() for q, mean in factors])
    return kl(q, p=gaussian(means, prior_std))
