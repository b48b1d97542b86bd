"""The clients' mean, and what a server does with it: take it as it is, or step towards it with a memory.

The latter is FedOpt (Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, ICLR 2021, arXiv:2003.00295),
Algorithm 2: the way from the mean back to the server's network is taken for a gradient.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Update
from lrbpfl.core.network import Params

ServerOptimiser = Literal["mean", "momentum", "adam"]  # FedAvg's server, FedAvgM's, FedAdam's
BETA_1, BETA_2, TAU = 0.9, 0.99, 1e-3  # of the momentum, of the squares, and what keeps a step finite; FedOpt's values


class Server(NamedTuple):
    """The network, and what the optimiser remembers of earlier rounds (None: nothing)."""

    W: Params
    m: Params | None  # momentum
    v: Params | None  # squares


def start(W: Params, optimiser: ServerOptimiser) -> Server:
    """The server before round 0."""
    zeros = trees.tree_map(torch.zeros_like, W)
    squares = trees.tree_map(lambda w: torch.full_like(w, TAU**2), W)
    return Server(W=W, m=None if optimiser == "mean" else zeros, v=squares if optimiser == "adam" else None)


def mean(W: Params, updates: Iterable[Update], rows: Sequence[str] = ()) -> Params:
    """The clients' networks averaged, l_k proportional to their data: sum_k l_k W_k.

    `rows` names parameters with one row for each class. In a row's mean a client counts by how far it moved that row
    from W, too: W_c + sum_k l_k d_kc Delta_kc / sum_k l_k d_kc with d_kc = |Delta_kc|. Those who never saw a class and
    left its row alone do not hold back the few who trained it; nobody has to say which classes it has.
    """
    moves = {name: torch.zeros_like(W[name]) for name in rows}
    weights = {name: W[name].new_zeros(len(W[name])) for name in rows}

    def passing() -> Iterator[tuple[Params, float]]:
        for update in updates:
            for name in rows:
                delta = update.upload[name] - W[name]
                weight = update.num_examples * delta.reshape(len(delta), -1).norm(dim=1)
                moves[name] += delta * _down(weight, delta)
                weights[name] += weight
            yield update.upload, update.num_examples

    average: Params = trees.mean(passing())
    for name, weight in weights.items():
        moved = moves[name] / _down(weight.clamp(min=torch.finfo(weight.dtype).tiny), moves[name])
        average = {**average, name: W[name] + moved}
    return average


def _down(weight: Tensor, rows: Tensor) -> Tensor:
    """One number for each row, shaped to multiply the rows."""
    return weight.reshape(-1, *(1,) * (rows.dim() - 1))


def step(server: Server, mean: Params, optimiser: ServerOptimiser, lr: float) -> Server:
    """One step from W towards the clients' mean, Delta = mean - W.

    mean: W + lr Delta; momentum: m <- 0.9 m + Delta, W + lr m; adam: m <- 0.9 m + 0.1 Delta,
    v <- 0.99 v + 0.01 Delta^2, W + lr m / (sqrt(v) + tau).
    """
    W, m, v = server
    if optimiser == "mean":
        return server._replace(W=mean if lr == 1.0 else trees.tree_map(lambda w, a: torch.lerp(w, a, lr), W, mean))
    delta = trees.tree_map(lambda w, a: a - w, W, mean)
    if optimiser == "momentum":
        m = trees.tree_map(lambda m, d: BETA_1 * m + d, m, delta)
        return Server(W=trees.tree_map(lambda w, m: w + lr * m, W, m), m=m, v=None)
    m = trees.tree_map(lambda m, d: torch.lerp(d, m, BETA_1), m, delta)
    v = trees.tree_map(lambda v, d: torch.lerp(d.square(), v, BETA_2), v, delta)
    W = trees.tree_map(lambda w, m, v: w + lr * m / (v.sqrt() + TAU), W, m, v)
    return Server(W=W, m=m, v=v)
