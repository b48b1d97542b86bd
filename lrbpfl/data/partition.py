"""Who gets which example: index arithmetic only.

Every partition returns one sorted array of indices into y for each client; every index appears exactly once over all
clients.  All of them end, or refuse with a reason.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lrbpfl.errors import BadInput

Indices = npt.NDArray[np.int64]


def by_labels(
    y: npt.NDArray[Any],
    *,
    num_classes: int,
    clients: int,
    labels_per_client: int,
    balanced: bool = True,
    rng: np.random.Generator,
) -> list[Indices]:
    """Exactly ``labels_per_client`` labels for every client, every class of y (n,) used.

    Each class has the same number of clients, to within one.  They share its examples equally (to within one) if
    ``balanced``, else at random, every way of cutting it into non-empty shares being equally likely.
    """
    counts = np.bincount(_labels(y, num_classes), minlength=num_classes)
    _at_least("clients", clients, 1)
    _at_least("labels_per_client", labels_per_client, 1)
    held = _deal_labels(counts, clients, labels_per_client, rng)  # (clients, labels_per_client)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.flatnonzero(counts):
        holders = rng.permutation(np.flatnonzero((held == label).any(1)))
        examples = rng.permutation(np.flatnonzero(y == label))
        if balanced:
            shares = np.array_split(examples, len(holders))
        else:
            cuts = np.sort(1 + rng.choice(len(examples) - 1, len(holders) - 1, replace=False))
            shares = np.split(examples, cuts)
        for client, share in zip(holders, shares, strict=True):
            parts[client].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


def _deal_labels(counts: Indices, clients: int, each: int, rng: np.random.Generator) -> Indices:
    """Labels (clients, each), all different within a row, from the number of examples of each class."""
    present = np.flatnonzero(counts)
    if each > len(present):
        raise BadInput(f"labels_per_client is {each}, and the data have {len(present)} classes: give at most as many")
    if clients * each < len(present):
        need = f"{clients} clients x {each} labels cover at most {clients * each} of the {len(present)} classes"
        raise BadInput(f"{need}: give more clients or a larger labels_per_client")
    least, extra = divmod(clients * each, len(present))
    roomy = rng.permutation(present[counts[present] > least])
    if counts[present].min() < least or len(roomy) < extra:
        label = present[counts[present].argmin()]
        share = f"{least + (extra > 0)} of the {clients} clients hold each class"
        raise BadInput(
            f"class {label} has {counts[label]} examples, and {share}: give fewer clients or labels_per_client"
        )
    slots = np.zeros_like(counts)
    slots[present] = least
    slots[roomy[:extra]] += 1
    # A class fills at most `clients` consecutive slots, so that dealing them round the table never deals one twice.
    order = rng.permutation(present)
    return _swap(np.repeat(order, slots[order]).reshape(each, clients).T, rng)


def _swap(held: Indices, rng: np.random.Generator) -> Indices:
    """Shuffle labels (clients, each) by exchanges of two that leave no row with a label twice."""
    each = held.shape[1]
    flat = held.ravel().tolist()
    rows = [set(row) for row in held.tolist()]
    for i, j in rng.integers(held.size, size=(10 * held.size, 2)).tolist():
        a, b, mine, yours = flat[i], flat[j], rows[i // each], rows[j // each]
        if a not in yours and b not in mine:
            flat[i], flat[j] = b, a
            mine.symmetric_difference_update((a, b))
            yours.symmetric_difference_update((a, b))
    return np.array(flat, np.int64).reshape(held.shape)


def dirichlet(
    y: npt.NDArray[Any],
    *,
    num_classes: int,
    clients: int,
    alpha: float,
    min_examples: int = 2,
    rng: np.random.Generator,
) -> list[Indices]:
    """For each class of y (n,), shares over the clients ~ Dirichlet(alpha, ..., alpha).

    Departure: the LR-BPFL paper draws the class probabilities of each client.  Such draws agree with the number of
    examples that each class has only by chance, so that some examples would be left over and others wanted twice; with
    shares of classes every example is dealt exactly once.  Small alphas make clients of few classes both ways; here
    their sizes differ too.

    Drawn once.  A client left with fewer than ``min_examples`` is then topped up with random examples of whichever
    client is the largest at that moment.
    """
    _labels(y, num_classes)
    _enough(len(y), clients, min_examples)
    if not 0 < alpha < np.inf:
        raise BadInput(f"alpha is {alpha}, and must be a finite number above 0")
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in range(num_classes):
        examples = rng.permutation(np.flatnonzero(y == label))
        shares = _cut(examples, _log_gamma(alpha, clients, rng))
        # Clients in random order, so that rounding favours none of them.
        for client, share in zip(rng.permutation(clients), shares, strict=True):
            parts[client].append(share)
    return _top_up([np.concatenate(part) for part in parts], min_examples, rng)


def _top_up(parts: list[Indices], min_examples: int, rng: np.random.Generator) -> list[Indices]:
    """Move random examples from the largest parts to those below ``min_examples``; all returned in order."""
    pools = [rng.permutation(part).tolist() for part in parts]
    sizes = np.array([len(pool) for pool in pools])
    for client in np.flatnonzero(sizes < min_examples):
        while sizes[client] < min_examples:
            # Somebody is below the mean, so the largest is above min_examples and stays there or at it.
            largest = sizes.argmax()
            pools[client].append(pools[largest].pop())
            sizes[client] += 1
            sizes[largest] -= 1
    return [np.sort(np.array(pool, np.int64)) for pool in pools]


def _log_gamma(alpha: float, size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Logarithms of Gamma(alpha) draws (size,), from G_alpha = G_{alpha+1} U^(1/alpha), which never underflows."""
    alpha = min(max(alpha, 1e-9), 1e12)  # where one share has long taken everything, where all have long been equal
    return np.log(rng.standard_gamma(alpha + 1, size)) - rng.standard_exponential(size) / alpha


