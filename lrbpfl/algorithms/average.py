"""The clients' mean of their networks."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median_low

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Update
from lrbpfl.core.network import Params

FARTHEST = 10.0  # times the median client's farthest row: a row that moved farther counts as if it had moved so far


def mean(W: Params, updates: Iterable[Update], rows: Sequence[str] = ()) -> Params:
    """The clients' networks averaged, l_k proportional to their data: sum_k l_k W_k.

    `rows` names parameters with one row for each class. In a row's mean a client counts by how far it moved that row
    from W, too: W_c + sum_k l_k d_kc Delta_kc / sum_k l_k d_kc with d_kc = |Delta_kc|. Those who never saw a class and
    left its row alone do not hold back the few who trained it; nobody has to say which classes it has. How far anybody
    can have moved a row, in d_kc, has a bound (`longest`).
    """
    moves: dict[str, list[Tensor]] = {name: [] for name in rows}
    sizes: list[int] = []

    def passing() -> Iterator[tuple[Params, float]]:
        for update in updates:
            for name in rows:
                moves[name].append(update.upload[name] - W[name])
            sizes.append(update.num_examples)
            yield update.upload, update.num_examples

    average: Params = trees.mean(passing())
    least = max((_lengths(W[name]).max().item() for name in rows), default=0.0)
    return {**average, **{name: W[name] + _moved(moves[name], sizes, least) for name in rows}}


def _moved(deltas: Sequence[Tensor], sizes: Sequence[int], least: float) -> Tensor:
    """How far the clients move the rows, together: sum_k l_k d_kc Delta_kc / sum_k l_k d_kc."""
    moved, weights = torch.zeros_like(deltas[0]), deltas[0].new_zeros(len(deltas[0]))
    distances = [_lengths(delta) for delta in deltas]
    most = longest(distances, least)
    for delta, distance, size in zip(deltas, distances, sizes, strict=True):
        weight = size * distance.clamp(max=most)
        moved += delta * _down(weight, delta)
        weights += weight
    return moved / _down(weights.clamp(min=torch.finfo(weights.dtype).tiny), moved)


def longest(distances: Sequence[Tensor], least: float) -> float:
    """What the d_kc of one client can be: FARTHEST times the median over clients of max_c d_kc, or `least`.

    That is W's longest row. Everybody has some class and moves its row far; the greater of the two leaves alone whoever
    has a class that hardly anybody has. Fewer than three clients have no median.
    """
    if len(distances) < 3:
        return torch.inf
    return max(FARTHEST * median_low(distance.max().item() for distance in distances), least)


def _lengths(rows: Tensor) -> Tensor:
    """Of each row, (rows,)."""
    lengths: Tensor = rows.reshape(len(rows), -1).norm(dim=1)
    return lengths


def _down(weight: Tensor, rows: Tensor) -> Tensor:
    """One number for each row, shaped to multiply the rows."""
    return weight.reshape(-1, *(1,) * (rows.dim() - 1))
