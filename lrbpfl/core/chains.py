"""Masks on a chain of dense layers without a matrix for each of them: (W o Q R^T) x = sum_i q_i o W (r_i o x).

For a few rows under many masks this takes W once for all of them, where a loop makes and multiplies a mask of W's size
each time.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core.network import Params, bias_of

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
        if torch.compiler.is_compiling():
            return False
        watched = any(m._forward_pre_hooks or m._forward_hooks for _, m in self.layers)
        return (
            h.dim() == 2 and h.is_floating_point() and len(h) * rank <= FEW and not watched and self.names <= W.keys()
        )

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