def _cut(examples: Indices, log_weights: npt.NDArray[np.float64]) -> list[Indices]:
    """Consecutive shares of examples (n,), in proportion to the weights and to within one example."""
    ends = np.cumsum(np.exp(log_weights - log_weights.max()))
    return np.split(examples, np.rint(ends[:-1] / ends[-1] * len(examples)).astype(np.int64))


def by_size(
    y: npt.NDArray[Any], *, clients: int, skew: float, min_examples: int = 2, rng: np.random.Generator
) -> list[Indices]:
    """Examples of y (n,) dealt regardless of label, ``min_examples`` to each client and the rest by unequal shares.

    The shares are log-normal, exp(skew z) with z ~ N(0, 1): equal sizes (to within one) at ``skew`` 0.
    """
    _enough(len(y), clients, min_examples)
    if not 0 <= skew < np.inf:
        raise BadInput(f"skew is {skew}, and must be a finite number from 0")
    examples = rng.permutation(len(y))
    first = np.split(examples[: clients * min_examples], clients)
    rest = _cut(examples[clients * min_examples :], min(skew, 1e6) * rng.standard_normal(clients))
    return [np.sort(np.concatenate(both)) for both in zip(first, rest, strict=True)]


def natural(owner: npt.NDArray[Any]) -> list[Indices]:
    """The examples of each client as the data name them, from owner (n,) with values 0, ..., clients - 1."""
    if owner.ndim != 1 or owner.dtype.kind not in "iu" or not len(owner):
        raise BadInput(f"owner is {owner.dtype} of shape {owner.shape}, and must hold one client number per example")
    if owner.min() < 0:
        raise BadInput(f"owner holds {owner.min()}, and clients are numbered from 0")
    clients, counts = np.unique(owner, return_counts=True)
    absent = np.flatnonzero(clients != np.arange(len(clients)))
    if len(absent):
        raise BadInput(f"client {absent[0]} owns no example, and every client up to {owner.max()} must own one")
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])


def hold_out(y: npt.NDArray[Any], *, fraction: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """The indices of y (n,) that stay and those held out: a fraction of every class, rounded, but never all of it."""
    chosen = []
    for label in np.unique(y):
        examples = rng.permutation(np.flatnonzero(y == label))
        chosen.append(examples[: min(round(fraction * len(examples)), len(examples) - 1)])
    held = np.sort(np.concatenate(chosen))
    return np.setdiff1d(np.arange(len(y)), held), held


def _labels(y: npt.NDArray[Any], num_classes: int) -> Indices:
    """The labels (n,), or a refusal."""
    _at_least("num_classes", num_classes, 1)
    if y.ndim != 1 or y.dtype.kind not in "iu" or not len(y):
        raise BadInput(f"y is {y.dtype} of shape {y.shape}, and must hold one integer label per example")
    if y.min() < 0 or y.max() >= num_classes:
        raise BadInput(f"labels go from {y.min()} to {y.max()}, and must lie between 0 and {num_classes - 1}")
    return y.astype(np.int64)


def _at_least(name: str, value: int, least: int) -> None:
    """Refuse a count that is not a whole number from ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise BadInput(f"{name} is {value!r}, and must be a whole number from {least}")


def _enough(n: int, clients: int, min_examples: int) -> None:
    """Refuse fewer examples than the clients need."""
    _at_least("clients", clients, 1)
    _at_least("min_examples", min_examples, 1)
    if n < clients * min_examples:
        raise BadInput(f"{clients} clients x {min_examples} min_examples need {clients * min_examples} examples of {n}")


PARTITIONS: dict[str, Callable[..., list[Indices]]] = {
    "labels": by_labels,
    "dirichlet": dirichlet,
    "size": by_size,
    "natural": natural,
}
