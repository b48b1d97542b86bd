"""What a client does with its own examples: which train, which judge, which are kept apart.  Index arithmetic only."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lrbpfl.data.partition import Indices
from lrbpfl.errors import BadInput


class Split(NamedTuple):
    """One client's examples, in random order."""

    train: Indices
    validation: Indices
    test: Indices
    public: Indices  # given to the server, without labels
    calibration: Indices  # kept from training for good


def split(
    indices: Indices,
    *,
    train_fraction: float | None = None,
    trains: npt.NDArray[np.bool_] | None = None,
    labels: npt.NDArray[Any] | None = None,
    validation_fraction: float = 0.0,
    calibration_fraction: float = 0.0,
    public_fraction: float = 0.0,
    rng: np.random.Generator,
) -> Split:
    """Shuffle one client's indices (n,) and split them; at least one for training, at least one for testing.

    ``trains`` (n,) says which ones are the training part; without it, ``train_fraction`` of them are.  With ``labels``
    (n,), every part has the class proportions of what it is taken from, each class to within one example; the sizes of
    the parts are the same with and without.

    ``validation_fraction`` is a fraction of the training part, ``calibration_fraction`` one of what is then left for
    training, ``public_fraction`` one of what is left after that; so no part depends on a fraction named after its own.
    None takes the last training example; apart from that, the first two take at least one.
    """
    fractions = {
        "validation_fraction": validation_fraction,
        "calibration_fraction": calibration_fraction,
        "public_fraction": public_fraction,
    }
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise BadInput(f"{name} is {value}, and must be at least 0 and below 1")
    if len(indices) < 2:
        what = f"a client with {len(indices)} examples cannot be split"
        raise BadInput(f"{what}: it needs one for training and one for testing")
    order = rng.permutation(len(indices))
    classes = np.zeros(len(indices), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    left, test = _training_part(order, classes, train_fraction, trains)
    if validation_fraction and len(left) < 2:
        given = "" if trains is not None else f" and train_fraction {train_fraction}"
        raise BadInput(
            f"a client with {len(indices)} examples{given} has {len(left)} for training, and needs 2 when "
            f"validation_fraction is {validation_fraction}"
        )
    left, validation = _cut_off(left, classes, _at_least_one(validation_fraction, len(left)))
    left, calibration = _cut_off(left, classes, _at_least_one(calibration_fraction, len(left)))
    train, public = _cut_off(left, classes, min(round(public_fraction * len(left)), len(left) - 1))
    return Split(*(indices[part] for part in (train, validation, test, public, calibration)))


def _training_part(
    order: Indices, classes: Indices, fraction: float | None, trains: npt.NDArray[np.bool_] | None
) -> tuple[Indices, Indices]:
    """What trains and what tests, both in the order given."""
    n = len(order)
    if trains is not None:
        if not 0 < trains.sum() < n:
            found = f"{trains.sum()} of a client's {n} examples"
            raise BadInput(
                f"the data's own split trains on {found}: every client needs some to train on and some to test"
            )
        return order[trains[order]], order[~trains[order]]
    if fraction is None or not 0 < fraction < 1:
        raise BadInput(f"train_fraction is {fraction}, and must lie strictly between 0 and 1")
    return _cut_off(order, classes, n - min(max(round(fraction * n), 1), n - 1))


def _at_least_one(fraction: float, n: int) -> int:
    """A fraction of n examples, rounded: at least one if it is above 0, and never all."""
    return min(max(round(fraction * n), 1), n - 1) if fraction else 0


def _cut_off(order: Indices, classes: Indices, size: int) -> tuple[Indices, Indices]:
    """The examples (n,) without ``size`` of them, and those: of every class its share, the last ones in the order.

    Shares are those of the largest remainder: rounded down, and one more where most was cut away.  Among equal
    remainders the class that comes last in the order goes first, so that chance decides.
    """
    own = classes[order]
    present, first, counts = np.unique(own[::-1], return_index=True, return_counts=True)
    shares, remainders = np.divmod(size * counts, max(len(order), 1))
    more = np.lexsort((first, -remainders))[: size - shares.sum()]
    shares[more] += 1
    taken = np.zeros(len(order), bool)
    for label, share in zip(present, shares, strict=True):
        places = np.flatnonzero(own == label)
        taken[places[len(places) - share :]] = True
    return order[~taken], order[taken]
