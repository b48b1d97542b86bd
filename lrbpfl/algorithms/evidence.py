"""What held-out examples say of a client's masks: how likely each candidate makes them, and what each rank is worth."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data
from lrbpfl.core.gaussian import std
from lrbpfl.core.masks import Gates, Masks
from lrbpfl.core.network import Params
from lrbpfl.core.objective import MaskedNetwork

LEAST = math.log(torch.finfo(torch.float32).tiny)  # of a log-likelihood: no example decides alone
PRICE = 0.02  # what a rank has to be worth, in nats for each held-out example


def log_likelihood(logits: Tensor, y: Tensor) -> Tensor:
    """Log mean_c p_c(y) of each example, (..., examples), from logits (..., samples, examples, classes)."""
    log_p = torch.log_softmax(logits, dim=-1)[..., torch.arange(len(y)), y]
    return (torch.logsumexp(log_p, dim=-2) - math.log(log_p.shape[-2])).clamp(min=LEAST)


@torch.no_grad()
def of_noises(
    logits: Callable[[Tensor], Tensor], masks: Masks, sizes: Sequence[float], noise: Tensor, y: Tensor
) -> Tensor:
    """The log-likelihoods of examples with standard deviations so many times as large: (sizes, examples).

    `logits` are theirs under draws (samples, n) of the posterior; `noise` (samples, n) is the same for all sizes.
    """
    spread = std(masks) * noise
    found = [logits(torch.add(masks.mean, spread, alpha=size)) for size in sizes]
    return log_likelihood(torch.stack(found), y)


@torch.no_grad()
def weighed(network: MaskedNetwork, W: Params, masks: Masks, gates: Gates, held: Data, log_prior: Tensor) -> Gates:
    """The gates of all layers after held-out examples have said what each rank of its mean mask is worth."""
    M, places = masking.matrices(masks.mean, network.places), network.places
    found = {}
    for name, factors in masking.factors(masks.mean, places).items():
        kept = (masking.matrix(*part, places.layers[name].groups) for part in masking.truncated(*factors))
        logits = torch.stack([network.under(W, {**M, name: m}, held.x) + log_prior for m in kept])
        likely = log_likelihood(logits[:, None], held.y)
        gains = likely.new_zeros(len(gates[name]) - 1, len(held.y))  # a layer may have fewer ranks than gates
        gains[: len(likely) - 1] = likely.diff(dim=0)
        found[name] = gating.weighed(gates[name], gains, PRICE)
    return found
