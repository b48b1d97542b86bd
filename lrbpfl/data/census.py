"""What labels alone say of many clients, gathered one client at a time."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lrbpfl.data.labels import Label, classes_of

Counts = npt.NDArray[np.int64]


class Census(NamedTuple):
    """Who has how much of what."""

    names: Sequence[str]
    sizes: Counts  # (clients,) examples of each
    kinds: Counts  # (clients,) classes of which each has examples
    owners: dict[Label, int]  # clients that have examples of a class, classes in their order

    @property
    def classes(self) -> tuple[Label, ...]:
        """The labels of all clients together: numbers by value, text in natural order."""
        return tuple(self.owners)


def take_census(names: Sequence[str], labels_of: Callable[[str], npt.NDArray[Any]]) -> Census:
    """Look at everybody's labels (n,) once, and forget them."""
    sizes, kinds = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    owners: Counter[Label] = Counter()
    met: dict[bool, tuple[str, npt.NDArray[Any]]] = {}  # the first client whose labels are text, and numbers
    for k, name in enumerate(names):
        y = labels_of(name)
        met.setdefault(y.dtype.kind == "U", (name, y))
        if len(met) > 1:
            classes_of(dict(met.values()))  # refuses it, and says who has what
        own = np.unique(y).tolist()
        owners.update(own)
        sizes[k], kinds[k] = len(y), len(own)
    order = classes_of({"": np.array(list(owners))})
    return Census(names, sizes, kinds, {label: owners[label] for label in order})
