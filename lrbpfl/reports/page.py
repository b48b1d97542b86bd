"""One self-contained HTML page about finished runs: opens from a disk, asks nothing of any network."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lrbpfl.metrics.calibration import BINS
from lrbpfl.reports.collect import Result, Scores, differing

BEST: dict[str, Callable[[Iterable[float]], float]] = {  # which end of a column is the good one
    "accuracy": max, "nll": min, "brier": min, "ece_pooled": min, "ece_pooled_debiased": min, "ece_mean": min,
    "ece_worst": min,
}  # fmt: skip
DRAWN = (
    "name", "scores", "new", "curves", "pooled", "clients", "worst", "classes", "class_names", "layers", "max_rank",
)  # fmt: skip
EVENTS = 50  # shown at most


def render(results: Sequence[Result]) -> str:
    """The page about these runs; at least one."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "megabytes": megabytes}
    return environment.from_string(_part("template.html")).render(
        title=_title(results),
        results=results,
        some=results[0],
        best=_best([result.scores for result in results]),
        groups=_groups(results),
        differing=differing(results),
        events=[(result.name, event) for result in results for event in result.events],
        most_events=EVENTS,
        css=Markup(_part("page.css")),
        js=Markup(_part("page.js")),
        data=Markup(_embedded(results)),
    )


def percent(share: float | None, digits: int = 2) -> str:
    """A share as a percentage, or a dash where there is none."""
    return "–" if share is None else f"{100 * share:.{digits}f}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with its thousands apart, or a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def megabytes(value: float | None) -> str:
    """Bytes as megabytes, or a dash where there are none."""
    return "–" if value is None else f"{value / 1e6:,.1f}"


def _part(name: str) -> str:
    return files("lrbpfl.reports").joinpath(name).read_text(encoding="utf-8")


def _embedded(results: Sequence[Result]) -> str:
    """What the page draws, as JSON that no name in it can break out of."""
    runs = [{key: getattr(result, key) for key in DRAWN} for result in results]
    text = json.dumps({"bins": BINS, "runs": runs}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _title(results: Sequence[Result]) -> str:
    names = [result.name for result in results]
    what = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
    datasets = {Path(result.tables.get("data", {}).get("dataset", "unknown data")).name for result in results}
    return f"{what} on {', '.join(sorted(datasets))}"


class Group(NamedTuple):
    """The runs beside each other on the same clients: those that train, or the new ones of one alpha."""

    label: str
    rows: list[tuple[int, str, Scores]]  # place among all runs, name, scores
    best: dict[str, float | None]


def _groups(results: Sequence[Result]) -> list[Group]:
    """Of the runs with new clients, the training clients and then each alpha; nothing if there is no such run."""
    runs = [(i, result) for i, result in enumerate(results) if result.new]
    found = [("training", [(i, result.name, result.scores) for i, result in runs])] if runs else []
    for alpha in sorted({alpha for _, result in runs for alpha in result.new}):
        rows = [(i, result.name, result.new[alpha]) for i, result in runs if alpha in result.new]
        found.append((f"{alpha:g}", rows))
    return [Group(label, rows, _best([scores for *_, scores in rows])) for label, rows in found]


def _best(scores: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The best value of each column that has one; with one row, none is best."""
    found: dict[str, float | None] = {}
    for key, better in BEST.items():
        values = [row[key] for row in scores if row.get(key) is not None]
        found[key] = better(values) if len(values) > 1 else None
    return found
