"""The paper's tables and figures as grids of runs (LR-BPFL, AISTATS 2025, arXiv:2410.14390).

An item is rows (methods) x columns (data); a run belongs to every item that asks for its configuration.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.experiments.config import Config, parse, read_name, unknown
from lrbpfl.experiments.deal import FRACTION
from lrbpfl.experiments.sections import COHORT
from lrbpfl.studies.costs import BATCH, STEP, Work
from lrbpfl.studies.items import ITEMS, OVERHEAD, Column, Row

IMAGES = 60_000  # in CIFAR-10 and in CIFAR-100, the official test images included
SIZES = {"speakers": 990, "digits": 1_797}  # examples
OWN_SHARE = {"speakers": 0.5}  # of a client's examples, for training, where the data say which


class Scale(NamedTuple):
    """How large a federation, and for how long."""

    clients: int  # K
    cohort: int  # tau K
    rounds: int  # T
    tuned: bool = False  # rates from TUNED; otherwise those that the paper prints

    def __str__(self) -> str:
        return f"{self.clients} clients, {self.cohort} a round, {self.rounds} rounds"


SCALES = {"mini": Scale(20, 4, 40, tuned=True), "half": Scale(25, 5, 500), "paper": Scale(50, 10, 1000)}


class Planned(NamedTuple):
    """One run of an item: its place in the table, and its configuration."""

    row: Row
    column: Column
    seed: int
    config: Config

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"


def runs(item: str, scale: str, seeds: Iterable[int], workers: int = 0) -> Iterator[Planned]:
    """Every run of an item, seed by seed; columns that show different scores of the same run share it."""
    for seed in seeds:
        for column in ITEMS[item].columns:
            for row in ITEMS[item].rows:
                yield Planned(row, column, seed, _config(row, column, SCALES[scale], seed, workers))


def estimate(config: Config, work: Work, step_seconds: float, workers: int) -> float:
    """Seconds that a run may take, from its work and the time of a plain step on 32 examples.

    Workers share what clients do; the server works alone.
    """
    clients, rounds = config.data.clients, config.federation.rounds
    judged = examples(config) * (1 - training_share(config)) * work.predict
    at_clients = (config.federation.cohort or COHORT) * rounds * work.round + clients * work.own + judged
    step_seconds *= STEP.get(read_name(config.algorithm_name).name, 1.0)
    return (at_clients / workers + rounds * work.server) / BATCH * step_seconds


def wanted(items: Sequence[str], scale: str) -> list[str]:
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


def examples(config: Config) -> int:
    """How many examples the data have, for training and testing together."""
    return SIZES.get(config.data.dataset, IMAGES)


def training_share(config: Config) -> float:
    """The share of a client's examples that it trains on."""
    return config.data.train_fraction or OWN_SHARE.get(config.data.dataset, FRACTION)


def examples_per_client(config: Config) -> int:
    """How many examples a client trains on, if all have as many."""
    return round(examples(config) / config.data.clients * training_share(config))


def _config(row: Row, column: Column, scale: Scale, seed: int, workers: int) -> Config:
    federation = {"cohort": scale.cohort, "rounds": scale.rounds, "seed": seed, "evaluate_every": 0, "model": "cnn"}
    name, prior = row.algorithm, "label_prior" in column.federation
    is_tuned, method = scale.tuned and column.tuned, read_name(name).name
    tuned = {**TUNED.get(method, {}), **({} if prior else WITHOUT_PRIOR.get(method, {}))} if is_tuned else {}
    if name == "lr-bpfl" and not prior and not is_tuned:
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
# docs/studies/recipe-fixed-masks.md.
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
