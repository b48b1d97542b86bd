"""Logits, likelihoods and the free energy of a masked network, per example.  Eq. (8)"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core import masks as masking
from lrbpfl.core.chains import Chain
from lrbpfl.core.masks import Gates, Layout, Scales
from lrbpfl.core.network import Call, Layer, Params, caller, forward, parted


def plain_logits(model: nn.Module, W: Params, x: Tensor) -> Tensor:
    """Logits of the deterministic network as a single sample, (1, batch, classes)."""
    return forward(model, W, x)[None]


class MaskedNetwork(NamedTuple):
    """A network some of whose layers carry masks, as functions of W; made once for many steps."""

    before: Call  # what a Sequential model computes before its first masked layer: the same under all masks
    after: Call  # the rest
    places: Layout
    chain: Chain | None = None  # the rest, if it is a chain of dense layers

    def logits(self, W: Params, draws: Tensor, h: Tensor, scales: Scales | None = None) -> Tensor:
        """Logits under every sampled mask, (samples, batch, classes), from draws (samples, n) and what came before.

        One mask after the other: on a CPU a loop over materialised masks costs little more than as many plain passes.
        A few rows through dense layers need no such masks.
        """
        if self.chain and len(draws) > 1 and self.chain.suits(W, h, max(self.places.ranks.values())):
            return self.chain.logits(W, *masking.all_factors(draws, self.places, scales), h)
        masks = (masking.matrices(drawn, self.places, scales) for drawn in draws.unbind())
        return torch.stack([self.after(masking.masked(W, M), h) for M in masks])


def masked_network(model: nn.Module, layers: dict[str, Layer], gates: Gates) -> MaskedNetwork:
    """The model with masks of the open ranks on these layers."""
    before, after = parted(model, layers)
    places = masking.layout(layers, gates)
    return MaskedNetwork(before=caller(before), after=caller(after), places=places, chain=Chain.of(after))


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood per example, -mean_c log p_c(y): logits (samples, batch, classes), labels (batch,)."""
    return nnf.cross_entropy(logits.flatten(0, 1), y if len(logits) == 1 else y.repeat(len(logits)))


def free_energy(nll: Tensor, kl: Tensor, *, temperature: float, num_data: int) -> Tensor:
    """F / n = NLL per example + temperature * KL(q || p) / n: the one place where a KL is divided by n.  Eq. (8)"""
    return nll + temperature * kl / num_data


@torch.no_grad()
def probabilities(logits: Callable[[Tensor], Tensor], x: Tensor, chunk: int = 500) -> Tensor:
    """Softmax of logits(x) (samples, n, classes), computed over pieces of x so that memory stays bounded."""
    return torch.cat([torch.softmax(logits(piece), dim=-1) for piece in torch.split(x, chunk)], dim=1)
