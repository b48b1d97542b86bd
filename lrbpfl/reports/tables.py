"""Results as tables for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table


def summary_table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per algorithm: how right, how sure, and at what cost."""
    title = "Every client's own model on its own test data" if _on_test(summary) else None
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for column in (
        "accuracy\n%", "NLL", "ECE\npooled", "its\nfloor", "ECE worst\nclient", "its\nfloor", "MB\nsent", "seconds",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for name, s in summary.items():
        eces = (s[key] for key in ("ece_pooled", "ece_pooled_floor", "ece_worst", "ece_floor_worst"))
        table.add_row(
            name,
            f"{100 * s['accuracy']:.2f}",
            f"{s['nll']:.3f}",
            *(f"{value:.3f}" for value in eces),
            f"{(s['bytes_up'] + s['bytes_down']) / 1e6:.1f}",
            f"{s['seconds']:.1f}",
        )
    return table


def _on_test(summary: Mapping[str, Mapping[str, Any]]) -> bool:
    return all("test split" in s["evaluated"] for s in summary.values())


FOOTNOTE = (
    "Floor: what a perfectly calibrated model with these confidences would score on this many examples.\n"
    "Evaluated: {evaluated}; {clients:.0f} clients, {examples:.0f} examples, 15 bins."
)


def footnote(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """What the numbers of a summary are about."""
    some = next(iter(summary.values()))
    return FOOTNOTE.format(evaluated=some["evaluated"], clients=some["clients"], examples=some["examples"])
