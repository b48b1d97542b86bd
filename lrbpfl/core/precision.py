"""In which precision networks learn: all float32, or convolutions and matrix products in bfloat16.

Only the network's own call in a learning step is rounded. Its parameters, what is made of them before (masks, draws),
its logits and all that follows (likelihoods, KL, gradients of parameters, optimisers) are float32, and a network that
is asked and not learning computes in float32 throughout.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor

from lrbpfl.core.inputs import Inputs, device_of
from lrbpfl.core.modes import is_learning

Precision = Literal["float32", "bf16"]

_PRECISION: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """Inside, networks learn in this precision."""
    before = _PRECISION.set(precision)
    try:
        yield
    finally:
        _PRECISION.reset(before)


def rounded(call: Callable[[Any, Inputs], Any]) -> Callable[[Any, Inputs], Any]:
    """The call of a network on parameters and inputs, in the precision in which networks learn where it is made."""

    @wraps(call)
    def either(params: Any, x: Inputs) -> Any:
        if not _rounds():
            return call(params, x)
        with torch.autocast(device_of(x).type, torch.bfloat16):
            return widened(call(params, x))

    return either


def widened(outputs: Any) -> Any:
    """A tensor that was rounded to bfloat16 as float32, anything else as it is."""
    rough = isinstance(outputs, Tensor) and outputs.dtype == torch.bfloat16 and _rounds()
    return outputs.float() if rough else outputs


def native_bf16() -> bool:
    """Whether this CPU multiplies in bfloat16 itself; where it does not, learning in it works, but may be slower."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _rounds() -> bool:
    return is_learning() and _PRECISION.get() == "bf16"
