"""Results as tables for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def summary_table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per algorithm: how right, how sure, and at what cost."""
    table = Table(title="Every client's own model on its own test data" if _on_test(summary) else None)
    table.add_column("algorithm")
    for column in (
        "accuracy %", "NLL", "ECE pooled\n(floor)", "ECE debiased\n[95 % interval]", "worst client\nECE (floor)",
        "worst client\naccuracy %", "MB up\n+ down", "seconds",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for name, s in summary.items():
        table.add_row(
            name,
            f"{100 * s['accuracy']:.2f}",
            f"{s['nll']:.3f}",
            f"{s['ece_pooled']:.3f} ({s['ece_pooled_floor']:.3f})",
            f"{s['ece_pooled_debiased']:.3f} [{s['ece_pooled_low']:.3f}, {s['ece_pooled_high']:.3f}]",
            f"{s['ece_worst']:.3f} ({s['ece_floor_worst']:.3f})",
            f"{100 * s['accuracy_worst']:.2f}",
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
