"""What the paper's tables and figures are made of: rows (methods), columns (data), and what the paper prints.

Two rows stand below the paper's own in every table of methods: `local` and `fedavg-ft`. `label-prior` and `transfer`
are items of ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lrbpfl.studies.printed import (
    ACCURACY,
    ACCURACY_SMALL,
    ADAPTIVE,
    BINS,
    CALIBRATION,
    COORDINATE,
    NEW,
    NOISY,
)

PUBLIC = 0.04  # of the training images, kept at the server for FedBE in every run, so that all train on the same ones
ALPHAS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the new clients
NEW_CLIENTS = 10  # for each alpha


class Row(NamedTuple):
    """A method, or a variant of one."""

    name: str
    algorithm: str
    fields: Mapping[str, Any] = {}


class Column(NamedTuple):
    """Data that the methods run on, and whose scores are shown.

    The scale says how large a federation is, unless the column does.
    """

    name: str
    data: Mapping[str, Any]
    federation: Mapping[str, Any] = {}
    new_alpha: float | None = None  # None: the scores of the training clients
    tuned: bool = True  # whether rates tuned for the scale apply, if it has any; otherwise everybody's defaults


class Score(NamedTuple):
    """One table of an item: what it shows of each run, and the printed values in the order of the columns."""

    key: str  # in summary.json
    printed: Mapping[str, Sequence[float]] = {}  # by row


class Item(NamedTuple):
    """A table or figure of the paper."""

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    scores: Sequence[Score]
    figure: str | None = None  # of reports/figures.py
    bins: Mapping[str, Sequence[float | None]] = {}  # printed accuracy in each bin of confidence, by row
    about: str = ""  # what a reader of the page has to know besides


def _methods(*names: str) -> list[Row]:
    return [Row(name, name) for name in (*names, "local", "fedavg-ft")]


def _labels(fraction: float, **data: Any) -> list[Column]:
    """The paper's three partitions by labels, with this share of the images for training."""
    kinds = (("CIFAR-10 2/10", "cifar10", 2), ("CIFAR-10 5/10", "cifar10", 5), ("CIFAR-100 5/100", "cifar100", 5))
    common = {"partition": "labels", "train_fraction": fraction, "public_fraction": PUBLIC, **data}
    return [Column(name, {"dataset": dataset, "labels_per_client": n, **common}) for name, dataset, n in kinds]


def _prefixed(columns: Iterable[Column], prefix: str) -> list[Column]:
    return [column._replace(name=f"{prefix}{column.name}") for column in columns]


def _with(printed: Mapping[str, Sequence[Sequence[float]]], place: int) -> dict[str, list[float]]:
    """Of several printed values for each row and column, those at one place."""
    return {row: [values[place] for values in of_row] for row, of_row in printed.items()}


ALL = _methods("fedavg", "fedbe", "per-fedavg", "pfedme", "metavd", "pfedgp", "pfedbayes", "lr-bpfl")
SMALL, MEDIUM = _labels(0.1), _labels(0.4)
_new = {"dataset": "cifar10", "partition": "dirichlet", "alpha": 0.1, "train_fraction": 0.4, "public_fraction": PUBLIC}
_new |= {"new_clients": NEW_CLIENTS, "new_alpha": list(ALPHAS)}
NEW_COLUMNS = [
    Column("training clients", _new),
    *(Column(f"new, alpha {alpha}", _new, new_alpha=alpha) for alpha in ALPHAS),
]
FIVE = SMALL[1]
_steps = {"calibration": 0.0, "mask_steps": 20}  # masks make 20 in both; where rates are tuned, W does too
FURTHER = (Score("accuracy"), Score("nll"), Score("ece_pooled_debiased"), Score("ece_worst"))
PRIOR = {"label_prior": 1.0}  # for everybody
WITH_PRIOR = [column._replace(federation=PRIOR) for column in SMALL]


def _small(name: str, **data: Any) -> Column:
    """Data of which a run takes seconds: a federation of one size at every scale, and everybody's default fields."""
    return Column(name, data, {**PRIOR, "rounds": 30, "cohort": 5, "model": "mlp"}, tuned=False)


def _digits(kind: str, **data: Any) -> Column:
    """Twenty clients that train on 40 digits each, or on so many on average."""
    return _small(f"digits, {kind}", dataset="digits", clients=20, train_fraction=0.45, **data)


IID = {"partition": "size", "skew": 0.0}
TRANSFER = [
    _small("speakers", dataset="speakers", partition="natural", clients=15),
    _digits("labels", partition="labels", labels_per_client=2),
    _digits("Dirichlet", partition="dirichlet", alpha=0.3),
    _digits("i.i.d.", **IID),
    _digits("features", **IID, shift="features", shift_strength=0.5),
    _digits("concept", **IID, shift="concept", concept_groups=2),
    *WITH_PRIOR[:2],
    Column(f"{FIVE.name}, features", {**FIVE.data, "shift": "features", "shift_strength": 0.5}, PRIOR),
    *WITH_PRIOR[2:],
]
TEMPERED = Row("fedavg-ft+temper", "fedavg-ft+temper")

