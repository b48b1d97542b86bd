"""Whether a network learns or is asked: dropout is on in the steps of the gradient loop and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

_LEARNING = ContextVar("learning", default=False)
MODAL = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.RReLU)


@contextmanager
def learning() -> Iterator[None]:
    """Inside, networks are called in training mode."""
    before = _LEARNING.set(True)
    try:
        yield
    finally:
        _LEARNING.reset(before)


def is_learning() -> bool:
    """Whether networks learn here."""
    return _LEARNING.get()


def modal(model: nn.Module) -> bool:
    """Whether the model may compute something else in training mode: layers that do, and any that torch did not write.

    Whoever reads `self.training` in a forward or a hook of their own is not found in another way.
    """
    return any(
        isinstance(m, MODAL)
        or m._forward_pre_hooks
        or m._forward_hooks
        or not type(m).__module__.startswith("torch.nn.")
        for m in model.modules()
    )


@contextmanager
def right_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in training mode if it learns, and in evaluation mode if not; afterwards as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.train(is_learning())
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's own generators, from which dropout draws, start at this seed; then they are as they were."""
    if device.type == "cpu":  # torch.manual_seed would ask for other devices, which takes longer
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.manual_seed(seed)
            yield


def rolls_dice(call: Callable[[], object], device: torch.device) -> bool:
    """Whether a call draws from torch's own generators; they stay as they were."""

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    with seeded(0, device):
        before = states()
        call()
        return not all(map(torch.equal, before, states()))
