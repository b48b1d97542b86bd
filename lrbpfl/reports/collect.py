"""From run directories to the plain data that a report shows: recorded scores, bins and counts of predictions."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypedDict

import numpy as np

from lrbpfl.disk import usable
from lrbpfl.errors import BadInput
from lrbpfl.experiments.deal import NewKind
from lrbpfl.experiments.promises import NO_PROMISE
from lrbpfl.metrics import Predictions, pool, reliability
from lrbpfl.reports import finished
from lrbpfl.studies.comparison import is_comparison, parts

HISTOGRAM = 12  # bins of an uncertainty, from 0 to the logarithm of the number of classes
CURVES = ("accuracy", "nll", "ece_pooled", "ece_pooled_floor")

Scores = dict[str, Any]
Record = Sequence[Mapping[str, Any]]


# What runs may differ in that stand side by side: how often they were judged, and what the suffix +temper asks for.
OF_METHODS = ("federation.evaluate_every", "federation.temper", "data.calibration_fraction")


class Uncertainties(TypedDict):
    """The uncertainty of the right or of the wrong predictions, in nats."""

    examples: int
    aleatoric: float  # mean
    epistemic: float  # mean
    counts: list[int]  # (HISTOGRAM,) of the total uncertainty


class View(TypedDict):
    """What predictions look like, of one client or of all; small whatever the number of examples."""

    bins: list[tuple[int, int, float, float]]  # index, examples, mean confidence, accuracy of each filled bin
    confusion: list[tuple[int, int, int]]  # label, prediction, examples
    right: Uncertainties
    wrong: Uncertainties


class Client(TypedDict):
    """One client: its last scores in the record, and what is there of its predictions and ranks."""

    number: int
    name: str
    new_alpha: NewKind | None  # of a new client, or "sites"; those that train have none
    scores: Scores
    view: View | None
    ranks: list[int] | None  # (layers,)


class Result(NamedTuple):
    """One finished run."""

    name: str
    path: Path
    scores: Scores  # of summary.json
    new: dict[NewKind, Scores]  # of new clients, by their alpha, rising, or "sites"
    tables: dict[str, Any]  # of config.toml
    config: str  # config.toml as it stands
    curves: dict[str, list[tuple[int, float]]]  # round and value of each of CURVES
    pooled: View | None  # of the training clients
    clients: list[Client]  # new ones after those that train
    worst: int | None  # place in `clients` of the training client with the largest ECE
    classes: int
    class_names: dict[int, str]  # where the data name them
    layers: list[str]  # that carry a mask
    max_rank: int
    events: list[Mapping[str, Any]]  # clients that were left out, run again or not judged, rounds undone
    refused: dict[int, str]  # why clients have no promise of coverage, where some have


def collect(paths: Sequence[Path]) -> list[Result]:
    """The runs in these directories, each a run or a comparison, under names that differ."""
    folders = [folder for path in paths for folder in _runs(usable(path))]
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            raise BadInput(f"{folder} is named twice: give every run once")
    results = []
    for folder in folders:
        with finished.reading(folder):  # files that are well each may still contradict each other
            results.append(_load(folder))
    return [result._replace(name=_label(result, results)) for result in results]


def differing(results: Sequence[Result]) -> list[str]:
    """The keys of data and federation in which runs differ that stand side by side; one left out is off there."""
    tables = [_keys(result) for result in results]
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key not in OF_METHODS]
    return [key for key in keys if len({json.dumps(table.get(key)) for table in tables}) > 1]


def _keys(result: Result) -> dict[str, Any]:
    sections = {section: result.tables.get(section, {}) for section in ("data", "federation")}
    return {f"{section}.{key}": value for section, table in sections.items() for key, value in table.items()}


def look(p: Predictions) -> View:
    """Bins, confusion and uncertainty of some predictions."""
    bins = reliability(p.confidence, p.correct)
    filled = np.flatnonzero(bins.counts).tolist()
    cells, counts = np.unique(np.stack([p.y, p.probs.argmax(axis=1)]), axis=1, return_counts=True)
    return View(
        bins=[(b, int(bins.counts[b]), _short(bins.confidence[b]), _short(bins.accuracy[b])) for b in filled],
        confusion=[(int(y), int(guess), int(n)) for (y, guess), n in zip(cells.T, counts, strict=True)],
        right=_group(p, p.correct),
        wrong=_group(p, ~p.correct),
    )


def _group(p: Predictions, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Uncertainties:
    top = math.log(p.probs.shape[1]) if p.probs.shape[1] > 1 else 1.0
    counts, _ = np.histogram(np.clip(p.total[chosen], 0.0, top), bins=HISTOGRAM, range=(0.0, top))
    size = max(int(chosen.sum()), 1)
    return Uncertainties(
        examples=int(chosen.sum()),
        aleatoric=_short(p.aleatoric[chosen].sum() / size),
        epistemic=_short(p.epistemic[chosen].sum() / size),
        counts=counts.tolist(),
    )


def _runs(path: Path) -> Iterator[Path]:
    """The run directories that a path stands for; all of them finished."""
    folders = list(parts(path).values()) if is_comparison(path) else [path]
    for folder in (path, *folders):
        if not (folder / "summary.json").is_file():
            go_on = f"lrbpfl resume {quote(str(path))}"
            raise BadInput(f"{folder} holds no summary.json, so it is not finished: go on with: {go_on}")
    yield from folders


def _label(result: Result, results: Iterable[Result]) -> str:
    """The algorithm; where several runs have the same, their directory beside it."""
    alike = [other.path for other in results if other.name == result.name]
    if len(alike) == 1:
        return result.name
    short = [path.name for path in alike].count(result.path.name) == 1
    return f"{result.name} ({result.path.name if short else result.path})"


def _load(path: Path) -> Result:
    tables, (name, scores) = finished.tables(path), finished.summary(path)
    with finished.reading(path / "summary.json"):
        new = {_kind(alpha): _all_finite(of_new) for alpha, of_new in scores.pop("new", {}).items()}
    record, (names, class_names) = finished.record(path), finished.names(path)
    predictions, alphas = _predictions(path)
    ranks = finished.ranks(path)
    layers = list(next(filter(None, ranks.values()), {}))
    scored = _client_scores(record)
    alphas |= {line["client"]: line["new_alpha"] for line in record if "new_alpha" in line}
    clients = [
        Client(
            number=k,
            name=names.get(k, f"client {k}"),
            new_alpha=alphas.get(k),
            scores=scored.get(k, {}),
            view=look(predictions[k]) if k in predictions else None,
            ranks=[rank for rank, _ in ranks[k].values()] if ranks.get(k) else None,
        )
        for k in sorted(scored.keys() | predictions.keys())
    ]
    trained = [p for k, p in predictions.items() if k not in alphas]
    judged = [i for i, c in enumerate(clients) if c["new_alpha"] is None and c["scores"].get("ece") is not None]
    return Result(
        name=name,
        path=path,
        scores=_all_finite(scores),
        new={kind: new[kind] for kind in in_order(new)},
        tables=tables,
        config=finished.text(path / "config.toml"),
        curves={key: _curve(record, key) for key in CURVES},
        pooled=look(pool(trained)) if trained else None,
        clients=clients,
        worst=max(judged, key=lambda i: clients[i]["scores"]["ece"], default=None),
        classes=next((p.probs.shape[1] for p in predictions.values()), 0),
        class_names=class_names,
        layers=[layer.removesuffix(".weight") for layer in layers],
        max_rank=max((top for of_client in ranks.values() for _, top in of_client.values()), default=0),
        events=[line for line in record if line.get("event", NO_PROMISE) != NO_PROMISE],
        refused={line["client"]: line["reason"] for line in record if line.get("event") == NO_PROMISE},
    )


def in_order(kinds: Iterable[NewKind]) -> list[NewKind]:
    """Alphas rising, whole sites after them."""
    return sorted(set(kinds), key=lambda kind: math.inf if kind == "sites" else kind)


def shown_kind(kind: NewKind) -> str:
    """An alpha without zeros that say nothing, or "sites"."""
    return kind if kind == "sites" else f"{kind:g}"


def _kind(text: str) -> NewKind:
    return "sites" if text == "sites" else float(text)


def _client_scores(record: Record) -> dict[int, Scores]:
    """Every client's scores in the last round that was judged, and its mean rank when it last took part.

    New clients are judged once, whether or not any other was in that round.
    """
    judged = [line for line in record if "client" in line and "metric" in line]
    rounds = [line["round"] for line in judged if line["metric"] == "accuracy" and "new_alpha" not in line]
    last = max(rounds, default=None)
    found: dict[int, Scores] = {}
    for line in judged:
        if line["round"] == last or line["metric"] == "rank" or "new_alpha" in line:
            found.setdefault(line["client"], {})[line["metric"]] = _finite(line["value"])
    return {k: scores for k, scores in found.items() if "accuracy" in scores}


def _curve(record: Record, metric: str) -> list[tuple[int, float]]:
    lines = (line for line in record if line.get("metric") == metric and "client" not in line)
    return [(line["round"], _short(line["value"])) for line in lines if line["value"] is not None]


def _predictions(path: Path) -> tuple[dict[int, Predictions], dict[int, NewKind]]:
    """Every client's predictions in the last round, if the run kept any, and the alphas of new clients."""
    kept = finished.predictions(path)
    found: dict[int, Predictions] = {}
    alphas: dict[int, NewKind] = {}
    for k in np.unique(kept["client"]).tolist() if kept else ():
        mine = kept["client"] == k
        if "new_alpha" in kept and (alpha := float(kept["new_alpha"][mine][0])):
            alphas[k] = "sites" if math.isnan(alpha) else alpha
        probs, total, aleatoric = (kept[name][mine].astype(np.float64) for name in ("probs", "total", "aleatoric"))
        found[k] = Predictions(probs=probs, y=kept["y"][mine], total=total, aleatoric=aleatoric)
    return found, alphas


def _all_finite(scores: Scores) -> Scores:
    return {key: _finite(value) for key, value in scores.items()}


def _finite(value: Any) -> Any:
    """The value; None instead of a number that is not finite."""
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else None
    return value


def _short(value: float) -> float:
    """Six digits: more than a page can show."""
    return float(f"{value:.6g}")
