"""What the server takes from clients: how a round's uploads are judged before any of them is averaged."""

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Algorithm, Polling, Task, Update, sums_of
from lrbpfl.errors import BadInput
from lrbpfl.trees import Tree

FARTHEST = 10.0
FEW = 3  # uploads below which there is no median to speak of

Aggregate = Literal["mean", "trimmed", "median"]
Moves = dict[str, Tensor]  # upload - message, in float64, by names


class Intake(NamedTuple):
    """What happens to the uploads of a round before the algorithm averages them; each field as `lrbpfl keys` has it."""

    farthest: float = FARTHEST  # times the median move; 0: no such rule
    aggregate: Aggregate = "mean"
    trim: float = 0.2
    clip: float | None = None
    noise: float = 0.0
    delta: float = 1e-5


PLAIN = Intake()  # nothing but the rule about how far an upload may move


def check_intake(intake: Intake, where: str = "") -> None:
    """Refuse what cannot be together; `where` goes before the names of fields."""
    farthest, aggregate, trim, clip, noise, delta = intake
    if not (math.isfinite(farthest) and (farthest == 0 or farthest >= 1)):
        raise BadInput(f"{where}farthest = {farthest!r} times the median move: give 1 or more, or 0 for no such rule")
    if aggregate not in ("mean", "trimmed", "median"):
        raise BadInput(f"{where}aggregate = {aggregate!r}: give mean, trimmed or median")
    if not 0 < trim < 0.5:
        raise BadInput(f"{where}trim = {trim!r} is cut off at each end: give a share above 0 and below 0.5")
    if clip is not None and not 0 < clip < math.inf:
        raise BadInput(f"{where}clip = {clip!r} is no length of a move: give a number above 0")
    if not 0 <= noise < math.inf or not 0 < delta < 1:
        raise BadInput(f"{where}noise = {noise!r} and {where}delta = {delta!r}: give 0 or more, and between 0 and 1")
    if noise and (clip is None or aggregate != "mean"):
        need = "a mean of moves whose length has a bound"
        raise BadInput(f"{where}noise is added to {need}: it needs {where}clip, and {where}aggregate = 'mean'")


def faults(
    algorithm: Algorithm, task: Task, updates: Sequence[Update], messages: Mapping[int, Tree], farthest: float
) -> dict[int, str]:
    """Those of a round's clients whose uploads are refused, and why; uploads are fit in form already.

    First sums that no client can have, then moves that are too long beside those of the others in this round. Nothing
    is remembered from round to round.
    """
    found: dict[int, str] = {}
    if isinstance(algorithm, Polling):
        told = {update.client_id: algorithm.fault(task, update.upload) for update in updates}
        found = {k: fault for k, fault in told.items() if fault}
    if not farthest:
        return found
    left = [update for update in updates if update.client_id not in found]
    return found | too_far(left, messages, farthest, sums_of(algorithm))


def too_far(
    updates: Sequence[Update], messages: Mapping[int, Tree], farthest: float, sums: Sequence[str] = ()
) -> dict[int, str]:
    """Clients whose upload, or one tensor of it, moved too far from its message.

    An upload has when it moved more than `farthest` times the lower median of all, and more than its message is long;
    a tensor when it moved more than `farthest` times the lower median and `farthest` times its own length in the
    message (or that of a tensor of its shape with the message's typical entries: biases may start at 0). So a median
    of 0 alarms nobody. Of fewer than three uploads, each is measured by its message alone. Half of them may be bad.
    """
    reach = {u.client_id: _lengths(moves(u.upload, messages[u.client_id], sums)) for u in updates}
    medians = {name: 0.0 for lengths in reach.values() for name in lengths}
    if len(reach) >= FEW:
        medians = {name: median_low(lengths[name] for lengths in reach.values()) for name in medians}
    sizes: dict[tuple[int, ...], dict[str, float]] = {}  # most algorithms send everybody the same tensors
    found = {}
    for k, lengths in reach.items():
        same = tuple(map(id, moving(messages[k], sums).values()))
        if same not in sizes:
            sizes[same] = _sizes(messages[k], sums)
        found[k] = _farthest(lengths, medians, sizes[same], farthest)
    enough = len(reach) >= FEW
    return {k: f"{far.what} moved {far.length:.2g}, {far.beside(enough)}" for k, far in found.items() if far}


class _Far(NamedTuple):
    """What moved too far, how far, and how far others did, or how long its message is."""

    what: str
    length: float
    median: float
    size: float

    def beside(self, enough: bool) -> str:
        return f"the median of this round is {self.median:.2g}" if enough else f"its message measures {self.size:.2g}"


def _farthest(
    lengths: Mapping[str, float], medians: Mapping[str, float], sizes: Mapping[str, float], farthest: float
) -> _Far | None:
    """The upload as a whole, under the name "", or else the first of its tensors that moved too far."""
    for name, length in lengths.items():
        median, size = medians[name], sizes[name]
        floor = size if median and not name else farthest * size
        if length > max(farthest * median, floor):
            return _Far(f"its {name}" if name else "it", length, median, size)
    return None


def moves(upload: Tree, message: Tree, sums: Sequence[str] = ()) -> Moves:
    """By how much the tensors of an upload differ from its message, but for sums."""
    sent = dict(trees.named_leaves(message))
    return {
        name: leaf.to(torch.float64, copy=True).add_(sent[name], alpha=-1)
        for name, leaf in moving(upload, sums).items()
    }


def moving(tree: Tree, sums: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a message or an upload that are no sums, by names."""
    return {name: leaf for name, leaf in trees.named_leaves(tree) if name.partition("/")[0] not in sums}


def length(move: Tensor) -> float:
    """The Euclidean norm of a tensor in float64, whatever its size: no square overflows or vanishes."""
    norm = float(torch.linalg.vector_norm(move))
    if 1e-100 < norm < math.inf:
        return norm
    largest = move.abs().max().item() if move.numel() else 0.0
    if largest == 0 or math.isinf(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(move / largest))


def _lengths(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each part, and under the name "" of all together."""
    own = {name: length(part) for name, part in parts.items()}
    return {"": math.hypot(*own.values()), **own}


def _sizes(message: Tree, sums: Sequence[str]) -> dict[str, float]:
    """What a message measures, as `_lengths`; each tensor at least what it would with the message's typical entries."""
    leaves = {name: leaf.double() for name, leaf in moving(message, sums).items()}
    lengths, numbers = _lengths(leaves), {name: leaf.numel() for name, leaf in leaves.items()}
    numbers[""] = sum(numbers.values())
    whole = lengths[""] or math.sqrt(numbers[""])  # where all is 0, nothing says what is typical: 1
    return {name: max(own, whole * math.sqrt(numbers[name] / max(numbers[""], 1))) for name, own in lengths.items()}
