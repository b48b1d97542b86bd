"""What is refused before anything trains, in a sentence that names it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm

from lrbpfl import trees
from lrbpfl.core.inputs import Inputs, describe, device_of, length
from lrbpfl.core.modes import learning, rolls_dice, seeded
from lrbpfl.core.network import caller, maskable, trainable
from lrbpfl.core.precision import Precision, computing
from lrbpfl.errors import BadInput


def check_model(model: nn.Module) -> None:
    """Refuse what would break a promise in silence: batch statistics and noise that no seed reaches."""
    for name, module in model.named_modules():
        where = f"layer {name or 'model'!r} ({type(module).__name__})"
        if any(is_lazy(p) for p in module._parameters.values()):
            raise BadInput(f"{where} does not know its shape yet: call the model once on a batch of inputs")
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
            raise BadInput(
                f"{where} uses statistics of its batches, so its outputs would depend on who is in a batch: "
                "replace it by nn.GroupNorm or nn.LayerNorm, as lrbpfl.without_batchnorm(model) does "
                "(of a pretrained model: fold=True)"
            )
        if isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d | _SpectralNorm):
            raise BadInput(f"{where} changes from call to call in a way that does not follow the seed: replace it")
    if not maskable(model):
        raise BadInput("the model has no Linear or Conv, attention or recurrent layer that could take a mask")
    if not trainable(model):
        raise BadInput("the model has nothing to train: all of its parameters are frozen (requires_grad=False)")


@torch.no_grad()
def check_call(model: nn.Module, x: Inputs, num_classes: int) -> None:
    """Refuse a model that cannot be called on these inputs, or does not give one number for each class."""
    told = f"the model, called on {length(x)} inputs {describe(x)},"
    try:
        logits = caller(model)(trainable(model), x)
    except BadInput:
        raise
    except Exception as error:  # whatever a model raises is what its owner wants to know
        raise BadInput(f"{told} fails with {type(error).__name__}: {_line(error)}{_advice(x)}") from error
    if logits.dim() != 2 or len(logits) != length(x) or not logits.is_floating_point():
        found = f"{tuple(logits.shape)} {str(logits.dtype).removeprefix('torch.')}"
        raise BadInput(f"{told} returns {found}: it should return floating-point logits ({length(x)}, {num_classes})")
    if logits.shape[1] != num_classes:
        raise BadInput(f"{told} gives {logits.shape[1]} outputs for {num_classes} classes")


@torch.no_grad()
def check_noise(model: nn.Module, x: Inputs) -> None:
    """Refuse a model whose noise no seed reaches: outside training it must give the same again and again.

    In training it may draw from torch's own generator, but from nothing else, and it must leave its buffers alone.
    """
    call, params = caller(model), trainable(model)

    def outputs(seed: int) -> Tensor:
        with seeded(seed, device_of(x)):
            return call(params, x)

    with _buffers_kept(model, "is called"):
        first = outputs(0)
    noisy = rolls_dice(lambda: call(params, x), device_of(x))
    seeds = range(1, 10 if noisy else 2)  # two draws alone may agree by chance
    if not all(_close(outputs(seed), first) for seed in seeds):
        raise BadInput(
            "the model gives other outputs for the same inputs from call to call, although it is not training: "
            "give its dropout training=self.training, or take its noise out"
        )
    with learning():
        with _buffers_kept(model, "trains"):
            first = outputs(0)
        if not _close(outputs(0), first):
            raise BadInput("the model has noise in training that does not follow torch's seed: take it out")


def check_precision(model: nn.Module, x: Inputs, num_classes: int, precision: Precision) -> None:
    """Refuse a model that cannot learn in this precision, there or on the way back."""
    try:
        with computing(precision):
            with learning(), seeded(0, device_of(x)):
                check_call(model, x, num_classes)
            check_gradients(model, x)
    except BadInput as error:
        raise BadInput(f"with precision {precision!r}, {error}") from error


def check_gradients(model: nn.Module, x: Inputs) -> None:
    """Refuse a model that no gradient passes, or that computes again on the way back, with other weights than given."""
    params = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in model.named_parameters()}
    again: list[str] = []
    failed: RuntimeError | None = None
    with learning(), torch.enable_grad(), seeded(0, device_of(x)):
        logits = caller(model)(params, x)
        if not logits.requires_grad:
            raise BadInput("the model passes no gradients to its parameters: no_grad or detach stands in the way")
        with register_module_forward_pre_hook(lambda module, args: again.append(type(module).__name__)):
            try:
                torch.autograd.grad(logits.sum(), list(params.values()), allow_unused=True)
            except RuntimeError as error:
                failed = error
    if again:
        raise BadInput(
            f"the model computes parts of itself ({again[0]}) again on the way back, where it has other weights than "
            "those it was given: switch gradient checkpointing off"
        )
    if failed:
        raise BadInput(f"the model fails on the way back with {type(failed).__name__}: {_line(failed)}") from failed


@contextmanager
def _buffers_kept(model: nn.Module, what: str) -> Iterator[None]:
    """Refuse a model whose buffers change inside; they are put back."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    yield
    after = dict(model.named_buffers())
    changed = [name for name, (_, value) in before.items() if not trees.equal(after.get(name), value)]
    for name, (buffer, value) in before.items():
        layer, _, own = name.rpartition(".")
        model.get_submodule(layer)._buffers[own] = buffer.copy_(value)
    if changed:
        raise BadInput(
            f"the model changes its buffer {changed[0]!r} when it {what}, and buffers do not travel: "
            "replace the layer that holds it"
        )


def _close(one: Tensor, other: Tensor) -> bool:
    """The same but for rounding."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _advice(x: Inputs) -> str:
    if any(part.dim() == 4 and part.shape[1] > 4 and part.shape[3] in (1, 3, 4) for part in trees.leaves(x)):
        return " (images come as (n, channels, height, width): NumPy's x.transpose(0, 3, 1, 2) turns them)"
    double = any(part.dtype == torch.float64 for part in trees.leaves(x))
    return " (float64 inputs need a float64 model: convert them to float32, as x.float() does)" if double else ""
