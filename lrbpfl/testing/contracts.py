"""The promises of an algorithm, each checked on the toy federation."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms import METHODS
from lrbpfl.algorithms.protocol import Algorithm, Update
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.rng import generator
from lrbpfl.states import Memory
from lrbpfl.testing.case import Case, arguments, call, make_case, probabilities, served, structure
from lrbpfl.testing.engines import same_rounds
from lrbpfl.testing.form import FORM, expect
from lrbpfl.testing.toy import blobs, make_setup, make_toy, play, start
from lrbpfl.trees import Tree

NEW = 1_000_000  # the id of a client that never trained
AWKWARD = {
    "one example": torch.tensor([2]),
    "two examples": torch.tensor([2, 0]),
    "one class": torch.full((40,), 1),
    "fewer examples than a batch": torch.tensor([0, 1, 1, 3, 0]),
}

Check = Callable[[Case], None]


def check_algorithm(algorithm: Algorithm, *, label_prior: float = 0.0) -> None:
    """Run every check on a toy federation; AssertionError says in a sentence which promise is broken."""
    for check in FORM:
        check(algorithm)
    with _blamed(algorithm, "fails in its first round"):
        case = make_case(algorithm, make_toy(label_prior))
    for contract in CONTRACTS:
        with _blamed(algorithm, f"fails where this is checked: {' '.join(str(contract.__doc__).split())}"):
            contract(case)


@contextmanager
def _blamed(algorithm: Algorithm, what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # whatever somebody's algorithm raises
        raise AssertionError(f"{type(algorithm).__name__} {what} ({type(error).__name__}: {error})") from error


def pure(case: Case) -> None:
    """A function changes no argument."""
    model = case.task.model
    for method in METHODS:
        before = trees.tree_map(torch.clone, arguments(case))
        parameters, training = dict(model.named_parameters()), [module.training for module in model.modules()]
        call(method, case)
        after = arguments(case)
        changed = [name for name in before if not trees.equal(after[name], before[name])]
        if any(p is not parameters[name] or p.grad is not None for name, p in model.named_parameters()):
            changed.append("the model's parameters or their gradients")
        if [module.training for module in model.modules()] != training:
            changed.append("the model's training mode")
        marked = trees.leaves({**after, "task.model": None})
        if any(leaf.requires_grad for leaf in marked):
            changed.append("requires_grad")
        expect(not changed, f"{case.name}.{method} changes what it is given: {', '.join(changed)}")


def seeded(case: Case) -> None:
    """A result is decided by the seed and nothing else."""
    before = torch.get_rng_state()
    try:
        for method in METHODS:
            torch.manual_seed(1)
            one = call(method, case)
            torch.manual_seed(2)
            two = call(method, case)
            expect(trees.equal(one, two), f"{case.name}.{method} returns something else when called again")
    finally:
        torch.set_rng_state(before)


def discreet(case: Case) -> None:
    """Randomness comes from `rng` alone: the global random states are left alone."""
    for method in METHODS:
        before, numpy_before = torch.get_rng_state(), str(np.random.get_state(legacy=False))
        call(method, case)
        kept = torch.equal(torch.get_rng_state(), before)
        expect(kept, f"{case.name}.{method} draws from torch's global random numbers, not from rng")
        kept = str(np.random.get_state(legacy=False)) == numpy_before
        expect(kept, f"{case.name}.{method} draws from NumPy's global random numbers, not from rng")


def detached(case: Case) -> None:
    """Results are trees of tensors, each with a name of its own, that carry no graph."""
    for method in METHODS:
        named = list(trees.named_leaves(call(method, case)))
        strange = [name for name, leaf in named if not isinstance(leaf, Tensor)]
        expect(not strange, f"{case.name}.{method} returns leaves that are no tensors: {', '.join(strange)}")
        expect(len(dict(named)) == len(named), f"{case.name}.{method} returns two tensors of one name")
        tied = [name for name, leaf in named if leaf.requires_grad]
        expect(not tied, f"{case.name}.{method} returns tensors that still require gradients: {', '.join(tied)}")


def steady(case: Case) -> None:
    """States keep their structure: what was kept can always be read back with a fresh state as the template."""
    _, client, _ = call("client_update", case)
    kept = structure(client) == structure(call("init_client", case))
    expect(kept, f"{case.name}.client_update returns a state whose tensors are not those of init_client")
    kept = structure(call("server_aggregate", case)) == structure(call("init_server", case))
    expect(kept, f"{case.name}.server_aggregate returns a state whose tensors are not those of init_server")


def through_bytes(tree: Tree, template: Tree) -> Tree:
    """Written to a file's bytes and read again, with nothing but the template to say what is where."""
    named = {name: leaf.contiguous() for name, leaf in trees.named_leaves(tree)}
    return trees.rebuild(template, load(save(named)))


