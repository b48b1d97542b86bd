"""Who is best in a column of a table, as far as seeds or clients can tell."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lrbpfl.experiments.deal import NewKind
from lrbpfl.metrics.calibration import BINS
from lrbpfl.metrics.paired import Interval, best_and_ties, ece_difference, mean_difference
from lrbpfl.metrics.predictions import Floats
from lrbpfl.reports.collect import Client, Result, Scores, differing
from lrbpfl.rng import numpy_generator

BOLD = (
    "Bold: the best, and all that the 95 % interval of the paired difference does not tell from it; "
    "nothing where that is everybody"
)
SEEDS = 5  # from so many on they are compared, and clients where there are fewer: three tell little apart
LARGER = {"accuracy"}  # is better; of all other scores, smaller
PAIRED = ("accuracy", "nll", "brier", "ece_pooled", "ece_mean")  # scores that clients can be compared by
TRAINING = {"data.public_fraction", "data.calibration_fraction"}  # change what clients train on, not what is judged
OF_CLIENTS = {"accuracy": "accuracy", "nll": "nll", "brier": "brier", "ece_mean": "ece"}  # a client's part in a mean

Pair = tuple[int, int]  # what two runs are compared at: seed and client


def over_seeds(values: Mapping[str, Mapping[int, float]], key: str) -> set[str]:
    """The best rows by their scores of each seed, paired by seed."""

    def difference(a: str, b: str) -> Interval | None:
        shared = sorted(values[a].keys() & values[b].keys())
        mine, other = (np.array([values[name][seed] for seed in shared]) for name in (a, b))
        return mean_difference(mine, other)

    means = {name: statistics.fmean(own.values()) for name, own in values.items() if own}
    return best_and_ties(means, difference, larger=key in LARGER)


def over_clients(rows: Mapping[str, Sequence[Result]], key: str, alpha: NewKind | None = None) -> set[str]:
    """The best rows, each the runs of a few seeds, paired by seed and client; the new clients of this alpha, if any.

    A mean over clients is compared by their own scores, a pooled ECE of one seed by their gaps. A worst client has no
    pairs, and runs on other data have none either: nobody is best then.
    """
    runs = [run for own in rows.values() for run in own]
    others = set(differing(runs)) - TRAINING
    if not runs or any(name.startswith("data.") or name == "federation.evaluate_on" for name in others):
        return set()
    clients = {name: _clients(own, alpha) for name, own in rows.items()}

    def difference(a: str, b: str) -> Interval | None:
        pairs = [(clients[a][pair], clients[b][pair]) for pair in sorted(clients[a].keys() & clients[b].keys())]
        if any(mine["scores"].get("examples") != other["scores"].get("examples") for mine, other in pairs):
            return None
        if key == "ece_pooled" and len(rows[a]) == len(rows[b]) == 1:
            return _pooled(pairs)
        return _mean(pairs, key) if key in OF_CLIENTS else None

    known = {name: [s[key] for s in _scores(own, alpha) if s.get(key) is not None] for name, own in rows.items()}
    means = {name: statistics.fmean(values) for name, values in known.items() if values}
    return best_and_ties(means, difference, larger=key in LARGER)


def _scores(runs: Iterable[Result], alpha: NewKind | None) -> list[Scores]:
    return [run.scores if alpha is None else run.new.get(alpha, {}) for run in runs]


def _clients(runs: Iterable[Result], alpha: NewKind | None) -> dict[Pair, Client]:
    return {
        (run.tables.get("federation", {}).get("seed", 0), client["number"]): client
        for run in runs
        for client in run.clients
        if client["new_alpha"] == alpha
    }


def _mean(pairs: Sequence[tuple[Client, Client]], key: str) -> Interval | None:
    """Of a mean over clients, in which examples count alike, or clients where the score's name says so."""
    both = [(mine["scores"], other["scores"]) for mine, other in pairs]
    own = OF_CLIENTS[key]
    both = [(a, b) for a, b in both if a.get(own) is not None and b.get(own) is not None]
    weights = None if key.endswith("mean") else np.array([a["examples"] for a, _ in both])
    return mean_difference(np.array([a[own] for a, _ in both]), np.array([b[own] for _, b in both]), weights)


def _pooled(pairs: Sequence[tuple[Client, Client]]) -> Interval | None:
    gaps = [(_gaps(mine), _gaps(other)) for mine, other in pairs if mine["view"] and other["view"]]
    if len(gaps) < max(len(pairs), 2):
        return None
    sizes = np.array([mine["scores"]["examples"] for mine, _ in pairs])
    a, b = (np.stack(of_run) for of_run in zip(*gaps, strict=True))
    return ece_difference(a, b, sizes, rng=numpy_generator(0, "difference"))


def _gaps(client: Client) -> Floats:
    """Correct predictions less the confidence in them, added up in each bin; (BINS,)."""
    gaps = np.zeros(BINS)
    for b, examples, confidence, accuracy in client["view"]["bins"] if client["view"] else []:
        gaps[b] = examples * (accuracy - confidence)
    return gaps
