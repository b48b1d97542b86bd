"""The one gradient loop of the package."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.trees import Tree

OptimiserName = Literal["sgd", "momentum", "adam"]  # plain SGD, SGD with momentum 0.9, Adam


class Data(NamedTuple):
    """Labelled examples: x (n, *input) as float or uint8 images, y (n,) as int64."""

    x: Tensor
    y: Tensor


class Rate(NamedTuple):
    """How one group of parameters moves: the optimiser's name and its learning rate."""

    optimiser: OptimiserName
    lr: float


def batches(data: Data, batch_size: int, steps: int, rng: Generator) -> Iterator[Data]:
    """`steps` mini-batches: the data in a fresh random order again and again, cut into equal pieces of at most n."""
    n = len(data.y)
    size = min(batch_size, n)
    passes = -(-steps * size // n)
    order = torch.cat([torch.randperm(n, generator=rng) for _ in range(max(passes, 1))])
    for step in range(steps):
        chosen = order[step * size : (step + 1) * size].to(data.y.device)
        yield Data(x=data.x[chosen], y=data.y[chosen])


def descend(
    F: Callable[..., Tensor], groups: tuple[Tree, ...], data: Iterable[Data], rates: tuple[Rate, ...]
) -> tuple[tuple[Tree, ...], float]:
    """One gradient step of F(*groups, batch) per batch on all groups, each at its own rate.

    Returns the new groups and the mean of F over the steps (nan without a step). The arguments stay as they are.
    """
    groups = trees.tree_map(lambda p: p.detach().clone().requires_grad_(), groups)
    optimisers = [_optimiser(trees.leaves(group), rate) for group, rate in zip(groups, rates, strict=True)]
    losses = []
    for batch in data:
        loss = F(*groups, batch)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        losses.append(loss.item())
    mean = sum(losses) / len(losses) if losses else float("nan")
    return trees.tree_map(lambda p: p.detach(), groups), mean


def _optimiser(parameters: list[Tensor], rate: Rate) -> torch.optim.Optimizer:
    if rate.optimiser == "adam":
        return torch.optim.Adam(parameters, lr=rate.lr, fused=True)
    return torch.optim.SGD(parameters, lr=rate.lr, momentum=0.9 if rate.optimiser == "momentum" else 0.0, fused=True)
