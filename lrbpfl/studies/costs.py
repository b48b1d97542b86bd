"""What each algorithm sends, keeps and computes on the paper's CNN: counted from real messages, timed in turns."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.protocol import Algorithm, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.core.network import maskable
from lrbpfl.engines.work import keep_memory, one_thread, own_part
from lrbpfl.models import MODELS, cnn, mlp
from lrbpfl.rng import generator
from lrbpfl.studies.bench import best
from lrbpfl.trees import Tree

EXAMPLES, LABELS = 300, 2  # of the client that is measured, as in CIFAR-10 with 10 % for training and 20 clients
BATCH = 32  # of a plain step
FORWARD = 1 / 3  # of a step's time: a pass without gradients, there being two more for them
# What an example costs, in those of a plain step, where counting passes misses much: by `lrbpfl bench` (pFedBayes draws
# every weight) and by finished runs at the scale `mini`.
STEP = {"pfedbayes": 1.75, "metavd": 1.9, "pfedgp": 1.4, "fedbe": 1.3}
CLIENTS, COHORT, PUBLIC = 20, 5, 240  # in the federation, in a round, unlabelled inputs at the server


class Numbers(NamedTuple):
    """How many numbers, and how many examples."""

    down: int  # in a message
    up: int  # in an upload
    server: int  # in the server's state
    kept: int  # in what a client keeps between rounds
    own: int  # in a client's own model, without what it takes over from the message
    model: int  # in a client's own model, all of it
    examples: int  # that go forward through the first layer in a round at one client; under C masks C times each


class Costs(NamedTuple):
    """What one algorithm costs; seconds are the shortest of several goes."""

    numbers: Numbers
    round_seconds: float  # one round at one client
    personalise_seconds: float  # its own model, before it predicts
    aggregate_seconds: float  # the server's share of a round, once the uploads of the cohort are there


class Work(NamedTuple):
    """How many examples go through the network, forward and back; forward alone counts FORWARD. A plain step: BATCH."""

    round: float  # at one client
    own: float  # for its own model, before it predicts
    server: float  # in a round
    predict: float  # for one predicted example


class _Stage(NamedTuple):
    """An algorithm with everything its functions take."""

    algorithm: Algorithm
    task: Task
    server: Tree
    message: Tree
    client: Tree
    data: Data

    def update(self) -> tuple[Tree, Tree]:
        """One round at the client: its upload and what it keeps."""
        upload, kept, _ = self.algorithm.client_update(
            self.task, self.message, self.client, self.data, generator(0, "update")
        )
        return upload, kept

    def personalise(self, kept: Tree) -> Tree:
        """The client's own model."""
        return self.algorithm.personalise(self.task, self.message, kept, self.data, generator(0, "personalise"))

    def aggregate(self, upload: Tree) -> Tree:
        """The server's next state, from a cohort that sends the same."""
        updates = [Update(client_id=k, num_examples=EXAMPLES, upload=upload) for k in range(COHORT)]
        return self.algorithm.server_aggregate(self.task, self.server, updates, generator(0, "aggregate"))


def measure(algorithms: dict[str, Algorithm], repeats: int) -> dict[str, Costs]:
    """The costs of all algorithms, by their names; they take turns."""
    keep_memory()
    with one_thread():
        stages = {name: stage(algorithm) for name, algorithm in algorithms.items()}
        trained = {name: it.update() for name, it in stages.items()}
        actions: dict[str, Callable[[], object]] = {}
        for name, it in stages.items():
            upload, kept = trained[name]
            actions[f"{name} round"] = it.update
            actions[f"{name} personalise"] = partial(it.personalise, kept)
            actions[f"{name} aggregate"] = partial(it.aggregate, upload)
        seconds = best(actions, repeats)
        return {
            name: Costs(
                numbers=count(it),
                round_seconds=seconds[f"{name} round"],
                personalise_seconds=seconds[f"{name} personalise"],
                aggregate_seconds=seconds[f"{name} aggregate"],
            )
            for name, it in stages.items()
        }


