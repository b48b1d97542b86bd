"""Clients of one's own that are loaded, checked and parted when they are needed."""

import hashlib
from dataclasses import dataclass
from typing import Any

from lrbpfl.core.descent import Data
from lrbpfl.data import Dataset, LazyClients, lazy_remarks
from lrbpfl.data.clients import Known, check_known
from lrbpfl.data.lazy import dataset_of, labels_in
from lrbpfl.engines.lazy import Roster
from lrbpfl.engines.work import ClientData
from lrbpfl.errors import BadInput
from lrbpfl.experiments.parting import Gathered, Parting, is_several, parted, several_inputs, standardised


@dataclass(frozen=True)
class Lazily:
    """How client k becomes what an engine runs; it travels to workers."""

    source: LazyClients
    test: LazyClients | None
    how: Parting
    known: Known

    def __call__(self, k: int) -> ClientData:
        """Load and part it."""
        judged = None if self.test is None else _data(self.test, k, self.known)
        client = parted(self.source.names[k], _data(self.source, k, self.known), judged, self.how)
        return standardised([client], self.how.standardise)[0]


def gather_lazily(source: LazyClients, test: Any, how: Parting, *, tokens: bool, column: str | None) -> Gathered:
    """Everybody by name; the first is loaded now, to see what inputs are like."""
    _check(source, test, how, column)
    known, first = _opened(source, tokens)
    said = [] if first is None else lazy_remarks(first, source.census, standardise=how.standardise)
    if test is None:
        said.append(how.remark())
    largest = None if source.census is None else int(source.census.sizes.argmax())
    return Gathered(
        clients=Roster(source.names, Lazily(source, test, how, known), largest=largest),
        classes=known.classes,
        features=None,
        remarks=tuple(said),
        digest=_digest(source.digest, test and test.digest, how, tokens),
    )


def _check(source: LazyClients, test: Any, how: Parting, column: str | None) -> None:
    if column:
        raise BadInput(f"{column!r} names a column, and clients that are loaded when they are needed have no tables")
    if how.standardise == "pooled":
        what = "standardise is 'pooled', which takes everybody's data at once"
        raise BadInput(f"{what}, and these clients are loaded when they are needed: give 'client' or 'no'")
    if test is not None and (not isinstance(test, LazyClients) or test.names != source.names):
        raise BadInput("test must be LazyClients of the same names, or None, where clients are LazyClients")


def _opened(source: LazyClients, tokens: bool) -> tuple[Known, Dataset | None]:
    """What is known of all clients; the first one's examples, unless its inputs are several."""
    if is_several(source.get(source.names[0])):
        return Known(source.name, source.known_classes()), None
    return source.opened("tokens" if tokens else "numbers")


def _data(source: LazyClients, k: int, known: Known) -> Data:
    name = source.names[k]
    own = source.get(name)
    if is_several(own):
        labels = labels_in(name, own)
        check_known(name, labels, known.classes)
        return several_inputs(name, own[0], labels, known.classes)
    dataset = dataset_of(name, own, known)
    return Data(dataset.x, dataset.y)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
