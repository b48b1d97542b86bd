"""Logits, likelihoods and the free energy of a masked network, per example.  Eq. (8)"""

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core import masks as masking
from lrbpfl.core.chains import Chain
from lrbpfl.core.inputs import Inputs, pieces
from lrbpfl.core.masks import Gates, Layout, Scales
from lrbpfl.core.modes import modal
from lrbpfl.core.network import Call, Layer, Params, caller, forward, parted, through


def plain_logits(model: nn.Module, W: Params, x: Inputs) -> Tensor:
    """Logits of the deterministic network as a single sample, (1, batch, classes)."""
    return forward(model, W, x)[None]


class MaskedNetwork(NamedTuple):
    """A network some of whose layers carry masks, as functions of W; made once for many steps."""

    before: Callable[[Params, Inputs], Any]  # what a Sequential computes before its first mask: the same under all
    after: Call  # the rest
    places: Layout
    frozen: Params  # masked weights that are no part of W, as they do not train
    chain: Chain | None = None  # the rest, if it is a chain of dense layers

    def logits(self, W: Params, draws: Tensor, h: Inputs, scales: Scales | None = None) -> Tensor:
        """Logits under every sampled mask, (samples, batch, classes), from draws (samples, n) and what came before.

        One mask after the other: on a CPU a loop over materialised masks costs little more than as many plain passes.
        A few rows through dense layers need no such masks.
        """
        rank = max(self.places.ranks.values())
        if self.chain and len(draws) > 1 and isinstance(h, Tensor) and self.chain.suits(W, h, rank):
            return self.chain.logits(W, *masking.all_factors(draws, self.places, scales), h)
        masks = (masking.matrices(drawn, self.places, scales) for drawn in draws.unbind())
        found = [self.under(W, M, h) for M in masks]
        return torch.stack(found) if len(found) > 1 else found[0][None]

    def by_draw(self, W: Params, drawn: Tensor, h: Inputs, y: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood per example under one draw (n,), and its gradient in the draw, written down."""
        own, of = {**self.frozen, **W}, masking.factors(drawn, self.places)
        G = masking.masked(own, {name: masking.matrix(*of[name], self.places.layers[name].groups) for name in of})
        value, by_G = self._slopes(G, h, y, log_prior, of.keys())
        by_M = (masking.by_mask(by_G[name], own[name]) for name in of)  # one at a time: each may be large
        return value, masking.slope(by_M, of, self.places)

    def by_weights(self, W: Params, drawn: Tensor, h: Inputs, y: Tensor, log_prior: Tensor) -> tuple[Tensor, Params]:
        """The same in W, if nothing of it comes before the masks (`whole`)."""
        M = masking.matrices(drawn, self.places)
        value, by_G = self._slopes(masking.masked(W, M, self.frozen), h, y, log_prior, W.keys())
        return value, {name: by_G[name].mul_(M[name]) if name in M else by_G[name] for name in W}

    def whole(self, W: Params) -> bool:
        """Whether W is a chain of dense layers and nothing else."""
        return self.chain is not None and self.chain.names == W.keys()

    def _slopes(self, G: Params, h: Inputs, y: Tensor, log_prior: Tensor, wanted: Set[str]) -> tuple[Tensor, Params]:
        """The negative log-likelihood with parameters G and its gradients in some: by torch, or by hand for a chain."""
        if self.chain and isinstance(h, Tensor) and self.chain.goes_back(G, h):
            return self.chain.slopes(G, h, y, log_prior, wanted)
        G |= {name: G[name].detach().requires_grad_() for name in wanted}
        with torch.enable_grad():
            value = nll((self.after(G, h) + log_prior)[None], y)
        found = torch.autograd.grad(value, [G[name] for name in wanted], allow_unused=True, materialize_grads=True)
        return value.detach(), dict(zip(wanted, found, strict=True))

    def under(self, W: Params, M: dict[str, Tensor], h: Inputs) -> Tensor:
        """Logits under one mask, (batch, classes), from what came before."""
        return self.after(masking.masked(W, M, self.frozen), h)


def masked_network(model: nn.Module, layers: dict[str, Layer], gates: Gates) -> MaskedNetwork:
    """The model with masks of the open ranks on these layers."""
    before, after = parted(model, layers)
    return MaskedNetwork(
        before=through(before),
        after=caller(after),
        places=masking.layout(layers, gates),
        frozen={name: p.detach() for name, p in model.named_parameters() if name in layers and not p.requires_grad},
        chain=None if modal(after) else Chain.of(after),
    )


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood per example, -mean_c log p_c(y): logits (samples, batch, classes), labels (batch,)."""
    return nnf.cross_entropy(logits.flatten(0, 1), y if len(logits) == 1 else y.repeat(len(logits)))


def free_energy(nll: Tensor, kl: Tensor, *, temperature: float, num_data: int) -> Tensor:
    """F / n = NLL per example + temperature * KL(q || p) / n: the one place where a KL is divided by n.  Eq. (8)"""
    return nll + temperature * kl / num_data


@torch.no_grad()
def probabilities(logits: Callable[[Any], Tensor], x: Inputs, chunk: int = 500) -> Tensor:
    """Softmax of logits(x) (samples, n, classes), computed over pieces of x so that memory stays bounded."""
    return torch.cat([torch.softmax(logits(piece), dim=-1) for piece in pieces(x, chunk)], dim=1)
