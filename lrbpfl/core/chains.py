"""What can be done with a chain of dense layers and not with any network.

Masks without a matrix for each of them: (W o Q R^T) x = sum_i q_i o W (r_i o x). For a few rows under many masks this
takes W once for all of them, where a loop makes and multiplies a mask of W's size each time. And gradients that are
written down: of a small network, torch spends more time in recording a step than in computing it.
"""

from collections.abc import Callable, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core.network import Params, bias_of

# What layers without parameters pass back, by what they gave out.
BACK: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda by, out: by * out.sign(),
    nn.Tanh: lambda by, out: by * (1 - out.square()),
    nn.Identity: lambda by, out: by,
}
FEW = 48  # rows times ranks; with more, masks of W's size are cheaper


class Chain(NamedTuple):
    """The layers of a plain Sequential in turn: the names of Linear ones' weights ("" elsewhere), and the modules."""

    layers: list[tuple[str, nn.Module]]
    names: frozenset[str]  # of all parameters

    @classmethod
    def of(cls, model: nn.Module) -> "Chain | None":
        """None of a model that is more than Linear layers and layers without parameters, or that shares parameters."""
        children = list(model.named_children())
        if type(model) is not nn.Sequential or len(children) != len(model):
            return None
        own = dict(model.named_parameters())
        layers = [(f"{name}.weight" if type(m) is nn.Linear else "", m) for name, m in children]
        held = [p for _, m in children if type(m) is nn.Linear for p in m.parameters()]
        return cls(layers, frozenset(own)) if len(held) == len(own) == len({id(p) for p in held}) else None

    def suits(self, W: Params, h: Tensor, rank: int) -> bool:
        """Whether W is all there is and this is the cheaper way, by the number of rows; hooks want every pass.

        What is exported has any number of rows, and one way for all of them.
        """
        return not torch.compiler.is_compiling() and len(h) * rank <= FEW and self._holds(W, h)

    def goes_back(self, W: Params, h: Tensor) -> bool:
        """Whether W is all there is and `slopes` know the way back through every layer, a Linear one at its front."""
        known = all(name or type(layer) in BACK for name, layer in self.layers)
        return known and bool(self.layers[0][0]) and self._holds(W, h)

    def _holds(self, W: Params, h: Tensor) -> bool:
        watched = any(m._forward_pre_hooks or m._forward_hooks for _, m in self.layers)
        return h.dim() == 2 and h.is_floating_point() and not watched and self.names <= W.keys()

    def logits(self, W: Params, Q: dict[str, Tensor], R: dict[str, Tensor], h: Tensor) -> Tensor:
        """Outputs (samples, batch, classes) from factors (samples, ranks, size) by the names of masked weights."""
        samples = len(next(iter(Q.values())))
        h = h.expand(samples, *h.shape).flatten(0, 1)
        for name, layer in self.layers:
            if name in Q:
                rows = h.reshape(samples, 1, -1, h.shape[-1]) * R[name][:, :, None]
                sums = (nnf.linear(rows, W[name]) * Q[name][:, :, None]).sum(dim=1).reshape(*h.shape[:-1], -1)
                h = sums + W[bias_of(name)] if bias_of(name) in W else sums
            elif name:
                h = nnf.linear(h, W[name], W.get(bias_of(name)))
            else:
                h = layer(h)
        return h.reshape(samples, -1, *h.shape[1:])

    def slopes(self, W: Params, h: Tensor, y: Tensor, log_prior: Tensor, wanted: Set[str]) -> tuple[Tensor, Params]:
        """The negative log-likelihood per example, and its gradients in the wanted parameters; call it with no_grad."""
        taken = []  # what each layer takes in
        for name, layer in self.layers:
            taken.append(h)
            h = nnf.linear(h, W[name], W.get(bias_of(name))) if name else layer(h)
        log_p = torch.log_softmax(h + log_prior, dim=1)
        by = log_p.exp().scatter_add_(1, y[:, None], log_p.new_full((len(y), 1), -1.0)).mul_(1 / len(y))
        found = {}
        for (name, layer), x, out in reversed([*zip(self.layers, taken, [*taken[1:], h], strict=True)]):
            if name in wanted:
                found[name] = by.T @ x
            if name and bias_of(name) in wanted:
                found[bias_of(name)] = by.sum(dim=0)
            if x is not taken[0]:
                by = by @ W[name] if name else BACK[type(layer)](by, out)
        return nnf.nll_loss(log_p, y), found
