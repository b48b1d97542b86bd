"""What a client's code may do, and what becomes of it: one rule for every engine.

It works on copies, may raise what it likes, and leaves behind plain tensors and plain numbers, or a sentence.
"""

import random
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Info, Task
from lrbpfl.errors import BadInput, plain
from lrbpfl.trees import Tree

T = TypeVar("T")

DATA, MODEL = 2**25, 2**30  # bytes up to which a client's data, and the model, are copied; of more, data are watched
GLANCE = 2**14  # numbers of each tensor that are looked at where data are watched
TOLD, NAMED = 200, 100  # characters at most of what an exception says, and of a name in an info

_NUMBER = r"(?:[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan|inf|True|False)"
_DATA = re.compile(rf"\b(?:tensor|array)\([^)]*\)?|(?<![\w.]){_NUMBER}(?:[\s,;()\[\]]+{_NUMBER}){{6,}}")


def told(error: BaseException) -> str:
    """What a client's code raised, as replies, records and the screen tell it: the type, and a line of its text.

    Of the text, 200 characters at most, without tensors, arrays and long rows of numbers. What else the client's code
    writes there, a single value or a name, is told: whoever writes an exception's text decides what is in it.
    """
    try:
        said = _DATA.sub("...", str(error)[: 10 * TOLD])
    except BaseException:  # an exception that cannot even say what it is
        said = ""
    kind = plain(type(error).__name__, NAMED)
    return f"{kind}: {plain(said, TOLD)}" if said.strip() else kind


def attempt(call: Callable[[], T]) -> T | str:
    """What the call of a client's code returns, or what it raised, whatever that is: it ends no run.

    What the handler of a signal raises meanwhile, such as Ctrl-C, is its sender's and not the client's: it goes on.
    """
    with _signals_noted() as raised:
        try:
            result: T | str = call()
        except BaseException as error:  # SystemExit, KeyboardInterrupt and GeneratorExit too
            result = told(error)
        if raised:  # even if the client's code made something else of it
            raise raised[0]
    return result


@contextmanager
def _signals_noted() -> Iterator[list[BaseException]]:
    """Inside, what this process's own handlers of signals raise is noted; afterwards they are as they were."""
    raised: list[BaseException] = []

    def noting(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                raised.append(error)
                raise

        return handle

    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():  # no handler ever runs in another one
        known = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in known.items() if callable(handler)}
    try:
        for number, handler in handlers.items():
            signal.signal(number, noting(handler))
        yield raised
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def numbers(info: Mapping[str, Any]) -> Info:
    """A client's info as plain floats; what is no number, or too large for a float, is NaN: a gap in the record."""
    if not isinstance(info, Mapping):
        raise BadInput(f"its info is of type {type(info).__name__}, not a dict")
    return {plain(name, NAMED): _number(value) for name, value in info.items()}


def _number(value: Any) -> float:
    try:
        value = value.item() if isinstance(value, Tensor | np.ndarray | np.generic) else value
        return float("nan") if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:
        return float("nan")


def taken(tree: Tree, what: str) -> Tree:
    """What a client left behind, as copies on the CPU that hang on nothing: no gradients, views or subclasses."""
    for name, leaf in trees.named_leaves(tree):
        if not isinstance(leaf, Tensor):
            raise BadInput(f"{what} holds {name or 'a leaf'} of type {type(leaf).__name__}, not a tensor")
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
            raise BadInput(f"{what} holds {name or 'a tensor'}, which is sparse, quantised or nested: give a dense one")
    return lent(tree, "cpu")


def lent(tree: Tree, device: str) -> Tree:
    """A copy on a device, in one memory layout: layout, too, can decide the last bit."""

    def copy(leaf: Tensor) -> Tensor:
        plain_leaf = leaf.detach().as_subclass(Tensor)
        return plain_leaf.to(device, copy=True, memory_format=torch.contiguous_format)

    return trees.tree_map(copy, tree)


@contextmanager
def lent_data(data: Tree, device: str) -> Iterator[Tree]:
    """A client's data to work on: a copy or, as copying many of them takes long, themselves, if nothing changes them.

    Changes by torch are all seen, and those behind its back, by NumPy or `.data`, unless they are of few numbers.
    """
    if trees.nbytes(data) <= DATA:
        yield lent(data, device)
        return
    before = _glance(data)
    yield trees.tree_map(lambda leaf: leaf.to(device).contiguous(), data)
    if not trees.equal(before, _glance(data)):
        raise BadInput(f"its data were changed in place, of which it got no copy, as they are above {DATA} bytes")


def _glance(data: Tree) -> Tree:
    """How often torch changed each tensor, and some of its numbers."""

    def look(leaf: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor(leaf._version), leaf.flatten()[:: max(1, leaf.numel() // GLANCE)].clone()

    return trees.tree_map(look, data)


def lent_task(task: Task) -> Task:
    """The task with a copy of its public inputs, which are for the server."""
    if task.public is None or trees.nbytes(task.public) > DATA:
        return task
    return task._replace(public=trees.tree_map(torch.clone, task.public))


@contextmanager
def unharmed(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's tensors (up to a gigabyte), and how torch computes in this process, are as they were."""
    threads, dtype, learns = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    tensors = [*model.parameters(), *model.buffers()]
    wanted = [leaf.requires_grad for leaf in tensors]
    before = [leaf.detach().clone() for leaf in tensors] if trees.nbytes(tuple(tensors)) <= MODEL else []
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(learns)
        for leaf, old in zip(tensors, before, strict=False):
            if not trees.equal(leaf.detach(), old):
                leaf.data = old
        for leaf, flag in zip(tensors, wanted, strict=True):
            if leaf.requires_grad != flag:
                leaf.requires_grad_(flag)


@contextmanager
def other_dice(seed: int) -> Iterator[None]:
    """Inside, NumPy's and Python's own generators start at this seed; afterwards they are as they were."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def own_part(personal: Tree, message: Tree) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a personal model into tensors of its own and names of tensors it took over, whole, from the message."""

    def identity(leaf: Tensor) -> tuple[object, ...]:
        return leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()

    sent = {identity(leaf): name for name, leaf in trees.named_leaves(message)}
    own: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, leaf in trees.named_leaves(personal):
        if identity(leaf) in sent:
            shared[name] = sent[identity(leaf)]
        else:
            own[name] = leaf.cpu()
    return own, shared
