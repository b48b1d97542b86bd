"""The unit of work that every engine runs: one client's update, one client's evaluation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Info, Task, wishes_of
from lrbpfl.core.checks import check_call, check_gradients, check_model, check_noise, check_precision
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs, describe, length
from lrbpfl.core.inputs import fault as input_fault
from lrbpfl.core.modes import seeded
from lrbpfl.core.precision import Precision, computing
from lrbpfl.engines.conduct import attempt, lent, lent_data, lent_task, numbers, other_dice, taken, unharmed
from lrbpfl.engines.conduct import own_part as own_part
from lrbpfl.engines.lazy import Roster, is_lazy, names_of
from lrbpfl.engines.process import keep_memory as keep_memory
from lrbpfl.engines.process import one_thread as one_thread
from lrbpfl.engines.process import threads
from lrbpfl.engines.public import with_public
from lrbpfl.errors import BadInput
from lrbpfl.metrics import Predictions, reduce
from lrbpfl.rng import Address, generator
from lrbpfl.states import States
from lrbpfl.trees import Tree


class ClientData(NamedTuple):
    """What one client holds: it trains on `train` and is judged on `test`."""

    name: str
    train: Data
    test: Data
    calibration: Data | None = None  # kept from training: what temperatures are fitted on
    scaling: tuple[Tensor, Tensor] | None = None  # mean and spread by which its inputs were standardised before


class Setup(NamedTuple):
    """What stays the same during a run and is known wherever clients run.

    Where the task does not say, the algorithm has its wishes: a label prior, or inputs at the server, for which a share
    of each training client's training inputs goes there, without labels (`granted`).

    Clients that are no tuple or list are loaded when they are needed (`Roster`): the first is checked before round 0,
    the others whenever they are seen. One that cannot be loaded, or is not in order, fails in that round alone.
    """

    algorithm: Algorithm
    task: Task
    clients: Sequence[ClientData]
    seed: int
    device: str = "cpu"
    paces: tuple[float, ...] = ()  # of the task in each round; 1 in rounds beyond them
    classes: tuple[int | str, ...] | None = None  # (num_classes,) labels as their owners write them; None: 0, 1, ...
    features: tuple[str, ...] | None = None  # the names of the columns that inputs were, if they came from tables
    data: str = ""  # a hash of the data that clients hold parts of; empty: nobody asked for one
    precision: Precision = "float32"  # of networks where clients learn; they predict in float32
    threads: int = 1  # of a client while it learns; more: sums come in another order, and so in other bits

    @property
    def training(self) -> range:
        """The ids of the clients that take part in rounds; any after them are new, and judged after the last round."""
        return range(self.task.num_clients or len(self.clients))

    @property
    def names(self) -> Sequence[str]:
        """The clients' names; nobody on a roster is loaded for it."""
        return names_of(self.clients)

    @property
    def at_hand(self) -> Sequence[ClientData]:
        """All clients, or the one that stands for those who are loaded when they are needed."""
        if isinstance(self.clients, Roster):
            return [self.clients[self.clients.sample]]
        return self.clients[:1] if is_lazy(self.clients) else self.clients

    def client(self, k: int) -> ClientData:
        """Client k, checked if it may just have been loaded."""
        client = self.clients[k]
        if is_lazy(self.clients):
            _check_client(client, self.task.num_classes)
        return client

    def task_of(self, t: int) -> Task:
        """The task at the pace of round t."""
        return self.task._replace(pace=self.paces[t]) if t < len(self.paces) else self.task

    def to_device(self, tree: Tree) -> Tree:
        """A copy of the tree on the device where clients compute, to do with as they like."""
        return lent(tree, self.device)


def granted(setup: Setup) -> Setup:
    """The setup as it runs: what its task leaves open is what its algorithm asks for, and all clients take part.

    Every engine starts with this; a setup that leaves nothing open comes back as it is.
    """
    wishes = wishes_of(setup.algorithm)
    if not setup.task.num_clients:
        setup = setup._replace(task=setup.task._replace(num_clients=len(setup.clients)))
    if setup.task.label_prior is None:
        setup = setup._replace(task=setup.task._replace(label_prior=wishes.label_prior))
    if setup.task.public is None and wishes.public_fraction:
        _check_clients(setup)
        setup = with_public(setup, wishes.public_fraction)
    return setup


