"""Results as tables for the terminal."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from lrbpfl.errors import plain
from lrbpfl.metrics.conformal import needed
from lrbpfl.reports.collect import Result
from lrbpfl.reports.winners import BOLD, over_clients
from lrbpfl.studies.tuning import Scored

ECES = ("ece_pooled", "ece_pooled_floor", "ece_worst", "ece_floor_worst")

Best = Mapping[str, Collection[str]]  # the names that are best, by score


def best_of(results: Sequence[Result]) -> Best:
    """Who is best in a comparison's table, client by client."""
    return {key: over_clients({r.name: [r] for r in results}, key) for key in ("accuracy", "nll", "ece_pooled")}


def summary_table(summary: Mapping[str, Mapping[str, Any]], best: Best | None = None) -> Table:
    """One row per algorithm: how right, how sure, and at what cost; bold, if known, who is best."""
    title = "Every client's own model on its own test data" if _on_test(summary) else None
    caption = f"{BOLD}. Pairs are clients; a worst client has none." if best else None
    table = Table(
        title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("algorithm", no_wrap=True)
    for column in (
        "accuracy\n%", "NLL", "ECE\npooled", "its\nfloor", "ECE worst\nclient", "its\nfloor", "MB\nsent", "seconds",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)

    def marked(name: str, key: str, shown: str) -> str:
        return f"[bold]{shown}[/bold]" if best and name in best.get(key, ()) else shown

    for name, s in summary.items():
        table.add_row(
            escape(name),
            marked(name, "accuracy", _shown(s, "accuracy", ".2f", times=100)),
            *(marked(name, key, _shown(s, key, ".3f")) for key in ("nll", *ECES)),
            f"{(s['bytes_up'] + s['bytes_down']) / 1e6:.1f}",
            f"{s['seconds']:.1f}",
        )
    return table


def new_clients_table(summary: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """One row per algorithm and alpha about clients that never trained; None if there were none."""
    if not any(s.get("new") for s in summary.values()):
        return None
    table = Table(title="New clients, which never trained", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for column in ("alpha", "accuracy\n%", "NLL", "ECE\npooled", "its\nfloor", "ECE worst\nclient", "its\nfloor"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, s in summary.items():
        for alpha, scores in s.get("new", {}).items():
            shown = (_shown(scores, key, ".3f") for key in ("nll", *ECES))
            table.add_row(escape(name), escape(alpha), _shown(scores, "accuracy", ".2f", times=100), *shown)
    return table


def promises_table(summary: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """One row per algorithm, and per alpha of new clients, about prediction sets; None if nobody asked for any."""
    asked = {name: s for name, s in summary.items() if "coverage_promised" in s}
    if not asked:
        return None
    some = next(iter(asked.values()))
    title, caption = _promised(some["coverage_promised"], some.get("confidence"))
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for column in ("clients", "with a\npromise", "coverage\n%", "worst\nclient", "mean\nset size", "worst\nclient"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, s in asked.items():
        groups = {"training": s, **{f"new, {alpha}": scores for alpha, scores in s.get("new", {}).items()}}
        for clients, scores in groups.items():
            shares = (_shown(scores, key, ".2f", times=100) for key in ("coverage", "coverage_worst"))
            sizes = (_shown(scores, key, ".2f") for key in ("set_size", "set_size_worst"))
            count = f"{scores.get('promises', 0)} of {scores.get('clients', 0):.0f}"
            table.add_row(escape(name), escape(clients), count, *shares, *sizes)
    return table


def _promised(coverage: float, confidence: float | None) -> tuple[str, str]:
    """What is promised, and to whom not."""
    how = "on average" if confidence is None else f"with confidence {confidence:g}"
    least = needed(coverage, confidence)
    title = f"Prediction sets: coverage {coverage:g} promised {how}"
    return title, f"A promise needs {least} calibration examples at a client."


def study_table(rows: Sequence[Scored]) -> Table:
    """One row per trial of a search, in the order given; changes are against the first trial, seed by seed.

    Fields of the algorithm go without their section, so that a row fits a terminal of eighty columns.
    """
    title = "Judged on validation parts of training splits"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("setting", overflow="fold")
    ranks = ["rank"] if any("rank" in row.scores for row in rows) else []
    columns = ("NLL", "its\nchange", "accuracy\n%", "ECE\npooled", "its\nfloor", "ECE worst\nclient", *ranks, "seconds")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        s = row.scores
        table.add_row(
            escape(plain(row.label.replace("algorithm.", ""), 200)),
            _shown(s, "nll", ".3f") + _spread(row.nll_spread),
            "" if row.nll_change is None else f"{row.nll_change:+.3f}" + _spread(row.nll_change_spread),
            _shown(s, "accuracy", ".2f", times=100),
            *(_shown(s, key, ".3f") for key in ("ece_pooled", "ece_pooled_floor", "ece_worst")),
            *(_shown(s, key, ".1f") for key in ranks),
            _shown(s, "seconds", ".0f"),
        )
    return table


def _spread(value: float | None) -> str:
    """A spread, below what it belongs to."""
    return "" if value is None else f"\n±{value:.3f}"


def _shown(scores: Mapping[str, Any], key: str, form: str, times: float = 1) -> str:
    """A score in this format, or a dash in a run in which no client could be judged."""
    return f"{times * scores[key]:{form}}" if key in scores else "-"


def _on_test(summary: Mapping[str, Mapping[str, Any]]) -> bool:
    return all("test split" in s["evaluated"] for s in summary.values())


FOOTNOTE = (
    "Floor: what a perfectly calibrated model with these confidences would score on this many examples.\n"
    "Evaluated: {evaluated}; {clients} clients, {trained} examples trained, {judged:.0f} judged, 15 bins."
)


def footnote(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """What the numbers of a summary are about."""
    some = next(iter(summary.values()))
    clients, judged, trained = some.get("clients", 0), some.get("examples", 0), some.get("examples_train", "?")
    of = "" if clients == some.get("clients_train", clients) else f" of {some['clients_train']}"  # not all are judged
    text = FOOTNOTE.format(evaluated=some["evaluated"], clients=f"{clients:.0f}{of}", trained=trained, judged=judged)
    prior = some.get("label_prior")
    if prior:
        text += f"\nLabel prior: {prior:g} (in examples that all classes share), in every algorithm's likelihood."
    for how, words in {"client": "a temperature for each client", "all": "one temperature for all clients"}.items():
        if names := [name for name, s in summary.items() if s.get("temper") == how]:
            text += f"\nTempered after training, with {words}: {', '.join(names)}."
    if spent := {name: s for name, s in summary.items() if "epsilon" in s}:
        each = ", ".join(f"{name} {s['epsilon']:.3g} (at delta {s['delta']:g})" for name, s in spent.items())
        text += f"\nEpsilon, of what the server averaged, for all that a client holds: {each}."
    return text
