"""The paper's tables and figures as grids of runs (LR-BPFL, AISTATS 2025, arXiv:2410.14390), and what it prints.

An item is rows (methods) x columns (data); a run belongs to every item that asks for its configuration. Two rows stand
below the paper's own in every table of methods: `local` and `fedavg-ft`. `label-prior` is an item of ours.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.experiments.config import Config, parse, unknown
from lrbpfl.experiments.costs import BATCH, STEP, Work
from lrbpfl.experiments.deal import FRACTION
from lrbpfl.experiments.printed import (
    ACCURACY,
    ACCURACY_SMALL,
    ADAPTIVE,
    BINS,
    CALIBRATION,
    COORDINATE,
    NEW,
    NOISY,
)

IMAGES = 60_000  # in CIFAR-10 and in CIFAR-100, the official test images included
PUBLIC = 0.04  # of the training images, kept at the server for FedBE in every run, so that all train on the same ones
ALPHAS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the new clients
NEW_CLIENTS = 10  # for each alpha


class Scale(NamedTuple):
    """How large a federation, and for how long."""

    clients: int  # K
    cohort: int  # tau K
    rounds: int  # T
    tuned: bool = False  # rates from TUNED; otherwise those that the paper prints

    def __str__(self) -> str:
        return f"{self.clients} clients, {self.cohort} a round, {self.rounds} rounds"


SCALES = {"mini": Scale(20, 4, 40, tuned=True), "half": Scale(25, 5, 500), "paper": Scale(50, 10, 1000)}


class Row(NamedTuple):
    """A method, or a variant of one."""

    name: str
    algorithm: str
    fields: Mapping[str, Any] = {}


class Column(NamedTuple):
    """Data that the methods run on, and whose scores are shown."""

    name: str
    data: Mapping[str, Any]
    federation: Mapping[str, Any] = {}
    new_alpha: float | None = None  # None: the scores of the training clients


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
        [column._replace(federation={"label_prior": 1.0}) for column in SMALL],
        (Score("ece_pooled"), *FURTHER),
    ),
}
OVERHEAD = "overhead"  # Table 1: measured by experiments/costs.py, not run
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


class Run(NamedTuple):
    """One run of an item: its place in the table, and its configuration."""

    row: Row
    column: Column
    seed: int
    config: Config

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"


def runs(item: str, scale: str, seeds: Iterable[int], workers: int = 0) -> Iterator[Run]:
    """Every run of an item, seed by seed; columns that show different scores of the same run share it."""
    for seed in seeds:
        for column in ITEMS[item].columns:
            for row in ITEMS[item].rows:
                yield Run(row, column, seed, _config(row, column, SCALES[scale], seed, workers))


def estimate(config: Config, work: Work, step_seconds: float, workers: int) -> float:
    """Seconds that a run may take, from its work and the time of a plain step on 32 examples.

    Workers share what clients do; the server works alone.
    """
    clients, rounds = config.data.clients, config.federation.rounds
    judged = IMAGES * (1 - training_share(config)) * work.predict
    at_clients = config.federation.cohort * rounds * work.round + clients * work.own + judged
    step_seconds *= STEP.get(config.algorithm_name, 1.0)
    return (at_clients / workers + rounds * work.server) / BATCH * step_seconds


def check(items: Sequence[str], scale: str) -> list[str]:
    """The items asked for, `all` spelled out; unknown names are told."""
    known = [OVERHEAD, *ITEMS]
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    for item in items:
        if item not in (*known, "all"):
            raise unknown("item", item, (*known, "all"))
    return known if "all" in items else list(dict.fromkeys(items))


def overhead_file(root: Path) -> Path:
    """Where the measurement behind Table 1 is kept."""
    return root / f"{OVERHEAD}.json"


def training_share(config: Config) -> float:
    """The share of a client's images that it trains on."""
    return config.data.train_fraction or FRACTION


def images_per_client(config: Config) -> int:
    """How many images a client trains on, if all have as many."""
    return round(IMAGES / config.data.clients * training_share(config))


def _config(row: Row, column: Column, scale: Scale, seed: int, workers: int) -> Config:
    federation = {"cohort": scale.cohort, "rounds": scale.rounds, "seed": seed, "evaluate_every": 0, "model": "cnn"}
    name, prior = row.algorithm, "label_prior" in column.federation
    tuned = {**TUNED.get(name, {}), **({} if prior else WITHOUT_PRIOR.get(name, {}))} if scale.tuned else {}
    if name == "lr-bpfl" and not prior and not scale.tuned:
        name = "lr-bpfl:paper"
    return parse(
        {
            "data": {"clients": scale.clients, **column.data},
            "federation": {"label_prior": 0.0, **federation, **column.federation},
            "engine": {"workers": workers},
            "algorithm": {**tuned, **row.fields, "name": name},
        }
    )


# Rates that validation data favour in federations of the size of `mini`, where they are not the defaults:
# docs/recipe.md.
TUNED: dict[str, dict[str, Any]] = {
    "fedavg": {"weights": "kaiming"},
    "fedbe": {"weights": "kaiming", "lr": 0.1, "temperature": 1.0},
    "metavd": {"weights": "kaiming", "lr": 0.05},
    "pfedme": {"weights": "kaiming", "lam": 100.0},
    "pfedbayes": {"weights": "kaiming", "zeta": 3.0},
    "local": {"weights": "kaiming", "local_steps": 6},
    "per-fedavg": {"weights": "kaiming", "beta": 0.1},
    "fedavg-ft": {"weights": "kaiming", "ft_lr": 0.005},
}
WITHOUT_PRIOR: dict[str, dict[str, Any]] = {  # what differs without a label prior
    "per-fedavg": {"beta": 0.05},
    "pfedme": {"lam": 5.0},
    "fedavg-ft": {"ft_lr": 0.02},
}