def check_setup(setup: Setup) -> None:
    """Refuse what would spoil a run later on, in a sentence that names it: the model, a client's data, the task.

    Which task an algorithm can work on it says itself, when it makes the server's first state. Of clients that are
    loaded when they are needed, the first stands for all.
    """
    check_model(setup.task.model)
    _check_clients(setup)
    _try_model(setup)
    setup = granted(setup)
    algorithm, task, seed = setup.algorithm, setup.task, setup.seed
    algorithm.init_server(task, generator(seed, "server"))


def _try_model(setup: Setup) -> None:
    """Call the model on the first rows of each kind of inputs: what is wrong with it should show before round 0."""
    model, classes = setup.task.model, setup.task.num_classes
    tried: set[str] = set()
    device = next(model.parameters()).device
    for where, x in _all_inputs(setup):
        if (kind := describe(x)) not in tried:
            rows = trees.tree_map(lambda part: part[:2].to(device), x)
            try:
                check_call(model, rows, classes)
                if not tried:
                    check_noise(model, rows)
                    check_gradients(model, rows)
                    if setup.precision != "float32":
                        check_precision(model, rows, classes, setup.precision)
            except BadInput as error:
                raise BadInput(f"{where}: {error}") from error
            tried.add(kind)


def _all_inputs(setup: Setup) -> Iterator[tuple[str, Inputs]]:
    """All inputs of the setup, with a name for each."""
    for client in setup.at_hand:
        for part, data in _parts(client).items():
            yield f"client {client.name!r}, {part} data", data.x
    if setup.task.public is not None and length(setup.task.public):
        yield "the public inputs", setup.task.public


def _parts(client: ClientData) -> dict[str, Data]:
    parts = {"train": client.train, "test": client.test, "calibration": client.calibration}
    return {name: data for name, data in parts.items() if data is not None}


def _check_clients(setup: Setup) -> None:
    if len(setup.training) > len(setup.clients):
        said = f"the task says that {len(setup.training)} clients take part"
        raise BadInput(f"{said}, and the setup has {len(setup.clients)}")
    for client in setup.at_hand:
        _check_client(client, setup.task.num_classes)


def _check_client(client: ClientData, classes: int) -> None:
    for part, data in _parts(client).items():
        _check_data(data, classes, f"client {client.name!r}: its {part} data")


def _check_data(data: Data, classes: int, where: str) -> None:
    x, y = data
    fault = input_fault(x)
    if fault:
        raise BadInput(f"{where} have inputs that {fault}")
    if len(y) == 0 or length(x) != len(y):
        raise BadInput(f"{where} have {length(x)} inputs and {len(y)} labels: give as many of both, at least one")
    if y.dtype != torch.int64 or int(y.min()) < 0 or int(y.max()) >= classes:
        raise BadInput(f"{where} have labels that are not whole numbers (int64) from 0 to {classes - 1}")
    if any(part.is_floating_point() and not bool(torch.isfinite(part).all()) for part in trees.leaves(x)):
        raise BadInput(f"{where} hold inputs that are not finite")


class Trained(NamedTuple):
    """What a client's update leaves behind."""

    upload: Tree
    state: Tree
    info: Info
    seconds: float
    examples: int  # that it trained on


class Evaluated(NamedTuple):
    """What a client's evaluation leaves behind; `personal` holds the tensors that its message does not hold already."""

    predictions: Predictions
    personal: dict[str, Tensor]
    shared: dict[str, str]  # the other tensors of the personal model, by their names in the message
    seconds: float
    calibration: Predictions | None = None  # on what was kept from training, if anything was
    examples: int = 0  # that it trains on
    scaling: tuple[Tensor, Tensor] | None = None  # of its data
    # Known already, where the model and its predictions stay elsewhere: these are as fine as bins of confidence then.
    scores: Mapping[str, float] | None = None


