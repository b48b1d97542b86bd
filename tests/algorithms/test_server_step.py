"""The server's step towards the clients' mean: against torch's SGD, and against numpy."""

import numpy as np
import pytest
import torch

from lrbpfl import trees
from lrbpfl.algorithms import server_step
from lrbpfl.algorithms.server_step import ServerOptimiser
from lrbpfl.core.network import Params
from lrbpfl.rng import generator


def network(*path: str | int) -> Params:
    rng = generator(0, *path)
    return {"a": torch.randn(3, 2, generator=rng), "b": torch.randn(4, generator=rng)}


MEANS = [network("mean", t) for t in range(4)]


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