def restorable(case: Case) -> None:
    """A run goes on from named tensors as if nothing had happened."""
    algorithm = case.algorithm
    three = case.toy._replace(train={k: case.toy.train[k] for k in (0, 1, 2)})
    begin = start(algorithm, three)
    half = play(algorithm, three, begin, range(2))
    template = start(algorithm, three, seed=99)
    restored = play(algorithm, three, through_bytes(half, template), range(2, 3))
    same = trees.equal(restored, play(algorithm, three, half, range(2, 3)))
    expect(same, f"{case.name} goes on differently when server and clients are read back from named tensors")


def symmetric(case: Case) -> None:
    """The upload has the message's structure."""
    for update in case.updates:
        fault = trees.fault(update.upload, case.message)
        expect(fault is None, f"{case.name}.client_update returns an upload unlike its message: {fault}")


def normalised(case: Case) -> None:
    """Predictions are probabilities: finite, normalised, of shape (samples, n, classes)."""
    probabilities(call("predict", case), len(case.x), f"{case.name}.predict")


def welcoming(case: Case) -> None:
    """A client that was never seen is served, and so is one that was never drawn."""
    algorithm, task, toy = case.algorithm, case.task, case.toy
    message = algorithm.broadcast(task, case.run.server, NEW)
    same = structure(message) == structure(case.message)
    expect(same, f"{case.name}.broadcast sends a client that was never seen another structure than others")
    client = algorithm.init_client(task, generator(0, "client", NEW))
    served(case, message, client, case.data, case.x, "a client that was never seen")
    others = toy._replace(train={k: toy.train[k] for k in (0, 1, 2)})
    run = play(algorithm, others, start(algorithm, others), range(3))
    message, client = algorithm.broadcast(task, run.server, 3), algorithm.init_client(task, generator(0, "client", 3))
    served(case, message, client, toy.train[3], toy.test[3].x, "a client that was never drawn")


def thorough(case: Case) -> None:
    """The aggregate takes the updates from an iterator, each once, to the end."""
    seen = []

    def updates() -> Iterator[Update]:
        for i, update in enumerate(case.updates):
            yield update
            seen.append(i)

    case.algorithm.server_aggregate(case.task, case.run.server, updates(), generator(0))
    told = f"{case.name}.server_aggregate leaves updates behind: it took {len(seen)} of {len(case.updates)}"
    expect(seen == list(range(len(case.updates))), told)


def robust(case: Case) -> None:
    """Clients with one example, two, one class only, or fewer examples than a batch take part like any other."""
    algorithm, task, message = case.algorithm, case.task, case.message
    for kind, labels in AWKWARD.items():
        whom = f"a client with {kind}"
        data, client = blobs(labels, kind), algorithm.init_client(task, generator(0))
        upload, kept, info = algorithm.client_update(task, message, client, data, generator(0))
        fault = trees.fault(upload, message)
        expect(fault is None, f"{case.name}.client_update for {whom} returns an upload unlike its message: {fault}")
        spoilt = any(bool(leaf.isnan().any()) for leaf in trees.leaves(kept))
        expect(not spoilt, f"{case.name}.client_update for {whom} returns a state that holds NaN")
        strange = {key: value for key, value in info.items() if type(value) is not float or not math.isfinite(value)}
        expect(not strange, f"{case.name}.client_update for {whom} returns info that is no finite float: {strange}")
        served(case, message, kept, data, case.x, whom)


def portable(case: Case) -> None:
    """Clients in worker processes give the bits of clients in this process."""
    setup = make_setup(case.algorithm, case.toy)
    here, there = Memory(), Memory()
    alone, pooled = Serial(setup, here), Processes(setup, 2, states=there)
    expected = list(federate(alone, rounds=2, cohort=3))
    failed = {**expected[0].failures, **expected[-1].failures}
    failed |= {k: e.failure for k, e in expected[-1].evaluations.items() if e.failure}
    expect(not failed, f"{case.name} fails at clients of a plain run: {failed}")
    with closing(pooled):
        found = list(federate(pooled, rounds=2, cohort=3))
    told = f"{case.name} gives other bits in worker processes than in one process"
    expect(same_rounds(found, expected), told)
    expect(trees.equal(there.kept, here.kept), f"{told}: in what clients keep")


CONTRACTS: tuple[Check, ...] = (
    detached,  # first: the others rely on it
    pure,
    seeded,
    discreet,
    steady,
    symmetric,
    restorable,
    normalised,
    welcoming,
    thorough,
    robust,
    portable,
)
