"""A client of LR-BPFL at work: W under its masks, and the steps on either."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Task, log_label_prior
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data, Rate, Slope, batches, descend, descent
from lrbpfl.core.gaussian import Prior, draws_and_kl, gaussian, prior, sample, slopes
from lrbpfl.core.inputs import Inputs, pieces
from lrbpfl.core.masks import Gates, Masks, Scales
from lrbpfl.core.modes import learning, rolls_dice
from lrbpfl.core.network import Params, maskable
from lrbpfl.core.objective import MaskedNetwork, free_energy, masked_network, nll
from lrbpfl.rng import generator

if TYPE_CHECKING:
    from lrbpfl.algorithms.lr_bpfl import LRBPFL

CHUNK = 500  # examples at a time, where all of them go through the network


class MaskedClient(NamedTuple):
    """What stays as it is while a client computes."""

    method: "LRBPFL"
    task: Task
    gates: Gates  # gamma_k as they arrive
    data: Data
    network: MaskedNetwork
    prior: Prior  # of all factors, (n,)
    log_prior: Tensor  # (classes,)

    @classmethod
    def of(cls, method: "LRBPFL", task: Task, gates: Gates, data: Data) -> "MaskedClient":
        """A client with these gates and training data."""
        network = masked_network(task.model, maskable(task.model, method.mask_layers), gates)
        mean = masking.prior_mean(network.places).to(data.y.device)
        fixed = prior(gaussian(mean, math.sqrt(method.prior_variance)))
        return cls(method, task, gates, data, network, fixed, log_label_prior(task, data.y))

    def fresh_masks(self, seed: Tensor) -> Masks:
        """The client's own first draw: a rank begins in the same place whenever W arrives."""
        spread, std = self.method.init_spread, self.method.init_std
        masks = masking.init(self.network.places, spread=spread, std=std, rng=generator(int(seed), "mask"))
        return Masks(*(part.to(self.prior.mean) for part in masks))

    def path(
        self, W: Params, start: Masks, at: set[int], rng: Generator, *, gates_rest: bool = False
    ) -> dict[int, tuple[Masks, Gates]]:
        """Masks and gates after so many steps on the free energy with W fixed: one way serves all numbers of steps."""
        moving = self.method.ranks == "printed" and not gates_rest
        by_hand = self._one_draw()

        def energy(masks: Masks, *rest: Any) -> Tensor | Slope:
            *gates, batch = rest
            if by_hand:
                return self.mask_slope(W, masks, batch.x, batch.y, rng)
            return self.free_energy(W, masks, gates[0] if moving else self.gates, batch.x, batch.y, rng)

        groups = (start, self.gates) if moving else (start,)
        steps = self._batches_before(W, max(at), rng)
        found: dict[int, tuple[Masks, Gates]] = {}
        for step, (reached, _) in enumerate(descent(energy, groups, steps, self._rates()[: len(groups)])):
            if step in at:
                masks, *gates = trees.tree_map(lambda leaf: leaf.detach().clone(), reached)
                found[step] = masks, gates[0] if moving else self.gates
        return found

    def trained(self, W: Params, masks: Masks, gates: Gates, rng: Generator) -> tuple[Params, float]:
        """W and its mean loss after steps under the adapted mask; the KL and the penalty do not depend on W."""
        scales, before = scales_of(self.method, gates), self.network.before
        by_hand = self._one_draw() and self.network.whole(W)

        def loss(W: Params, batch: Data) -> Tensor | Slope:
            h = before(W, batch.x)
            if by_hand:
                return self.weight_slope(W, masks, h, batch.y, rng)
            return self.nll(W, masks, scales, h, batch.y, rng)

        steps = batches(self.data, self.method.batch_size, self.method.model_steps, rng)
        (W,), mean = descend(loss, (W,), steps, self._rates()[2:])
        return W, mean

    def joint(self, W: Params, start: Masks, rng: Generator) -> tuple[Params, Gates, float]:
        """The ablation: T_L steps on (phi, psi, gamma) and W together."""

        def energy(masks: Masks, gates: Gates, W: Params, batch: Data) -> Tensor:
            return self.free_energy(W, masks, gates, self.network.before(W, batch.x), batch.y, rng)

        steps = batches(self.data, self.method.batch_size, self.method.mask_steps, rng)
        (_, gates, W), loss = descend(energy, (start, self.gates, W), steps, self._rates())
        return W, gates, loss

    def nll(self, W: Params, masks: Masks, scales: Scales | None, h: Inputs, y: Tensor, rng: Generator) -> Tensor:
        """-E_q[log p(batch | W o M)] per example, by C sampled masks, from what comes before them."""
        draws = sample(masks, masking.draw(masks, self.method.samples, rng))
        return self._nll_under(W, draws, scales, h, y)

    def free_energy(self, W: Params, masks: Masks, gates: Gates, h: Inputs, y: Tensor, rng: Generator) -> Tensor:
        """F_k(W, phi_k, psi_k, lambda_k) per example, on one batch.  Eq. (8)"""
        method, num_data = self.method, len(self.data.y)
        if method.temperature:
            draws, kl = draws_and_kl(masks, masking.draw(masks, method.samples, rng), p=self.prior)
            F = self._nll_under(W, torch.stack(draws), scales_of(method, gates), h, y)
            F = free_energy(F, kl, temperature=method.temperature, num_data=num_data)
        else:
            F = self.nll(W, masks, scales_of(method, gates), h, y, rng)
        if method.ranks == "printed":
            F = F + method.gate_penalty / num_data * torch.stack([*map(gating.penalty, gates.values())]).sum()
        return F

    @torch.no_grad()
    def mask_slope(self, W: Params, masks: Masks, h: Inputs, y: Tensor, rng: Generator) -> Slope:
        """`free_energy` under one draw where gates do not train: its likelihood, and the gradient of all of it."""
        noise = masking.draw(masks, 1, rng)[0]
        value, by_draw = self.network.by_draw(W, sample(masks, noise), h, y, self.log_prior)
        weight = self.method.temperature / len(self.data.y)
        return Slope(value, slopes(masks, noise, by_draw, p=self.prior, weight=weight))

    @torch.no_grad()
    def weight_slope(self, W: Params, masks: Masks, h: Inputs, y: Tensor, rng: Generator) -> Slope:
        """`nll` under one draw where gates do not train, and its gradient in W."""
        drawn = sample(masks, masking.draw(masks, 1, rng)[0])
        value, by_W = self.network.by_weights(W, drawn, h, y, self.log_prior)
        return Slope(value, by_W.values())

    def _nll_under(self, W: Params, draws: Tensor, scales: Scales | None, h: Inputs, y: Tensor) -> Tensor:
        return nll(self.network.logits(W, draws, h, scales) + self.log_prior, y)

    def _one_draw(self) -> bool:
        """Whether a step takes one mask, of gates that are open or closed: its gradients are then written down."""
        return self.method.ranks != "printed" and self.method.samples == 1

    def _rates(self) -> tuple[Rate, Rate, Rate]:
        """Of (phi, psi), of gamma and of W."""
        method = self.method
        return (
            Rate(method.mask_optimiser, method.mask_lr, growth=method.mask_growth),
            Rate("sgd", method.gate_lr if method.ranks == "printed" else 0.0),
            Rate(method.model_optimiser, method.model_lr * self.task.pace),
        )

    def _batches_before(self, W: Params, steps: int, rng: Generator) -> Iterator[Data]:
        """Batches of what comes before the masks, which no mask changes: computed once if all of it will be seen."""
        (x, y), size = self.data, self.method.batch_size

        @torch.no_grad()
        def before(x: Inputs) -> Any:
            with learning():
                return self.network.before(W, x)

        if isinstance(x, Tensor) and len(y) <= steps * size:
            parts: list[Any] = []
            noisy = rolls_dice(lambda: parts.extend(before(piece) for piece in pieces(x, CHUNK)), y.device)
            if not noisy and all(isinstance(part, Tensor) for part in parts):  # dropout is new in every step
                return batches(Data(torch.cat(parts), y), size, steps, rng)
        return (Data(before(batch.x), batch.y) for batch in batches(self.data, size, steps, rng))


def scales_of(method: "LRBPFL", gates: Gates) -> Scales | None:
    """Lambda of the open ranks where it is trained; elsewhere a gate is open or closed."""
    if method.ranks != "printed":
        return None
    return {name: gating.gate_values(gamma)[gating.is_open(gamma)] for name, gamma in gates.items()}