ITEMS = {
    "calibration": Item(
        "Table 2: calibration",
        ALL,
        SMALL,
        (Score("ece_pooled", _with(CALIBRATION, 0)), Score("mce_pooled", _with(CALIBRATION, 1)), *FURTHER),
    ),
    "accuracy": Item(
        "Table 3: accuracy",
        ALL,
        MEDIUM,
        (Score("accuracy", ACCURACY), Score("nll"), Score("ece_pooled"), Score("ece_worst")),
    ),
    "adaptive-rank": Item(
        "Table 4: adaptive rank selection",
        [Row("without", "lr-bpfl", {"ranks": "fixed"}), Row("with", "lr-bpfl")],
        SMALL,
        (
            Score("accuracy", _with(ADAPTIVE, 0)),
            Score("ece_pooled", _with(ADAPTIVE, 1)),
            Score("ece_worst", _with(ADAPTIVE, 2)),
            Score("nll"),
            Score("rank"),
        ),
        figure="reliability",
    ),
    "coordinate": Item(
        "Table: coordinate descent against joint steps",
        [
            Row("joint", "lr-bpfl", {**_steps, "update": "joint"}),
            Row("coordinate", "lr-bpfl", _steps),
        ],
        SMALL,
        (
            Score("accuracy", _with(COORDINATE, 0)),
            Score("ece_pooled", _with(COORDINATE, 1)),
            Score("ece_worst", _with(COORDINATE, 2)),
            Score("nll"),
        ),
    ),
    "data-size": Item(
        "Table: the size of the training data",
        ALL,
        [*_prefixed(SMALL, "10 %, "), *_prefixed(MEDIUM, "40 %, ")],
        (Score("accuracy", {row: [*ACCURACY_SMALL[row], *ACCURACY[row]] for row in ACCURACY}),),
    ),
    "reliability": Item(
        "Figures: reliability, all clients and the worst one",
        _methods("fedavg", "per-fedavg", "pfedgp", "pfedbayes", "lr-bpfl"),
        SMALL[:1],
        (Score("ece_pooled", {row: [values[0][0]] for row, values in CALIBRATION.items()}), Score("ece_worst")),
        figure="reliability",
        bins=BINS,
    ),
    "new-clients": Item(
        "Figure: new clients",
        _methods("fedavg", "per-fedavg", "pfedbayes", "lr-bpfl"),
        NEW_COLUMNS,
        (Score("ece_pooled", NEW["ece"]), Score("ece_worst", NEW["worst"]), Score("accuracy", NEW["accuracy"])),
        figure="new-clients",
    ),
    "noisy": Item(
        "Figure: noisy clients",
        _methods("fedavg", "per-fedavg", "metavd", "pfedgp", "pfedbayes", "lr-bpfl"),
        [*_prefixed([FIVE], "clean, "), Column(f"noisy, {FIVE.name}", {**FIVE.data, "corruptions": True})],
        (Score("accuracy", NOISY["accuracy"]), Score("ece_pooled", NOISY["ece"]), Score("nll")),
        figure="accuracy-ece",
    ),
    "rank-map": Item(
        "Figure: the ranks that clients keep", [Row("lr-bpfl", "lr-bpfl")], SMALL[:1], (Score("rank"),), figure="ranks"
    ),
    "label-prior": Item(
        "Beyond the paper: every method with the client's label prior",
        ALL,
        WITH_PRIOR,
        (Score("ece_pooled"), *FURTHER),
    ),
    "transfer": Item(
        "Beyond the paper: clients that differ, every method as it comes",
        [*ALL, TEMPERED],
        TRANSFER,
        tuple(map(Score, ("nll", "accuracy", "ece_pooled_debiased", "ece_pooled", "ece_worst", "rank"))),
        figure="nll-ece",
        about="All have a label prior of 1. Speakers (15 clients, 33 training examples each) and digits (20 clients, "
        "40 each) have 5 clients a round and 30 rounds at every scale, and every method its default fields; CIFAR "
        "columns have what the item `label-prior` has. FedBE moves 4 % of the training examples to the server without "
        "their labels; on CIFAR these are kept from all. `fedavg-ft+temper` trains on 85 % of the training "
        "examples and fits one temperature for all clients on the others.",
    ),
}
OVERHEAD = "overhead"  # Table 1: measured by studies/costs.py, not run
_one = {"local_steps": 1}
_masks = {"mask_layers": "all", "samples": 4, "max_rank": 8}  # as the paper has them
ONE_STEP = (  # fields with which a client's round is a single optimiser step
    Row("metavd", "metavd", _one),
    Row("pfedgp", "pfedgp", _one),
    Row("pfedbayes", "pfedbayes", {**_one, "personal_steps": 1}),
    Row("lr-bpfl", "lr-bpfl", {**_masks, "mask_steps": 0, "model_steps": 1, "calibration": 0.0}),
    Row("local", "local", {**_one, "min_steps": 0}),
    Row("fedavg-ft", "fedavg-ft", {**_one, "ft_steps": 0}),
)