def stage(algorithm: Algorithm, model: nn.Module | None = None, *, examples: int = EXAMPLES) -> _Stage:
    """An algorithm before its first round, on the paper's CNN or another model for ten classes of images.

    The images are noise, which costs as much as any.
    """
    rng = generator(0, "costs")

    def images(n: int) -> torch.Tensor:
        return torch.randint(0, 256, (n, 3, 32, 32), generator=rng, dtype=torch.uint8)

    model = model or cnn(10)
    task = Task(model.eval(), 10, public=images(PUBLIC), num_clients=CLIENTS)
    server = algorithm.init_server(task, rng)
    return _Stage(
        algorithm=algorithm,
        task=task,
        server=server,
        message=algorithm.broadcast(task, server, 0),
        client=algorithm.init_client(task, rng),
        data=Data(images(examples), torch.arange(examples) % LABELS),
    )


def count(it: _Stage) -> Numbers:
    """Everything that can be counted, from one real round."""
    with _passing(it.task.model) as passed:
        upload, kept = it.update()
        examples = int(sum(passed))
    personal = it.personalise(kept)
    own, _ = own_part(personal, it.message)
    return Numbers(
        down=trees.count(it.message),
        up=trees.count(upload),
        server=trees.count(it.server),
        kept=trees.count(kept),
        own=trees.count(own),
        model=trees.count(personal),
        examples=examples,
    )


def work(algorithm: Algorithm, examples: int) -> Work:
    """The work of an algorithm at a client with so many examples, counted on a small network: steps are steps."""
    it = stage(algorithm, mlp(10, (3, 32, 32)), examples=examples)
    totals = []
    with one_thread(), _passing(it.task.model, FORWARD) as passed:

        def so_far() -> None:
            totals.append(sum(passed))
            passed.clear()

        upload, kept = it.update()
        so_far()
        personal = it.personalise(kept)
        so_far()
        it.aggregate(upload)
        so_far()
        with torch.no_grad():
            it.algorithm.predict(it.task, personal, it.data.x[:1], generator(0, "predict"))
        so_far()
    return Work(*totals)


def plain_step_seconds(model: str = "cnn", steps: int = 3) -> float:
    """What a plain training step on a batch takes here, one thread: the mean of some, after one that does not count."""
    with one_thread():
        network = MODELS[model](10, (3, 32, 32))
        stage(FedAvg(local_steps=1), network).update()
        it = stage(FedAvg(local_steps=steps), network)
        began = time.perf_counter()
        it.update()
        return (time.perf_counter() - began) / steps


@contextmanager
def _passing(model: nn.Module, forward: float = 1.0) -> Iterator[list[float]]:
    """How many examples go through the first layer, call by call; without gradients each counts `forward`."""
    passed: list[float] = []
    first = model.get_submodule(next(iter(maskable(model))).removesuffix(".weight"))
    handle = first.register_forward_pre_hook(
        lambda module, args: passed.append(len(args[0]) * (1.0 if torch.is_grad_enabled() else forward))
    )
    try:
        yield passed
    finally:
        handle.remove()


def ratios(costs: dict[str, Costs], unit: str = "fedavg") -> Iterator[tuple[str, dict[str, float]]]:
    """A row of plain numbers for each algorithm; ratios are to a round of the algorithm called `unit`."""
    base = costs[unit]
    for name, (numbers, round_seconds, personalise_seconds, aggregate_seconds) in costs.items():
        yield (
            name,
            {
                **{f"numbers_{key}": value for key, value in numbers._asdict().items() if key != "examples"},
                "examples_a_round": numbers.examples,
                "round_seconds": round_seconds,
                "personalise_seconds": personalise_seconds,
                "aggregate_seconds": aggregate_seconds,
                "round_ratio": round_seconds / base.round_seconds,
                "example_ratio": round_seconds / numbers.examples * base.numbers.examples / base.round_seconds,
                "personalise_ratio": personalise_seconds / base.round_seconds,
            },
        )
