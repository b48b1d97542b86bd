"""Logits, likelihoods and the free energy of a masked network, per example.  Eq. (8)"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.masks import Gates, Masks, Noises
from lrbpfl.core.network import Params, forward, maskable, parted

Likelihood = Literal["elbo", "mixture"]


def plain_logits(model: nn.Module, W: Params, x: Tensor) -> Tensor:
    """Logits of the deterministic network as a single sample, (1, batch, classes)."""
    return forward(model, W, x)[None]


def mask_logits(model: nn.Module, W: Params, masks: Masks, gates: Gates, noise: Noises, x: Tensor) -> Tensor:
    """Logits under every sampled mask, (samples, batch, classes).

    One mask after the other: on a CPU a loop over materialised masks costs little more than as many plain passes.
    What a Sequential model computes before its first masked layer is the same under all masks, and computed once.
    """
    layers = maskable(model)
    draws = {name: masking.factors(masks[name], gates[name], noise[name]) for name in masks}
    before, after = parted(model, masks)
    h = forward(before, W, x)

    def one_mask(*factors: tuple[Tensor, Tensor]) -> Tensor:
        M = {name: masking.matrix(Q, R, layers[name].groups) for name, (Q, R) in zip(draws, factors, strict=True)}
        return forward(after, masking.masked(W, M), h)

    members = zip(*(zip(Q.unbind(), R.unbind(), strict=True) for Q, R in draws.values()), strict=True)
    return torch.stack([one_mask(*factors) for factors in members])


def nll(logits: Tensor, y: Tensor, likelihood: Likelihood = "elbo") -> Tensor:
    """Negative log-likelihood per example, from logits (samples, batch, classes) and labels (batch,).

    `elbo`: -mean_c log p_c(y), the paper's expected log-likelihood; `mixture`: -log mean_c p_c(y), never larger.
    """
    samples, batch, _ = logits.shape
    log_p = -nnf.cross_entropy(logits.flatten(0, 1), y.repeat(samples), reduction="none").view(samples, batch)
    if likelihood == "mixture":
        return (math.log(samples) - torch.logsumexp(log_p, dim=0)).mean()
    return -log_p.mean()


def free_energy(
    nll: Tensor,
    masks: Masks,
    gates: Gates,
    *,
    prior_std: float,
    num_data: int,
    temperature: float,
    gate_penalty: float,
    mask_mean: float = 1.0,
) -> Tensor:
    """F / n = NLL per example + (temperature * KL(q || p) + gate_penalty * sum lambda^2) / n.  Eq. (8)

    The one place where KL and penalty are divided by the number of examples.
    """
    kl = masking.kl_divergence(masks, gates, prior_std, mask_mean)
    penalty = torch.stack([gating.penalty(gamma) for gamma in gates.values()]).sum()
    return nll + (temperature * kl + gate_penalty * penalty) / num_data


@torch.no_grad()
def probabilities(logits: Callable[[Tensor], Tensor], x: Tensor, chunk: int = 500) -> Tensor:
    """Softmax of logits(x) (samples, n, classes), computed over pieces of x so that memory stays bounded."""
    return torch.cat([torch.softmax(logits(piece), dim=-1) for piece in torch.split(x, chunk)], dim=1)