def update_client(setup: Setup, message: Tree, state: Tree, t: int, k: int) -> Trained:
    """Round t at client k; raises whatever the client's code raises, and BadInput where what it returns is unfit."""
    began = time.perf_counter()
    algorithm, seed, train = setup.algorithm, setup.seed, setup.client(k).train
    sent, had = setup.to_device(message), setup.to_device(state)
    task, rng = lent_task(setup.task_of(t)), generator(seed, "update", t, k)
    dice = dropout_seeded(seed, t, k, device=setup.device)
    with unharmed(task.model), _as_asked(setup), dice, lent_data(train, setup.device) as data:
        upload, new, info = algorithm.client_update(task, sent, had, data, rng)
    upload, new = taken(upload, "its upload"), taken(new, "what it keeps")
    if fault := trees.fault(new, state, infinite=True):
        raise BadInput(f"what it keeps is not what it kept before: {fault}")
    new, seconds = trees.rebuild(state, dict(trees.named_leaves(new))), time.perf_counter() - began
    return Trained(upload=upload, state=new, info=numbers(info), seconds=seconds, examples=len(train.y))


def evaluate_client(setup: Setup, message: Tree, state: Tree, t: int, k: int) -> Evaluated:
    """Client k's own model after t rounds, on its own test data and on what it kept from training."""
    began = time.perf_counter()
    algorithm, task, seed = setup.algorithm, setup.task, setup.seed
    client = setup.client(k)
    task, sent, had = lent_task(task), setup.to_device(message), setup.to_device(state)

    def predictions(data: Data) -> Predictions:  # the same samples of the model always: what is fitted on some holds
        with dropout_seeded(seed, t, k, device=setup.device), lent_data(data.x, setup.device) as x:
            samples = algorithm.predict(task, personal, x, generator(seed, "predict", t, k))
        return reduce(samples.cpu(), data.y.cpu())

    with unharmed(task.model):
        dice = dropout_seeded(seed, t, k, device=setup.device)
        with _as_asked(setup), dice, lent_data(client.train, setup.device) as train:
            personal = algorithm.personalise(task, sent, had, train, generator(seed, "personalise", t, k))
        test, kept_back = predictions(client.test), client.calibration
        calibration = None if kept_back is None else predictions(kept_back)
    intact = trees.equal(trees.tree_map(Tensor.cpu, sent), trees.tree_map(Tensor.detach, message))
    own, shared = own_part(personal, sent if intact else None)
    return Evaluated(
        predictions=test,
        personal=taken(own, "its model"),
        shared=shared,
        calibration=calibration,
        seconds=time.perf_counter() - began,
        examples=len(client.train.y),
        scaling=client.scaling,
    )


class Stateless(Exception):
    """A client for which no first state could be made; it says what its code raised."""


def fresh_state(setup: Setup, k: int) -> Tree:
    """The state of client k before it ever took part."""

    def make() -> Tree:
        with dropout_seeded(setup.seed, "client", k, device=setup.device):
            state = setup.algorithm.init_client(setup.task, generator(setup.seed, "client", k))
        return taken(state, "its first state")

    state = attempt(make)
    if isinstance(state, str):
        raise Stateless(state)
    return state


def kept(setup: Setup, states: States, k: int) -> Tree:
    """The state of client k."""
    return states.get(k, partial(fresh_state, setup, k))


@contextmanager
def dropout_seeded(seed: int, *address: Address, device: str = "cpu") -> Iterator[None]:
    """Inside, torch's own generator, from which dropout draws, starts at this address; afterwards it is as it was.

    So do NumPy's and Python's, from which nobody should draw: who does gets the same numbers wherever it runs, and
    changes nobody else's.
    """
    start = generator(seed, "dropout", *address).initial_seed()
    with other_dice(start), seeded(start, torch.device(device)):
        yield


@contextmanager
def _as_asked(setup: Setup) -> Iterator[None]:
    """Inside, a client learns in the precision and with the threads that the setup names."""
    with threads(setup.threads), computing(setup.precision):
        yield
