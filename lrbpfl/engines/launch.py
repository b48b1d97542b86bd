"""How a worker process comes to life, and how what the parent knows reaches it, whatever the platform."""

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Lock
from typing import Any, Literal, NamedTuple, get_args

# Bytes made here go through a pipe between a parent and its own workers, or through a Ray cluster that the user chose
# and trusts. We never write them to a file or read them from one: nothing that comes from outside is ever unpickled.
import cloudpickle
import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.engines.slots import read, room, write
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput
from lrbpfl.trees import Tree

Start = Literal[
    "auto", "fork", "forkserver", "spawn"
]  # auto: fork on Linux if clients run on the CPU and it works; else spawn

TRIAL = 10  # seconds that a fork has to compute a gradient

ray_ran = Event()  # in this process, whose forks may lock or die from then on

_main_is_hidden = Lock()


def method(start: Start, device: str) -> str:
    """The start method meant, if this platform has it and this device bears it."""
    if start == "auto":  # forked workers share the data with this process, but a fork of a GPU's user cannot use it
        is_fit = sys.platform == "linux" and device == "cpu" and not ray_ran.is_set()
        return "fork" if is_fit and forks_learn() else "spawn"
    known = multiprocessing.get_all_start_methods()
    if start not in known:
        allowed = ", ".join(name for name in get_args(Start) if name in ("auto", *known))
        raise BadInput(f"worker processes cannot be started by {start!r} here: give one of {allowed}")
    if start == "fork" and torch.device(device).type != "cpu":
        raise BadInput(f"worker processes that use {device} cannot be forked: start them by spawn, forkserver or auto")
    if start == "fork" and not forks_learn():
        raise BadInput("this torch computes no gradients in forks: start worker processes by spawn, forkserver or auto")
    return start


def forks_learn() -> bool:
    """Whether a fork of this process computes gradients.

    Not where torch holds threads for a GPU, used or not. One is tried each time, for so many seconds: what this process
    has done in between may matter.
    """
    _gradient()  # which starts such threads
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        gc.freeze()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TRIAL)
        try:
            _gradient()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _gradient() -> None:
    torch.ones((), requires_grad=True).square().backward()


class Parcel(NamedTuple):
    """A setup on its way: the clients' tensors in memory that all workers share, and all else as bytes."""

    rest: bytes
    block: Tensor


def pack(setup: Setup) -> Parcel:
    """The setup for a process that is no fork of this one; classes of scripts and notebooks go with it, by value."""
    data = (setup.clients, setup.task.public)
    tensors = tuple(leaf for leaf in trees.leaves(data) if isinstance(leaf, Tensor))
    block = torch.empty(max(room(tensors), 1), dtype=torch.uint8).share_memory_()
    places = iter(write(tensors, block))
    data = trees.tree_map(lambda leaf: next(places) if isinstance(leaf, Tensor) else leaf, data)
    try:
        return Parcel(cloudpickle.dumps(_with_data(setup, *data)), block)
    except Exception as error:  # whatever a model or an algorithm holds may say so in its own way
        reason = f"{type(error).__name__}: {error}"
        what = "the model, the algorithm or what loads clients"
        raise BadInput(f"{what} cannot be sent to a worker process: {reason}") from error


def unpack(parcel: Parcel) -> Setup:
    """The inverse of `pack`, in the worker."""
    # What our own parent made and handed over in memory: no file and no stranger can have written it.
    setup: Setup = cloudpickle.loads(parcel.rest)
    return _with_data(setup, *read((setup.clients, setup.task.public), parcel.block))


def _with_data(setup: Setup, clients: Tree, public: Tree) -> Setup:
    return setup._replace(clients=clients, task=setup.task._replace(public=public))


def to_bytes(thing: Any) -> bytes:
    """Anything for a worker that is no fork of this process, or for whom it works; classes of scripts go with it."""
    packed: bytes = cloudpickle.dumps(thing)
    return packed


def from_bytes(packed: bytes) -> Any:
    """The inverse of `to_bytes`."""
    # Made by our own parent, driver or worker and sent through their pipe or cluster: never read from a file.
    return cloudpickle.loads(packed)


class Pipe:
    """One end of the pipe between a parent and its worker."""

    def __init__(self, end: Connection, *, forked: bool) -> None:
        self.end, self.forked = end, forked

    def send(self, thing: Any) -> None:
        """Hand over anything; a fork knows the parent's classes, any other worker gets them with the thing."""
        if self.forked:
            self.end.send(thing)
        else:
            self.end.send_bytes(to_bytes(thing))

    def recv(self) -> Any:
        """What the other side sent; EOFError if it has gone."""
        # The other end is the process we started, or that started us, and nobody else.
        return self.end.recv() if self.forked else from_bytes(self.end.recv_bytes())


def launch(how: str, serve: Callable[..., None], setup: Setup | Parcel, slot: Tensor) -> tuple[BaseProcess, Pipe]:
    """Start a worker; the process, and this end of the pipe to it."""
    context: Any = multiprocessing.get_context(how)  # every kind of context has processes, which its type does not say
    if how == "forkserver":  # heeded if no server runs yet: its forks find torch imported, and what optimisers import
        context.set_forkserver_preload(["lrbpfl.engines.processes", "torch._dynamo"])
    ours, theirs = context.Pipe()
    forked = how == "fork"
    begin = partial(_forked, serve) if forked else serve
    process = context.Process(target=begin, args=(setup, Pipe(theirs, forked=forked), slot), daemon=True)
    with nullcontext() if forked else hidden_main():  # a fork runs nothing again, and keeps what it sees
        process.start()
    theirs.close()
    return process, Pipe(ours, forked=forked)


def _forked(serve: Callable[..., None], *about: Any) -> None:
    """A fork's work. What its parent let go is never collected here: ending a Ray's objects may lock or kill a fork."""
    gc.freeze()
    serve(*about)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep a process that is started inside from running this one's main script again: scripts need no guard.

    Two names of the script's are empty meanwhile; all others stay, so that its other threads can go on.
    """
    hidden = ("__spec__", "__file__")
    with _main_is_hidden:
        names = vars(sys.modules["__main__"])
        before = {name: names[name] for name in hidden if name in names}
        names.update(dict.fromkeys(before))
        try:
            yield
        finally:
            names.update(before)
