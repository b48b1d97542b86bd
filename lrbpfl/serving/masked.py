"""LR-BPFL for rows of different clients: dense layers under masks, W used once for all of them.

A layer is a sum over ranks, (W o Q Lambda R^T) x = sum_i lambda_i q_i o W (r_i o x), with (row, sample, rank) as the
batch. The masks of a client are drawn anew for each request, from its own address: to keep the C draws would take
several times the memory of the posterior they come from.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.algorithms.lr_bpfl import LRBPFL, PersonalMask
from lrbpfl.algorithms.masked_client import scales_of
from lrbpfl.core import masks as masking
from lrbpfl.core.gaussian import sample
from lrbpfl.core.masks import Factors
from lrbpfl.core.network import Layer, Params, bias_of, maskable, parted
from lrbpfl.core.objective import masked_network
from lrbpfl.personal.model import PersonalModel

NUMBERS = 2**22  # in memory at a time, in the widest layer


class Plan(NamedTuple):
    """How the rows of all clients of one network go through it together."""

    method: LRBPFL
    model: nn.Module
    layers: dict[str, Layer]  # that carry masks, by the names of their weights
    chain: list[tuple[str, nn.Module]]  # from the first of them on: the names of Linear ones' weights, "" elsewhere

    @property
    def most_rows(self) -> int:
        """How many rows go through the masked layers at a time."""
        widest = max(max(layer.outputs, layer.inputs) for layer in self.layers.values())
        return max(NUMBERS // (widest * self.method.predict_samples * self.method.max_rank), 1)

    def samples(self, models: Sequence[PersonalModel], x: Any, owners: Tensor) -> Tensor:
        """Probabilities (C, n, classes) of the rows x (n, ...), each under the masks of its owner (n,)."""
        trees: list[PersonalMask] = [model._tree for model in models]
        W, gates = trees[0].W, trees[0].gates
        h = masked_network(self.model, self.layers, gates).before(W, x)
        factors = side_by_side([self._drawn(model) for model in models])
        params = {name: p.detach() for name, p in self.model.named_parameters()} | W
        log_priors = torch.stack([tree.log_prior for tree in trees])[owners]
        logits = self._logits(params, factors, owners, h) + log_priors[:, None]
        return torch.softmax(logits, dim=-1).movedim(1, 0)

    def _drawn(self, model: PersonalModel) -> dict[str, Factors]:
        """The factors of a client's C masks, Q Lambda (C, r_k, outputs) and R (C, r_k, inputs), of every layer."""
        tree: PersonalMask = model._tree
        places, scales = masking.layout(self.layers, tree.gates), scales_of(self.method, tree.gates)
        draws = sample(tree.masks, masking.draw(tree.masks, self.method.predict_samples, model.noise()))
        parts = iter(draws.split(places.sizes, dim=1))
        found = {}
        for name, rank in places.ranks.items():
            Q, R = (next(parts).unflatten(1, (rank, -1)) for _ in ("Q", "R"))
            found[name] = Factors(Q=Q if scales is None else Q * scales[name][:, None], R=R)
        return found

    def _logits(self, params: Params, factors: dict[str, Factors], owners: Tensor, h: Tensor) -> Tensor:
        """(n, C, classes) of what came before the masks, h (n, ...)."""
        C = self.method.predict_samples
        h = h.unsqueeze(1).expand(-1, C, *h.shape[1:]).flatten(0, 1)  # (n C, ...)
        for name, layer in self.chain:
            if name in factors:
                Q, R = (_of_rows(factor, owners, h.dim()) for factor in factors[name])
                sums = (nnf.linear(h.unsqueeze(1) * R, params[name]) * Q).sum(dim=1)
                h = sums if layer.bias is None else sums + params[bias_of(name)]
            elif name:
                h = nnf.linear(h, params[name], params.get(bias_of(name)))
            else:
                h = layer(h)
        logits: Tensor = h.unflatten(0, (len(owners), C))
        return logits


def plan(model: PersonalModel) -> Plan | None:
    """The plan for this client and whoever shares its network; None where there is none.

    There is one if the network, from its first mask on, is a Sequential of Linear layers and torch's own layers without
    parameters. Under masks on convolutions a sum over ranks would cost more than it spares.
    """
    method, network = model.algorithm, model.task.model
    if type(method) is not LRBPFL or type(network) is not nn.Sequential:
        return None
    layers = maskable(network, method.mask_layers)
    _, after = parted(network, layers)
    children = list(after.named_children())
    chain = [(f"{name}.weight" if type(m) is nn.Linear else "", m) for name, m in children]
    own = {id(p) for p in after.parameters()}
    held = [id(p) for name, m in chain if name for p in m.parameters()]
    twice = type(after) is nn.Sequential and len(children) != len(after)
    known = all(name or type(m).__module__.startswith("torch.nn.") for name, m in chain)
    watched = any(m._forward_pre_hooks or m._forward_hooks for m in after.modules())
    fits = layers.keys() == model._tree.gates.keys() and layers.keys() <= {name for name, _ in chain}
    if not (fits and known) or twice or watched or sorted(held) != sorted(own):
        return None
    return Plan(method, network, layers, chain)


def side_by_side(drawn: Sequence[dict[str, Factors]]) -> dict[str, Factors]:
    """The factors of all clients, (clients, C, r, size); ranks that a client has closed are 0."""

    def stacked(factors: Sequence[Tensor]) -> Tensor:
        most = max(factor.shape[1] for factor in factors)
        return torch.stack([nnf.pad(factor, (0, 0, 0, most - factor.shape[1])) for factor in factors])

    return {
        name: Factors(Q=stacked([one[name].Q for one in drawn]), R=stacked([one[name].R for one in drawn]))
        for name in drawn[0]
    }


def _of_rows(factor: Tensor, owners: Tensor, dim: int) -> Tensor:
    """The factors of each row and sample, (n C, r, 1, ..., size), so that they multiply an h of this dimension."""
    rows = factor[owners].flatten(0, 1)
    return rows.reshape(*rows.shape[:2], *[1] * (dim - 2), rows.shape[-1])
