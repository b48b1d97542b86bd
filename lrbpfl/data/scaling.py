"""Features on one scale: the mean and the spread of each, from one client's data or from all clients' sums.

Sums are all that need travel for everybody to have the scaling of data that nobody has seen together.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lrbpfl.errors import BadInput

# A spread of so small a part of the mean is rounding, and float32 holds nothing below it: the feature is constant.
ROUNDING = 1e-6
AT_ONCE = 4096  # examples in double precision: twice the memory of them all would be much


class Scaling(NamedTuple):
    """The mean and the standard deviation of each feature, (*input) float32; 1 for constant features."""

    mean: Tensor
    std: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Inputs (n, *input) with mean 0 and spread 1, as far as they are like those that this was fitted on."""
        return (x.float() - self.mean) / self.std


class Sums(NamedTuple):
    """What one client says about its inputs: how many, their sums and their sums of squares, (*input) float64."""

    n: int
    total: Tensor
    squares: Tensor


def sums(x: Tensor) -> Sums:
    """The sums of inputs (n, *input)."""
    if not x.is_floating_point():
        raise BadInput(f"inputs of type {x.dtype} cannot be standardised: only floating-point features can")
    total = squares = torch.zeros(x.shape[1:], dtype=torch.float64)
    for some in x.split(AT_ONCE):
        wide = some.double()
        total, squares = total + wide.sum(0), squares + wide.square().sum(0)
    return Sums(n=len(x), total=total, squares=squares)


def pooled(parts: Iterable[Sums]) -> Scaling:
    """The scaling of all clients' inputs together."""
    parts = list(parts)
    n = sum(part.n for part in parts)
    if not n:
        raise BadInput("nothing can be standardised by no examples: give at least one client with some")
    mean = torch.stack([part.total for part in parts]).sum(0) / n
    variance = torch.stack([part.squares for part in parts]).sum(0) / n - mean.square()
    std = variance.clamp(min=0).sqrt()
    std = torch.where(std > ROUNDING * mean.abs(), std, torch.ones_like(std)).float()
    return Scaling(mean=mean.float(), std=torch.where(std > 0, std, torch.ones_like(std)))


def fit(x: Tensor) -> Scaling:
    """The scaling of inputs (n, *input)."""
    return pooled([sums(x)])
