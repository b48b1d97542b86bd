"""What is allowed, but may not be what was meant: sentences for whoever brought the data."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lrbpfl.data.census import Census
from lrbpfl.data.clients import feature_name
from lrbpfl.data.datasets import Dataset
from lrbpfl.data.labels import Label
from lrbpfl.data.scaling import sums

LARGE, SMALL = 10.0, 0.01  # means and spreads of features that networks cope with lie between
FEW = 10  # examples, with which a client can hardly be judged
ROUNDING = 1e-7  # a spread of so small a part of the mean is none
DIGITS = 1e-5  # a spread of so small a part of the mean has two digits left in float32
SHOWN = 5  # names in a sentence
REMEDY = "data.standardise=pooled (in Python: standardise='pooled')"


def remarks(dataset: Dataset, *, train: npt.NDArray[np.int64] | None = None, standardise: str = "no") -> list[str]:
    """Sentences about clients of a single class, small clients, lonely classes, features out of scale, odd labels.

    ``train`` says which examples are trained on, all if None; features that are standardised anyway are not looked at.
    """
    found = [*_labels(dataset, len(dataset.y)), *_shapes(dataset.x)]
    if dataset.owner is not None:
        found += _clients(_census(dataset), dataset.num_classes)
    return [*found, *_features(dataset, train, standardise)]


def lazy_remarks(
    first: Dataset, census: Census | None, *, train: npt.NDArray[np.int64] | None = None, standardise: str = "no"
) -> list[str]:
    """The same of clients that are not all at hand: about labels by a census, about features by the first client."""
    found: list[str] = []
    if census is not None:
        named = dict(zip(first.classes or (), first.class_names or (), strict=False))
        owners: dict[Label, int] = {named.get(label, str(label)): number for label, number in census.owners.items()}
        found += _labels(first, int(census.sizes.sum()))
        found += _clients(census._replace(owners=owners), first.num_classes)
    assert first.client_names is not None
    told = [*_shapes(first.x), *_features(first, train, standardise)]
    return [*found, *(f"client {first.client_names[0]!r}, which stands for all here: {one}" for one in told)]


def _features(dataset: Dataset, train: npt.NDArray[np.int64] | None, standardise: str) -> Iterator[str]:
    """About features, where they are numbers."""
    x = dataset.x if train is None else dataset.x[torch.from_numpy(train)]
    if x.is_floating_point() and len(x):
        yield from _digits(x, dataset.feature_names)
        yield from _scales(x, dataset.feature_names) if standardise == "no" else ()


def _census(dataset: Dataset) -> Census:
    """Who has how much of what, classes by their names."""
    assert dataset.owner is not None
    owner, y = dataset.owner, dataset.y.numpy()
    names = dataset.client_names or tuple(map(str, range(int(owner.max()) + 1)))
    counts = np.zeros((len(names), dataset.num_classes), np.int64)
    np.add.at(counts, (owner, y), 1)
    called = dataset.class_names or map(str, range(dataset.num_classes))
    owners: dict[Label, int] = dict(zip(called, (counts > 0).sum(0).tolist(), strict=True))
    return Census(names, sizes=counts.sum(1), kinds=(counts > 0).sum(1), owners=owners)


def _clients(census: Census, num_classes: int) -> Iterator[str]:
    """About who has what."""
    names = census.names
    single = [names[k] for k in np.flatnonzero(census.kinds == 1).tolist()]
    if single and num_classes > 1:
        yield f"{_listed(single, 'client')} examples of a single class only: nothing can be told apart there"
    small = [names[k] for k in np.flatnonzero(census.sizes < FEW).tolist()]
    if small:
        yield f"{_listed(small, 'client')} fewer than {FEW} examples: scores of so few say little"
    lonely = [str(label) for label, number in census.owners.items() if number == 1]
    if lonely and len(names) > 1:
        yield f"{_listed(lonely, 'class', 'classes')} examples at one client only: no other can learn it from its own"
    folded = {" ".join(name.casefold().split()): name for name in names}
    if len(folded) < len(names):
        pair = next((folded[" ".join(n.casefold().split())], n) for n in names if n not in folded.values())
        yield f"the clients {pair[0]!r} and {pair[1]!r} differ in spaces or capitals only: they count as two"


def _labels(dataset: Dataset, examples: int) -> Iterator[str]:
    """About labels that may be no classes, of so many examples."""
    classes = dataset.classes or ()
    if dataset.num_classes == 1:
        yield "all examples are of one class: there is nothing to tell apart"
    below = [value for value in classes if isinstance(value, int) and value < 0]
    if below and len(classes) > 2:
        yield f"the label {below[0]} is a class like any other: leave those rows out if it stands for a missing label"
    if dataset.num_classes > 20 and 2 * dataset.num_classes > examples:
        found = f"{examples} examples have {dataset.num_classes} different labels"
        yield f"{found}: they may be identifiers or amounts, and no classes"


def _shapes(x: Tensor) -> Iterator[str]:
    """About images whose channels come last."""
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        yield f"inputs of shape {tuple(x.shape[1:])} look like images with channels last: models take them first"


def _scales(x: Tensor, names: tuple[str, ...] | None) -> Iterator[str]:
    """About features so large, or all so small, that networks learn little from them."""
    mean, std = _moments(x)
    size = np.maximum(np.abs(mean), std)
    if size.max() > LARGE:
        where = np.unravel_index(size.argmax(), size.shape)
        found = f"mean {mean[where]:.3g}, standard deviation {std[where]:.3g}"
        worst = f"{feature_name([int(i) for i in where], names)} the most: {found}"
        yield f"{int((size > LARGE).sum())} of {size.size} features are out of scale, {worst}: set {REMEDY}"
    elif 0 < size.max() < SMALL:
        yield f"all features are tiny, below {size.max():.2g}: set {REMEDY}"


def _digits(x: Tensor, names: tuple[str, ...] | None) -> Iterator[str]:
    """About features that vary in digits that float32 does not hold."""
    mean, std = _moments(x)
    flat = np.flatnonzero((std > 0) & (std < DIGITS * np.abs(mean)))
    if len(flat):
        where = np.unravel_index(flat[0], mean.shape)
        found = f"{feature_name([int(i) for i in where], names)} varies by {std[where]:.2g} about {mean[where]:.3g}"
        yield f"{found}, too little for float32 to hold: subtract a constant before you bring the data"


def _moments(x: Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Mean and standard deviation of each feature; 0 where it is rounding."""
    n, total, squares = sums(x)
    mean = (total / n).numpy()
    std = np.sqrt(np.maximum((squares / n).numpy() - mean**2, 0))
    return mean, np.where(std > ROUNDING * np.abs(mean), std, 0)


def _listed(names: Sequence[str], word: str, words: str | None = None) -> str:
    """'client 'a' has', or '7 clients ('a', 'b', ...) have'."""
    if len(names) == 1:
        return f"{word} {names[0]!r} has"
    shown = ", ".join(map(repr, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {words or word + 's'} ({shown}) have"
