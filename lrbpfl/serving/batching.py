"""Rows of different clients in one batch, where their models have a network in common."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedbe import FedBE
from lrbpfl.core.network import forward
from lrbpfl.engines.work import one_thread
from lrbpfl.personal.model import PersonalModel
from lrbpfl.personal.signature import Inputs
from lrbpfl.serving.masked import plan

FEW = 48  # rows of a client times its rank; with more, a mask of W's size for each sample is cheaper
ROWS = 500  # at a time, where all share one network as it is

Family = tuple[int, ...]  # equal of models that have a network in common


class Asked(NamedTuple):
    """One client's model and its rows."""

    model: PersonalModel
    x: Inputs  # (n, ...)
    rows: int  # n

    @classmethod
    def of(cls, model: PersonalModel, x: Inputs) -> "Asked":
        """With its rows counted."""
        return cls(model, x, len(trees.leaves(x)[0]))


class Way(NamedTuple):
    """How the rows of several clients are answered at once."""

    samples: Callable[[Sequence[PersonalModel], Inputs, Tensor], Tensor]  # of models, rows, and whose rows they are
    most: int  # rows at once
    few: int  # rows of one client: if it has more, it is asked alone


@torch.no_grad()
def samples(asked: Sequence[Asked]) -> list[Tensor]:
    """What `PersonalModel.samples` gives for each, (samples, n, classes), up to rounding; in one batch if possible."""
    ways: dict[Family, Way | None] = {}
    together: dict[Family, list[int]] = defaultdict(list)
    found: dict[int, Tensor] = {}
    with one_thread():
        for i, (model, x, rows) in enumerate(asked):
            family = _family(model)
            way = ways[family] if family in ways else ways.setdefault(family, _way(model))
            if way is not None and rows <= way.few:
                together[family].append(i)
            else:
                found[i] = model.samples(x)
        for family, members in together.items():
            if way := ways[family]:
                found |= dict(zip(members, _answered(way, [asked[i] for i in members]), strict=True))
    return [found[i] for i in range(len(asked))]


def _family(model: PersonalModel) -> Family:
    """Objects are told apart by where they are in memory: on a shelf, equal ones are there once."""
    W = getattr(model._tree, "W", None)
    parts = W.values() if isinstance(W, dict) else (model,)
    return tuple(map(id, (model.task.model, model.inputs, model.algorithm, *parts)))


def _way(model: PersonalModel) -> Way | None:
    """The way for this model's family; None if each of them goes its own."""
    masked = plan(model)
    if masked is not None:
        return Way(masked.samples, masked.most_rows, FEW // masked.method.max_rank)
    return Way(_plain, ROWS, ROWS) if type(model.algorithm) in (FedAvg, FedBE) else None


def _plain(models: Sequence[PersonalModel], x: Inputs, owners: Tensor) -> Tensor:
    """One pass of the network that all share, with each client's own label prior; (1, n, classes)."""
    log_priors = torch.stack([model._tree.log_prior for model in models])
    logits = forward(models[0].task.model, models[0]._tree.W, x) + log_priors[owners]
    return torch.softmax(logits, dim=-1)[None]


def _answered(way: Way, asked: Sequence[Asked]) -> Iterator[Tensor]:
    """The samples of each, in turn."""
    for piece in _pieces(asked, way.most):
        rows = [one.rows for one in piece]
        x = trees.tree_map(lambda *parts: torch.cat(parts), *(one.x for one in piece))
        owners = torch.repeat_interleave(torch.tensor(rows))
        yield from way.samples([one.model for one in piece], x, owners).split(rows, dim=1)


def _pieces(asked: Sequence[Asked], most: int) -> Iterator[list[Asked]]:
    """Whole clients, with so many rows at a time at most, or one client."""
    piece: list[Asked] = []
    for one in asked:
        if piece and sum(other.rows for other in piece) + one.rows > most:
            yield piece
            piece = []
        piece.append(one)
    if piece:
        yield piece
