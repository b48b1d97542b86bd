"""The one gradient loop of the package."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from lrbpfl import trees
from lrbpfl.core.inputs import take
from lrbpfl.core.modes import learning
from lrbpfl.trees import Tree

OptimiserName = Literal["sgd", "momentum", "adam"]  # plain SGD, SGD with momentum 0.9, Adam
Schedule = Literal["constant", "cosine"]  # of rates over the rounds


class Data(NamedTuple):
    """Labelled examples: x (n, *input), or several such inputs, y (n,) as int64."""

    x: Any  # Inputs; to spell them out would have every reader of images ask which of three kinds it got
    y: Tensor


class Rate(NamedTuple):
    """How one group of parameters moves: the optimiser's name, its learning rate, its weight decay, its growth."""

    optimiser: OptimiserName
    lr: float
    decay: float = 0.0  # decay * parameter joins its gradient
    growth: float = 0.0  # by which share of itself the rate grows with every step


class Slope(NamedTuple):
    """What an objective may return in place of its value: a number to report, and gradients that it wrote down."""

    value: Tensor
    gradients: Iterable[Tensor]  # one for each leaf of all groups, in their order


def pace(schedule: Schedule, t: int, rounds: int) -> float:
    """What multiplies the rates in round t of so many: 1, or half a cosine from 1 at the start to 0 after the last."""
    return 1.0 if schedule == "constant" else (1 + math.cos(math.pi * t / rounds)) / 2


def batches(data: Data, batch_size: int, steps: int, rng: Generator) -> Iterator[Data]:
    """`steps` mini-batches: the data in a fresh random order again and again, cut into equal pieces of at most n."""
    n = len(data.y)
    size = min(batch_size, n)
    passes = -(-steps * size // n)
    order = torch.cat([torch.randperm(n, generator=rng) for _ in range(max(passes, 1))])
    for chosen in order[: steps * size].to(data.y.device).split(size)[:steps]:
        yield Data(x=take(data.x, chosen), y=data.y[chosen])


def descend(
    F: Callable[..., Tensor | Slope],
    groups: tuple[Tree, ...],
    data: Iterable[Any],
    rates: tuple[Rate, ...],
    clip: float = math.inf,
) -> tuple[tuple[Tree, ...], float]:
    """One gradient step of F(*groups, batch) per batch on all groups, each at its own rate.

    A gradient of all groups together that is longer than `clip` is shortened to it; a group that F left out rests.

    Returns the new groups and the mean of F over the steps (nan without a step). The arguments stay as they are.
    """
    points = list(descent(F, groups, data, rates, clip))  # the same tensors each time: they move in place
    losses = [loss for _, loss in points[1:]]
    mean = sum(losses) / len(losses) if losses else float("nan")
    return trees.tree_map(lambda p: p.detach(), points[-1][0]), mean


def descent(
    F: Callable[..., Tensor | Slope],
    groups: tuple[Tree, ...],
    data: Iterable[Any],
    rates: tuple[Rate, ...],
    clip: float = math.inf,
) -> Iterator[tuple[tuple[Tree, ...], float]]:
    """Where `descend` comes by: the groups at the start (nan) and after every step, with F before the step.

    The tensors move on in place: who wants to keep a point copies it.
    """
    groups = trees.tree_map(lambda p: p.detach().clone().requires_grad_(), groups)
    optimisers = [_Optimiser(trees.leaves(group), rate) for group, rate in zip(groups, rates, strict=True)]
    leaves = trees.leaves(groups)
    yield groups, float("nan")
    for step, batch in enumerate(data):
        with learning():
            loss = F(*groups, batch)
            if isinstance(loss, Slope):
                for leaf, gradient in zip(leaves, loss.gradients, strict=True):
                    leaf.grad = gradient
                loss = loss.value
            else:
                loss.backward()
        if clip < math.inf:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        for optimiser, rate in zip(optimisers, rates, strict=True):
            optimiser.step(rate.lr * (1 + rate.growth * step))
        for leaf in leaves:
            leaf.grad = None
        yield groups, loss.item()


class _Optimiser:
    """Torch's fused steps without torch's objects around them, which take longer than a small network's step does."""

    def __init__(self, leaves: list[Tensor], rate: Rate) -> None:
        self.leaves, self.rate = leaves, rate
        moments = {"sgd": 0, "momentum": 1, "adam": 2}[rate.optimiser]
        self.moments = [[torch.zeros_like(leaf) for leaf in leaves] for _ in range(moments)]
        self.counts = [torch.zeros((), device=leaf.device) for leaf in leaves]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move all leaves that have a gradient."""
        moved = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        leaves, *moments, counts = ([part[i] for i in moved] for part in (self.leaves, *self.moments, self.counts))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        how: dict[str, Any] = {"lr": lr, "weight_decay": self.rate.decay, "maximize": False, "fused": True}
        if self.rate.optimiser == "adam":
            means, squares = moments
            adam(leaves, gradients, means, squares, [], counts, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, **how)
        else:
            buffers: list[Tensor | None] = [*moments[0]] if moments else [None] * len(leaves)
            sgd(leaves, gradients, buffers, momentum=0.9 if moments else 0.0, dampening=0.0, nesterov=False, **how)
