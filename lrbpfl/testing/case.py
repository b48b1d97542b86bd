"""An algorithm in the middle of a run, with an argument for each of its functions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.rng import generator
from lrbpfl.testing.form import expect
from lrbpfl.testing.toy import CLASSES, Toy, ToyRun, play, predict, start
from lrbpfl.trees import Tree


class Case(NamedTuple):
    """An algorithm after one round, with an argument for each of its functions."""

    algorithm: Algorithm
    toy: Toy
    run: ToyRun
    message: Tree
    client: Tree
    data: Data
    updates: list[Update]
    personal: Tree
    x: Tensor

    @property
    def task(self) -> Task:
        """The toy's."""
        return self.toy.task

    @property
    def name(self) -> str:
        """Of the algorithm, for sentences."""
        return type(self.algorithm).__name__


def make_case(algorithm: Algorithm, toy: Toy) -> Case:
    """One round of the toy, and what client 1 would do next."""
    k = 1
    run = play(algorithm, toy, start(algorithm, toy), range(1))
    message, client, data = algorithm.broadcast(toy.task, run.server, k), run.clients[k], toy.train[k]
    updates = []
    for i in range(3):
        upload, _, _ = algorithm.client_update(toy.task, message, client, data, generator(0, "case", i))
        updates.append(Update(client_id=k, num_examples=10 + i, upload=upload))
    personal = algorithm.personalise(toy.task, message, client, data, generator(0, "personal"))
    return Case(algorithm, toy, run, message, client, data, updates, personal, x=toy.test[k].x)


def call(method: str, case: Case, seed: int = 0) -> Tree:
    """What one function of the algorithm returns."""
    algorithm, (task, *_), run, message, client, data, updates, personal, x = case
    rng = generator(seed, method)
    if method == "init_server":
        return algorithm.init_server(task, rng)
    if method == "init_client":
        return algorithm.init_client(task, rng)
    if method == "broadcast":
        return algorithm.broadcast(task, run.server, 1)
    if method == "client_update":
        upload, client, info = algorithm.client_update(task, message, client, data, rng)
        return upload, client, {key: torch.tensor(value) for key, value in info.items()}
    if method == "server_aggregate":
        return algorithm.server_aggregate(task, run.server, iter(updates), rng)
    if method == "personalise":
        return algorithm.personalise(task, message, client, data, rng)
    return algorithm.predict(task, personal, x, rng)


def arguments(case: Case) -> dict[str, Any]:
    """Every tensor that a function could write to."""
    return {
        "message": case.message,
        "client": case.client,
        "data": case.data,
        "uploads": tuple(update.upload for update in case.updates),
        "personal": case.personal,
        "x": case.x,
        "server": case.run.server,
        "clients": case.run.clients,
        "task.public": case.task.public,
        "task.model": dict(case.task.model.state_dict()),
    }


def structure(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and dtypes of a tree's tensors."""
    return {name: (leaf.shape, leaf.dtype) for name, leaf in trees.named_leaves(tree)}


def served(case: Case, message: Tree, client: Tree, data: Data, x: Tensor, whom: str) -> None:
    """A client gets probabilities."""
    probs = predict(case.algorithm, case.task, message, client, data, x)
    probabilities(probs, len(x), f"{case.name}.predict for {whom}")


def probabilities(probs: Tensor, n: int, who: str = "predict") -> None:
    """Probabilities are of shape (samples, n, classes), finite, not negative, and sum to one."""
    fine = probs.dim() == 3 and len(probs) >= 1 and probs.shape[1:] == (n, CLASSES)
    expect(fine, f"{who} returns shape {tuple(probs.shape)}, not (samples, {n}, {CLASSES})")
    expect(probs.dtype == torch.float32, f"{who} returns {probs.dtype}, not torch.float32")
    expect(bool(torch.isfinite(probs).all()), f"{who} returns probabilities that are not finite")
    expect(bool((probs >= 0).all()), f"{who} returns negative probabilities")
    total = probs.sum(-1)
    fine = torch.allclose(total, torch.ones_like(total), rtol=1.3e-6, atol=1e-5)
    expect(fine, f"{who} returns probabilities that do not sum to 1")
