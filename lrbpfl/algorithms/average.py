"""The clients' mean of their networks."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Update
from lrbpfl.core.network import Params


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
