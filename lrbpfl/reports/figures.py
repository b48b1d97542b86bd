"""The figures of the report page as files, PNG and SVG, drawn with matplotlib."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lrbpfl.metrics.calibration import BINS
from lrbpfl.reports.collect import Result, View

COLOURS = (  # those of page.css
    "#0072b2", "#d55e00", "#00805d", "#aa3377", "#9a7400", "#3c93c2", "#7a1f4d", "#555555", "#7d7d2a", "#332288",
)  # fmt: skip
MARKERS = ("o", "s", "D", "^", "v")
FEW = 10  # examples in a bin that is drawn pale
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#bbbbbb",
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",
    "svg.hashsalt": "lrbpfl",  # the same runs give the same file
}


def draw(results: Sequence[Result]) -> Iterator[tuple[str, bytes]]:
    """Every figure as a file name and the file's bytes; a figure for which nothing was recorded is left out."""
    with mpl.rc_context(STYLE):
        figures = {"learning": _learning(results), "reliability": _reliability(results)}
        if len(results) > 1:
            figures["accuracy-ece"] = _scatter(results)
        figures["ranks"] = _ranks(results)
        for name, figure in figures.items():
            if figure is not None:
                for kind in ("png", "svg"):
                    yield f"{name}.{kind}", _encoded(figure, kind)


def _encoded(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    figure.savefig(file, format=kind, dpi=200, bbox_inches="tight", metadata=metadata)
    return file.getvalue()


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _learning(results: Sequence[Result]) -> Figure | None:
    """Accuracy, NLL and ECE over rounds."""
    if not any(result.curves["accuracy"] for result in results):
        return None
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = (("accuracy", "accuracy, %", 100.0), ("nll", "NLL, nats", 1.0), ("ece_pooled", "pooled ECE, %", 100.0))
    for place, (key, label, times) in enumerate(panels):
        axes = figure.add_subplot(1, 3, place + 1)
        for i, result in enumerate(results):
            rounds, values = _columns(result.curves[key], times)
            dashed = "--" if i // len(MARKERS) % 2 else "-"
            axes.plot(rounds, values, dashed, marker=MARKERS[i % 5], ms=4, color=_colour(i), label=result.name)
            if key == "ece_pooled":
                axes.plot(*_columns(result.curves["ece_pooled_floor"], times), ":", lw=1, color=_colour(i))
        axes.set(title=f"{label} over rounds", xlabel="round", ylabel=label, xlim=(0, None))
        if key != "accuracy":
            axes.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False)
    return figure


def _columns(curve: Sequence[tuple[int, float]], times: float) -> tuple[list[int], list[float]]:
    return [t for t, _ in curve], [times * value for _, value in curve]


def _scatter(results: Sequence[Result]) -> Figure | None:
    """Accuracy against pooled ECE, with interval and noise floor."""
    judged = [(i, result) for i, result in enumerate(results) if result.scores.get("ece_pooled") is not None]
    if not judged:
        return None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for i, result in judged:
        s = result.scores
        accuracy, ece = 100 * s["accuracy"], 100 * s["ece_pooled"]
        axes.plot(accuracy, ece, MARKERS[i % 5], ms=8, color=_colour(i), label=result.name)
        if s.get("ece_pooled_low") is not None:
            axes.vlines(accuracy, 100 * s["ece_pooled_low"], 100 * s["ece_pooled_high"], color=_colour(i))
        if s.get("ece_pooled_floor") is not None:
            axes.plot(accuracy, 100 * s["ece_pooled_floor"], "_", ms=10, color=_colour(i))
    axes.set(xlabel="accuracy, %", ylabel="pooled ECE, %")
    axes.set_title("Accuracy and calibration error (bars: 95 % interval, short lines: floor)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _reliability(results: Sequence[Result]) -> Figure | None:
    """A row for each run: all clients together, and the worst one."""
    kept = [(i, result) for i, result in enumerate(results) if result.pooled]
    if not kept:
        return None
    figure = Figure(figsize=(7, 4 * len(kept)), layout="constrained")
    grid = figure.add_gridspec(2 * len(kept), 2, height_ratios=[3, 1] * len(kept))
    for row, (i, result) in enumerate(kept):
        worst = None if result.worst is None else result.clients[result.worst]
        views = [("all clients", result.pooled)]
        if worst:
            views.append((f"worst client, {worst['name']}", worst["view"]))
        for column, (title, view) in enumerate(views):
            if view:
                above, below = (figure.add_subplot(grid[2 * row + part, column]) for part in (0, 1))
                _diagram(above, below, view, _colour(i))
                above.set_title(f"{result.name}: {title}")
    return figure


def _diagram(above: Axes, below: Axes, view: View, colour: str) -> None:
    """Accuracy bars with crossbars at the mean confidence; below, how many predictions there are."""
    width = 100 / BINS
    above.plot([0, 100], [0, 100], ":", color="#777777", lw=1)
    for b, examples, confidence, accuracy in view["bins"]:
        middle, alpha = (b + 0.5) * width, 0.2 if examples < FEW else 0.6
        above.bar(middle, 100 * accuracy, 0.9 * width, color=colour, alpha=alpha)
        ink = "#bbbbbb" if examples < FEW else "#222222"
        above.vlines(100 * confidence, 100 * accuracy, 100 * confidence, ink, lw=1.2)
        above.hlines(100 * confidence, middle - 0.45 * width, middle + 0.45 * width, ink, lw=1.2)
        below.bar(middle, examples, 0.9 * width, color=colour)
    above.set(xlim=(0, 100), ylim=(0, 100), ylabel="accuracy, %", xticklabels=[])
    below.set(xlim=(0, 100), xlabel="confidence, %", ylabel="count")


def _ranks(results: Sequence[Result]) -> Figure | None:
    """A map of clients and layers for each run that has masks."""
    masked = [result for result in results if result.layers]
    if not masked:
        return None
    height = sum(0.9 + 0.25 * len(result.layers) for result in masked)
    figure = Figure(figsize=(10, height), layout="constrained")
    for place, result in enumerate(masked):
        axes = figure.add_subplot(len(masked), 1, place + 1)
        unknown = [np.nan] * len(result.layers)
        table = np.array([client["ranks"] or unknown for client in result.clients], dtype=float).T
        image = axes.imshow(table, vmin=0, vmax=result.max_rank, cmap="Blues", aspect="auto", interpolation="none")
        axes.set(yticks=range(len(result.layers)), yticklabels=result.layers, xlabel="client")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{result.name}: rank")
        figure.colorbar(image, ax=axes, label="open gates", ticks=range(result.max_rank + 1))
    return figure
