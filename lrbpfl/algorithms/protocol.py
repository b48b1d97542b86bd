"""What an algorithm is: hyper-parameters and seven pure functions over explicit state."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict
from torch import Generator, Tensor, nn

from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params, Weights, init_params
from lrbpfl.trees import Tree

# Fields of an algorithm are checked wherever they come from: Python, a file, the command line.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
MOST = 2**16  # of anything that is counted, as in files of clients' models
LARGEST = 1e9  # of anything else: float32 must hold its products
Count = Annotated[int, Ge(1), Le(MOST)]
Steps = Annotated[int, Ge(0), Le(MOST)]
Positive = Annotated[float, Gt(0), Le(LARGEST)]
NonNegative = Annotated[float, Ge(0), Le(LARGEST)]
Probability = Annotated[float, Ge(0), Le(1)]

Info = dict[str, float]  # what a client tells about its training, for curves and progress; no algorithm reads it


class Task(NamedTuple):
    """What every party knows before round 0; constant during a run, but for the pace of a round."""

    model: nn.Module  # a template: called with explicit parameters, never trained; frozen ones are its own
    num_classes: int
    pretrained: bool = False  # start from the template's own parameters, whatever the algorithm would start from
    # Examples, shared out among all classes, that smooth a client's frequencies; 0: none, None: the algorithm's wish.
    label_prior: float | None = None
    public: Any = None  # unlabelled inputs at the server; empty: none, None: the algorithm's wish
    num_clients: int = 0  # that take part in training, with the ids below it; 0 if nobody said how many
    class_names: tuple[str, ...] | None = None  # (num_classes,) for readers of results; no algorithm reads them
    pace: float = 1.0  # of this round: multiplies the rate of the network that clients train together (`local`: alone)


class Wishes(NamedTuple):
    """What an algorithm asks of a task that does not say; an engine grants it (`engines/work.py`)."""

    label_prior: float = 0.0  # of the task
    public_fraction: float = 0.0  # of each client's training inputs, moved to the server without their labels


class Update(NamedTuple):
    """What the server learns from one client; `upload` has the tree structure of the message."""

    client_id: int
    num_examples: int
    upload: Tree


class Algorithm(Protocol):
    """Hyper-parameters (fields of a frozen dataclass) and seven pure functions over trees.

        Server    lives at the server, survives rounds         Message   travels down
        Client    lives at one client, survives rounds         Upload    travels up, with the message's structure
        Personal  lives at one client, made for prediction

    A function changes no argument, keeps nothing, and draws randomness only from `rng`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def init_server(self, task: Task, rng: Generator) -> Tree:
        """The server's state before round 0."""

    def init_client(self, task: Task, rng: Generator) -> Tree:
        """The state of a client that has never taken part."""

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        """The message to one client."""

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator
    ) -> tuple[Tree, Tree, Info]:
        """One round at one client: the upload, the state it keeps, and its info."""

    def server_aggregate(self, task: Task, server: Tree, updates: Iterable[Update], rng: Generator) -> Tree:
        """The server's next state, from the updates in the order of the messages; consumes them all."""

    def personalise(self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator) -> Tree:
        """A client's own model, from the message, what it kept and its own training data."""

    def predict(self, task: Task, personal: Tree, x: Any, rng: Generator) -> Tensor:
        """Probabilities (samples, n, classes): every sample of the model, not their mean."""


@runtime_checkable
class Wishful(Protocol):
    """An algorithm that asks something of the task has one function more."""

    def wishes(self) -> Wishes:
        """What these hyper-parameters want."""


@runtime_checkable
class Polling(Protocol):
    """An algorithm whose uploads hold sums over examples beside tensors that moved says which, and what they can be."""

    SUMS: ClassVar[tuple[str, ...]]  # fields of an upload; zeros in them say nothing

    def fault(self, task: Task, upload: Tree) -> str | None:
        """Why these sums cannot be those of any client, or None; the structure is the message's, and all is finite."""


class Ensemble(NamedTuple):
    """A client's model without chance: its networks with their noise drawn, once and for all."""

    tensors: Tree  # all that the logits are computed from
    logits: Callable[[Tree, Any], Tensor]  # of these tensors and of inputs, (samples, n, classes)


@runtime_checkable
class Ensembled(Protocol):
    """An algorithm that draws noise before it looks at inputs says so, and its models can leave this package."""

    def ensemble(self, task: Task, personal: Tree, rng: Generator) -> Ensemble:
        """What `predict` computes with this generator, but for the softmax."""


def wishes_of(algorithm: Algorithm) -> Wishes:
    """What an algorithm asks of the task; one that does not say asks for nothing."""
    return algorithm.wishes() if isinstance(algorithm, Wishful) else Wishes()


def sums_of(algorithm: Algorithm) -> tuple[str, ...]:
    """The fields of its uploads that are sums; all others are tensors of the message that moved."""
    return algorithm.SUMS if isinstance(algorithm, Polling) else ()


def first_params(task: Task, weights: Weights, rng: Generator) -> Params:
    """Where training starts: the template's own parameters if they are pretrained, fresh ones otherwise."""
    return init_params(task.model, rng, "template" if task.pretrained else weights)


def log_label_prior(task: Task, y: Tensor) -> Tensor:
    """The log of the client's smoothed class frequencies, log((n_c + eps / C) / (n + eps)), or zeros: (classes,).

    Added to the logits in training and at prediction, it spares the network from unlearning the classes a client lacks.
    """
    if not task.label_prior:
        return torch.zeros(task.num_classes, device=y.device)
    counts = torch.bincount(y, minlength=task.num_classes).float() + task.label_prior / task.num_classes
    return torch.log(counts / counts.sum())
