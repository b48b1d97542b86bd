"""A network without batch statistics, made from one with them."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lrbpfl.errors import BadInput

GROUPS = (32, 16, 8, 4, 2, 1)
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ScaleShift(nn.Module):
    """weight * x + bias, a number of each for every channel: what is left of a BatchNorm that has seen its data."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same."""
        shape = (-1, *(1,) * (x.dim() - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


def without_batchnorm(model: nn.Module, fold: bool = False) -> nn.Module:
    """A copy of the model with a GroupNorm in place of every BatchNorm; scales and shifts are kept if there are any.

    It has the largest number of groups out of 32, 16, 8, 4, 2 and 1 that divides the channels. With `fold`, for a
    pretrained network: a fixed scale and shift of each channel instead, from the running statistics, so that the copy
    gives what the model gives in evaluation mode; they are parameters, frozen if those of the BatchNorm are.
    """
    for name, module in model.named_modules():
        _refuse(module, f"layer {name or 'model'!r} ({type(module).__name__})", fold)
    changed = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}  # a layer that stands in two places is replaced by one
    for name, module in list(changed.named_modules(remove_duplicate=False)):
        if isinstance(module, _BatchNorm):
            if module not in made:
                made[module] = (_folded(module) if fold else _grouped(module)).train(module.training)
            if not name:
                return made[module]
            above, _, own = name.rpartition(".")
            setattr(changed.get_submodule(above), own, made[module])
    return changed


def _refuse(module: nn.Module, where: str, fold: bool) -> None:
    """Refuse a layer that cannot be copied, or not be replaced."""
    held = (*module._parameters.values(), *module._buffers.values())
    if any(is_lazy(part) for part in held if part is not None):
        raise BadInput(f"{where} does not know its shape yet: call the model once on a batch of inputs")
    if isinstance(module, _BatchNorm) and not isinstance(module, PLAIN):
        raise BadInput(f"{where} cannot be replaced: only BatchNorm1d, BatchNorm2d and BatchNorm3d can")
    if fold and isinstance(module, _BatchNorm) and module.running_mean is None:
        raise BadInput(f"{where} has no running statistics that could be folded: replace it with fold=False")


def _grouped(norm: _BatchNorm) -> nn.Module:
    channels = norm.num_features
    groups = next(count for count in GROUPS if channels % count == 0)
    made = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made


@torch.no_grad()
def _folded(norm: _BatchNorm) -> nn.Module:
    """(x - mean) / sqrt(variance + eps) * weight + bias as one scale and one shift, rounded at the end only."""
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None and variance is not None
    scale = (variance.double() + norm.eps).rsqrt() * (norm.weight.double() if norm.affine else 1.0)
    shift = (norm.bias.double() if norm.affine else 0.0) - mean.double() * scale
    made = ScaleShift(scale.to(mean), shift.to(mean))
    for name, p in made.named_parameters():
        own = getattr(norm, name)
        p.requires_grad_(own is not None and own.requires_grad)
    return made
