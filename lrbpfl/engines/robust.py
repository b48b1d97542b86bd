"""What the algorithm's aggregate is given in place of a round's uploads: clipped, robust or private ones.

All are made of moves, upload - message, so that one way serves every algorithm, also those that send every client a
message of its own. What an upload holds beside tensors that moved, sums over examples, is bounded by the algorithm
itself (`Polling`): it stays as it is, and is left out where there is noise.

    clip       each client's move is shortened to this length; the algorithm weighs clients as ever
    trimmed    every client's upload is its message and the trimmed mean of all moves, coordinate by coordinate: all
    median     count alike, and the algorithm sees no difference between clients
    noise      there is one upload, from nobody: the message to a client that never took part, and the mean of the
               clipped moves over the cohort (who sent nothing that is fit moved by 0) with Gaussian noise
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Task, Update, sums_of
from lrbpfl.engines.intake import Intake, Moves, length, moves, moving
from lrbpfl.trees import Tree


def prepared(
    intake: Intake,
    algorithm: Algorithm,
    task: Task,
    server: Tree,
    updates: Sequence[Update],
    messages: Mapping[int, Tree],
    rng: Generator,
) -> list[Update]:
    """The updates that the algorithm averages; as they came, bit for bit, if the intake asks for nothing."""
    sums = sums_of(algorithm)
    if intake.clip is not None:
        updates = [_clipped(update, messages[update.client_id], intake.clip, sums) for update in updates]
    if intake.noise and intake.clip is not None:
        nobody, std = algorithm.broadcast(task, server, task.num_clients), intake.noise * intake.clip
        every = _side_by_side(updates, messages, sums)
        move = {name: private_mean(parts, len(messages), std, rng) for name, parts in every}
        return [Update(task.num_clients, 1, _moved(nobody, move, trees.tree_map(torch.zeros_like, nobody)))]
    if intake.aggregate == "mean":
        return list(updates)
    trim = intake.trim if intake.aggregate == "trimmed" else 0.5
    move = {name: trimmed_mean(parts, trim) for name, parts in _side_by_side(updates, messages, sums)}
    return [Update(u.client_id, 1, _moved(messages[u.client_id], move, u.upload)) for u in updates]


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean over the first dimension without at least this share of values at each end; 0.5: the median."""
    n = len(values)
    cut = min(math.ceil(trim * n - 1e-9), (n - 1) // 2)
    return values.sort(dim=0).values[cut : n - cut].mean(dim=0)


def private_mean(values: Tensor, cohort: int, std: float, rng: Generator) -> Tensor:
    """(sum over the first dimension + N(0, std^2)) / cohort, coordinate by coordinate."""
    total = values.sum(dim=0)
    return (total + std * torch.randn(total.shape, generator=rng, dtype=total.dtype)) / cohort


def _side_by_side(
    updates: Sequence[Update], messages: Mapping[int, Tree], sums: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """All clients' moves of one tensor after the other, (clients, *shape), in float64."""
    uploads = [moving(update.upload, sums) for update in updates]
    sent = [moving(messages[update.client_id], sums) for update in updates]
    for name in uploads[0]:
        pairs = zip(uploads, sent, strict=True)
        yield name, torch.stack([up[name].double() - down[name].double() for up, down in pairs])


def _clipped(update: Update, message: Tree, clip: float, sums: Sequence[str]) -> Update:
    """The update with its move shortened to `clip`; a shorter one stays as it came, bit for bit."""
    move = moves(update.upload, message, sums)
    far = math.hypot(*(length(part) for part in move.values()))
    if far <= clip:
        return update
    short = {name: part * (clip / far) for name, part in move.items()}
    return update._replace(upload=_moved(message, short, update.upload))


def _moved(message: Tree, move: Moves, rest: Tree) -> Tree:
    """The upload that makes this move, with its sums from `rest`; whole numbers are rounded."""

    def end(leaf: Tensor, by: Tensor) -> Tensor:
        moved = leaf.double() + by
        return (moved if leaf.is_floating_point() else moved.round()).to(leaf.dtype)

    ends = {name: end(leaf, move[name]) for name, leaf in trees.named_leaves(message) if name in move}
    return trees.rebuild(message, {**dict(trees.named_leaves(rest)), **ends})
