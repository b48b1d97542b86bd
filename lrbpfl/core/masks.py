"""Low-rank Gaussian masks on the layers of a network: G = W o M, M = Q Lambda R^T.  Eqs. (4) and (5)

The posterior of all factors of a client is one flat Gaussian, layer after layer, Q before R, rank by rank: a step over
many small tensors would spend its time in calling them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lrbpfl.core import gates as gating
from lrbpfl.core.gaussian import Gaussian, gaussian, kl
from lrbpfl.core.network import Layer, Params

Gates = dict[str, Tensor]  # gamma (r_max,) by the name of the layer's weight
Masks = Gaussian  # phi and psi of all open ranks, (n,)
Scales = dict[str, Tensor]  # lambda (r_k,) of the open ranks by the same name


class Factors(NamedTuple):
    """One layer's factors under one mask; rank-major, because products of rows are faster than of thin columns."""

    Q: Tensor  # (r_k, outputs)
    R: Tensor  # (r_k, inputs)


class Layout(NamedTuple):
    """Where the factors of each layer lie in the flat posterior; closed ranks have no numbers in it."""

    layers: dict[str, Layer]  # by the names of their weights
    kept: dict[str, Tensor]  # (r_max,) which ranks are open
    ranks: dict[str, int]  # r_k
    sizes: list[int]  # of Q and R of each layer, one after the other


def layout(layers: dict[str, Layer], gates: Gates) -> Layout:
    """The places of the factors of all open ranks."""
    ranks = {name: gating.rank(gates[name]) for name in layers}
    return Layout(
        layers=layers,
        kept={name: gating.is_open(gates[name]).cpu() for name in layers},
        ranks=ranks,
        sizes=[ranks[name] * size for name, layer in layers.items() for size in (layer.outputs, layer.inputs)],
    )


def prior_mean(places: Layout) -> Tensor:
    """The prior mean of every factor, 1 / sqrt(r_k): the prior mask is 1 on average whatever the current rank.  (n,)"""
    ranks = [places.ranks[name] for name in places.layers for _ in ("Q", "R")]
    return torch.cat([torch.full((size,), r**-0.5) for size, r in zip(places.sizes, ranks, strict=True)])


def init(places: Layout, *, spread: float, std: float, rng: Generator) -> Masks:
    """Fresh posteriors: means around the prior's with this spread, standard deviations std.

    What the ranks of a layer are spread by adds up to nothing over them, so that to first order the mean mask stays 1:
    with u = (1, ..., 1) / sqrt(r_k), (1 u^T + s A)(1 u^T + s B)^T = 1 1^T + s^2 A B^T where A u = B u = 0. Ranks that
    began alike would move alike, and make one rank together.
    """
    noise = []
    for name, layer in places.layers.items():
        for size in (layer.outputs, layer.inputs):
            rows = torch.randn(len(places.kept[name]), size, generator=rng)[places.kept[name]]
            noise.append((rows - rows.mean(dim=0)).flatten())
    return gaussian(prior_mean(places) + spread * torch.cat(noise), std)


def draw(masks: Masks, samples: int, rng: Generator) -> Tensor:
    """Noise for `samples` masks, (samples, n), before anything is computed: no way of computing can change it."""
    return torch.randn(samples, len(masks.mean), generator=rng).to(masks.mean)


def factors(drawn: Tensor, places: Layout) -> dict[str, Factors]:
    """The factors of every layer, as views of one draw (n,)."""
    parts = iter(drawn.split(places.sizes))
    return {
        name: Factors(Q=next(parts).view(rank, -1), R=next(parts).view(rank, -1)) for name, rank in places.ranks.items()
    }


def all_factors(
    draws: Tensor, places: Layout, scales: Scales | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Q Lambda and R of every layer under many draws (samples, n), each (samples, r_k, size)."""
    parts = iter(draws.split(places.sizes, dim=1))
    Q, R = dict[str, Tensor](), dict[str, Tensor]()
    for name, rank in places.ranks.items():
        Q[name], R[name] = (next(parts).unflatten(1, (rank, -1)) for _ in ("Q", "R"))
    return (Q if scales is None else {name: q * scales[name][:, None] for name, q in Q.items()}), R


def matrix(Q: Tensor, R: Tensor, groups: int = 1) -> Tensor:
    """One mask M = Q R^T from rank-major factors: (outputs, inputs / groups).  Eq. (5)

    Entry (o, i) belongs to output o and to the i-th input of its group.
    """
    if groups == 1:
        return Q.T @ R
    return (_by_group(Q, groups).mT @ _by_group(R, groups)).flatten(0, 1)


def _by_group(factor: Tensor, groups: int) -> Tensor:
    return factor.reshape(len(factor), groups, -1).movedim(0, 1)  # (groups, r_k, size / groups)


def matrices(drawn: Tensor, places: Layout, scales: Scales | None = None) -> dict[str, Tensor]:
    """The masks M = Q Lambda R^T of all layers from one draw (n,); without scales every open gate is 1."""
    found = {}
    for name, (Q, R) in factors(drawn, places).items():
        found[name] = matrix(Q if scales is None else Q * scales[name][:, None], R, places.layers[name].groups)
    return found


def slope(by_M: Iterable[Tensor], of: dict[str, Factors], places: Layout) -> Tensor:
    """What `matrix` passes back, written down: the gradient in a draw (n,) from those in the masks of its factors."""
    parts = []
    for by, (name, (Q, R)) in zip(by_M, of.items(), strict=True):
        by, groups = by.to(Q), places.layers[name].groups  # W may be of another precision than its masks
        if groups == 1:
            parts += [(R @ by.T).view(-1), (Q @ by).view(-1)]
        else:
            by = by.unflatten(0, (groups, -1))
            Q, R = _by_group(Q, groups), _by_group(R, groups)
            parts += [(R @ by.mT).movedim(0, 1).flatten(), (Q @ by).movedim(0, 1).flatten()]
    return torch.cat(parts)


def masked(W: Params, M: dict[str, Tensor], frozen: Params | None = None) -> Params:
    """The network under one mask, G = W o M on masked weights; all other parameters stay.  Eq. (4)

    Masked weights that do not train are no part of W, but `frozen`. A convolution's mask (outputs, inputs / groups) is
    the same at every position of the kernel.
    """
    own = {**frozen, **W} if frozen else W
    G = {name: own[name].to(m.device) * m.view(m.shape + (1,) * (own[name].dim() - 2)) for name, m in M.items()}
    return {**W, **G}


def by_mask(by_G: Tensor, weight: Tensor) -> Tensor:
    """What G = W o M passes back to M, from the gradient in G of one weight."""
    by_M = by_G * weight.to(by_G.device)
    return by_M if by_M.dim() == 2 else by_M.flatten(2).sum(dim=2)


def kl_divergence(masks: Masks, prior_mean: Tensor, prior_std: float) -> Tensor:
    """KL(q || p) of all factors in closed form, p = N(prior mean, prior_std^2); closed ranks are no part of it."""
    return kl(masks, p=gaussian(prior_mean, prior_std))


def truncated(Q: Tensor, R: Tensor) -> list[Factors]:
    """Q R^T kept to its 1, 2, ... largest singular values, r_k or all there are: the nearest matrices of each rank.

    Ranks of a factorisation can be rotated into one another, so none of them has a use of its own; these have.
    """
    (U, upper), (V, lower) = torch.linalg.qr(Q.T), torch.linalg.qr(R.T)
    left, values, right = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    Q, R = (U @ left * values).T, (V @ right.T).T
    return [Factors(Q[:r], R[:r]) for r in range(1, len(values) + 1)]
