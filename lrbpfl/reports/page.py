"""One self-contained HTML page about finished runs: opens from a disk, asks nothing of any network."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lrbpfl.experiments.deal import NewKind
from lrbpfl.metrics.calibration import BINS, FEWEST_CLIENTS
from lrbpfl.reports.collect import Result, Scores, differing, in_order, shown_kind
from lrbpfl.reports.promises import RunPromises, sections
from lrbpfl.reports.winners import BOLD, PAIRED, over_clients

DRAWN = (
    "name", "scores", "new", "curves", "pooled", "clients", "worst", "classes", "class_names", "layers", "max_rank",
)  # fmt: skip
EVENTS = 50  # shown at most


def render(results: Sequence[Result]) -> str:
    """The page about these runs; at least one."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "megabytes": megabytes}
    promised = sections(results)
    return environment.from_string(_part("template.html")).render(
        title=_title(results),
        results=results,
        some=results[0],
        best=_best(results),
        bold=BOLD,
        fewest_clients=FEWEST_CLIENTS,
        groups=_groups(results),
        promised=promised,
        differing=differing(results),
        events=[(result.name, event) for result in results for event in result.events],
        most_events=EVENTS,
        css=Markup(_part("page.css")),
        js=Markup(_part("page.js")),
        data=Markup(_embedded(results, promised)),
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


def _embedded(results: Sequence[Result], promised: Sequence[RunPromises]) -> str:
    """What the page draws, as JSON that no name in it can break out of."""
    runs = [{key: getattr(result, key) for key in DRAWN} for result in results]
    sets = [{**section._asdict(), "rows": [row._asdict() for row in section.rows]} for section in promised]
    text = json.dumps({"bins": BINS, "runs": runs, "promised": sets}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _title(results: Sequence[Result]) -> str:
    names = [result.name for result in results]
    what = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
    datasets = {Path(result.tables.get("data", {}).get("dataset", "unknown data")).name for result in results}
    return f"{what} on {', '.join(sorted(datasets))}"


class Panel(NamedTuple):
    """The runs beside each other on the same clients: those that train, or the new ones of one alpha."""

    label: str
    rows: list[tuple[int, str, Scores]]  # place among all runs, name, scores
    best: dict[str, set[str]]  # names, by column


def _groups(results: Sequence[Result]) -> list[Panel]:
    """Of the runs with new clients, the training clients and then each alpha; nothing if there is no such run."""
    runs = [(i, result) for i, result in enumerate(results) if result.new]
    if not runs:
        return []
    trained = [(i, result.name, result.scores) for i, result in runs]
    found = [Panel("training", trained, _best([result for _, result in runs]))]
    for alpha in in_order(alpha for _, result in runs for alpha in result.new):
        rows = [(i, result.name, result.new[alpha]) for i, result in runs if alpha in result.new]
        found.append(Panel(shown_kind(alpha), rows, _best([results[i] for i, *_ in rows], alpha)))
    return found


def _best(results: Sequence[Result], alpha: NewKind | None = None) -> dict[str, set[str]]:
    """The names of the best in each column, by client; none where runs have other clients or other examples."""
    rows = {result.name: [result] for result in results}
    return {key: over_clients(rows, key, alpha) for key in PAIRED}
