"""The clients' mean by hand, and the server's step towards it: against torch's SGD, and against numpy."""

import numpy as np
import pytest
import torch

from lrbpfl import trees
from lrbpfl.algorithms import server_step
from lrbpfl.algorithms.protocol import Update
from lrbpfl.algorithms.server_step import ServerOptimiser
from lrbpfl.core.network import Params
from lrbpfl.rng import generator


def network(*path: str | int) -> Params:
    rng = generator(0, *path)
    return {"a": torch.randn(3, 2, generator=rng), "b": torch.randn(4, generator=rng)}


MEANS = [network("mean", t) for t in range(4)]


def update(k: int, n: int, rows: list[list[float]], b: list[float]) -> Update:
    return Update(client_id=k, num_examples=n, upload={"a": torch.tensor(rows), "b": torch.tensor(b)})


def test_the_mean_is_that_of_the_clients_by_their_data() -> None:
    W = {"a": torch.zeros(2, 2), "b": torch.zeros(2)}
    updates = [update(0, 1, [[4.0, 0.0], [0.0, 8.0]], [4.0, 0.0]), update(1, 3, [[0.0, 4.0], [0.0, 0.0]], [0.0, 8.0])]
    mean = server_step.mean(W, updates)
    torch.testing.assert_close(mean, {"a": torch.tensor([[1.0, 3.0], [0.0, 2.0]]), "b": torch.tensor([1.0, 6.0])})


def test_a_row_is_averaged_by_how_far_each_client_moved_it() -> None:
    """Row 0: moves of length 3 and 1, data 1 and 3, so half each; row 1: one client alone; row 2: nobody.

    The parameter that is not named keeps the plain mean.
    """
    W = {"a": torch.tensor([[1.0, 1.0], [2.0, 2.0], [5.0, 5.0]]), "b": torch.tensor([0.0, 0.0])}
    updates = [
        update(0, 1, [[4.0, 1.0], [2.0, 10.0], [5.0, 5.0]], [4.0, 0.0]),
        update(1, 3, [[1.0, 2.0], [2.0, 2.0], [5.0, 5.0]], [0.0, 8.0]),
    ]
    mean = server_step.mean(W, iter(updates), rows=["a"])
    torch.testing.assert_close(mean["a"], torch.tensor([[2.5, 1.5], [2.0, 10.0], [5.0, 5.0]]))
    torch.testing.assert_close(mean["b"], torch.tensor([1.0, 6.0]))
    biases = server_step.mean(W, updates, rows=["b"])["b"]
    torch.testing.assert_close(biases, torch.tensor([4.0, 8.0]))


def test_the_mean_is_taken_as_it_is() -> None:
    server = server_step.step(server_step.start(network(), "mean"), MEANS[0], "mean", 1.0)
    assert trees.equal(server.W, MEANS[0])
    assert (server.m, server.v) == (None, None)


def test_or_approached() -> None:
    W = network()
    server = server_step.step(server_step.start(W, "mean"), MEANS[0], "mean", 0.25)
    torch.testing.assert_close(server.W, trees.tree_map(lambda w, a: 0.75 * w + 0.25 * a, W, MEANS[0]))


def test_momentum_is_that_of_sgd() -> None:
    """The way from the mean to W as the gradient, over four rounds."""
    server = server_step.start(network(), "momentum")
    parameters = trees.tree_map(torch.clone, network())
    sgd = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9)
    for mean in MEANS:
        server = server_step.step(server, mean, "momentum", 0.7)
        for name, p in parameters.items():
            p.grad = p.detach() - mean[name]
        sgd.step()
    torch.testing.assert_close(server.W, parameters)


def test_adam_by_numpy() -> None:
    server = server_step.start(network(), "adam")
    w, m, v = network()["a"].numpy(), np.zeros((3, 2)), np.full((3, 2), 1e-6)
    for mean in MEANS:
        server = server_step.step(server, mean, "adam", 0.02)
        delta = mean["a"].numpy() - w
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        w = w + 0.02 * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(server.W["a"].numpy(), w, rtol=1e-5)


@pytest.mark.parametrize("optimiser", ["mean", "momentum", "adam"])
def test_at_the_mean_nothing_moves(optimiser: ServerOptimiser) -> None:
    W = network()
    server = server_step.step(server_step.start(W, optimiser), W, optimiser, 1.0)
    assert trees.equal(server.W, W)
    assert trees.tree_map(lambda leaf: 0, server) == trees.tree_map(lambda leaf: 0, server_step.start(W, optimiser))
