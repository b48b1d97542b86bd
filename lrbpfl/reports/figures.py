"""The figures of the report page as files, PNG and SVG, drawn with matplotlib."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lrbpfl.metrics.calibration import BINS
from lrbpfl.reports.collect import Result, Scores, View, in_order, shown_kind
from lrbpfl.reports.promises import sections

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


def draw(
    results: Sequence[Result], panels: Mapping[str, Sequence[Result]] | None = None, *, only: str | None = None
) -> Iterator[tuple[str, bytes]]:
    """Every figure, or only one, as a file name and the file's bytes; one for which nothing was recorded is left out.

    `panels`, each with its title, part the runs of the scatters; in all of them a name has the same colour.
    """
    figures: dict[str, Callable[[], Figure | None]] = {
        "learning": lambda: _learning(results),
        "reliability": lambda: _reliability(results),
        "accuracy-ece": lambda: _scatter(panels or {"": results}) if len(results) > 1 else None,
        "nll-ece": lambda: _dots(panels) if panels else None,
        "new-clients": lambda: _new_clients(results),
        "promises": lambda: _promises(results),
        "ranks": lambda: _ranks(results),
    }
    with mpl.rc_context(STYLE):
        for name, make in figures.items():
            figure = make() if only in (None, name) else None
            if figure is not None:
                for kind in ("png", "svg"):
                    yield f"{name}.{kind}", encoded(figure, kind)


def encoded(figure: Figure, kind: str) -> bytes:
    """The bytes of a file of that kind, png or svg."""
    file = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    figure.savefig(file, format=kind, dpi=200, bbox_inches="tight", metadata=metadata)
    return file.getvalue()


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _marker(i: int) -> str:
    return MARKERS[(i + i // len(MARKERS)) % len(MARKERS)]  # colours 0 and 5 are both blue


def _dashes(i: int) -> str:
    return "--" if i // len(MARKERS) % 2 else "-"


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
            axes.plot(rounds, values, _dashes(i), marker=_marker(i), ms=4, color=_colour(i), label=result.name)
            if key == "ece_pooled":
                axes.plot(*_columns(result.curves["ece_pooled_floor"], times), ":", lw=1, color=_colour(i))
        axes.set(title=f"{label} over rounds", xlabel="round", ylabel=label, xlim=(0, None))
        if key != "accuracy":
            axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _legend(figure: Figure) -> None:
    """One for all panels, beside them, so that it covers nothing."""
    handles = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside right upper", frameon=False)


def _columns(curve: Sequence[tuple[int, float]], times: float) -> tuple[list[int], list[float]]:
    return [t for t, _ in curve], [times * value for _, value in curve]


def _scatter(panels: Mapping[str, Sequence[Result]]) -> Figure | None:
    """Accuracy against pooled ECE, with interval and noise floor."""
    judged = {
        title: [result for result in results if result.scores.get("ece_pooled") is not None]
        for title, results in panels.items()
    }
    if not any(judged.values()):
        return None
    names = list(dict.fromkeys(result.name for results in panels.values() for result in results))
    figure = Figure(figsize=(2 + 4 * len(judged), 4), layout="constrained")
    figure.suptitle("Accuracy and calibration error (bars: 95 % interval, short lines: floor)")
    shared: dict[str, Axes] = {}
    for place, (title, results) in enumerate(judged.items()):
        axes = figure.add_subplot(1, len(judged), place + 1, **shared)
        shared = {"sharex": axes, "sharey": axes}
        for result in results:
            s, i = result.scores, names.index(result.name)
            accuracy, ece = 100 * s["accuracy"], 100 * s["ece_pooled"]
            axes.plot(accuracy, ece, _marker(i), ms=8, color=_colour(i), label=result.name)
            if s.get("ece_pooled_low") is not None:
                axes.vlines(accuracy, 100 * s["ece_pooled_low"], 100 * s["ece_pooled_high"], color=_colour(i))
            if s.get("ece_pooled_floor") is not None:
                axes.plot(accuracy, 100 * s["ece_pooled_floor"], "_", ms=10, color=_colour(i))
        axes.set(xlabel="accuracy, %", ylabel="pooled ECE, %", title=title)
    axes.set_ylim(bottom=0)  # once all is drawn: it ends the scaling of the axis, which the panels share
    _legend(figure)
    return figure


def _dots(panels: Mapping[str, Sequence[Result]]) -> Figure:
    """NLL against debiased pooled ECE, a panel for each kind of data with axes of its own: the lower left is best."""
    names = list(dict.fromkeys(result.name for results in panels.values() for result in results))
    across = min(len(panels), 4)
    rows = -(-len(panels) // across)
    figure = Figure(figsize=(2 + 2.7 * across, 0.4 + 2.6 * rows), layout="constrained")
    figure.suptitle("First seed: lower left is best")
    for place, (title, results) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, across, place + 1)
        for result in results:
            nll, ece = (result.scores.get(key) for key in ("nll", "ece_pooled_debiased"))
            if nll is not None and ece is not None:
                i = names.index(result.name)
                axes.plot(nll, 100 * ece, _marker(i), ms=6, color=_colour(i), label=result.name, clip_on=False)
        axes.set(xlabel="NLL, nats", ylabel="debiased ECE, %", title=title)
        axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _new_clients(results: Sequence[Result]) -> Figure | None:
    """Calibration error of new clients over alpha, one step each; that of the training clients apart, at the left."""
    alphas = in_order(alpha for result in results for alpha in result.new)
    if not alphas:
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = (
        ("ece_pooled", "ece_pooled_floor", "pooled ECE, %"),
        ("ece_worst", "ece_floor_worst", "worst client's ECE, %"),
    )
    for place, (key, floor, label) in enumerate(panels):
        axes = figure.add_subplot(1, 2, place + 1)
        for i, result in enumerate(results):
            if result.new:
                over = [result.new.get(alpha, {}) for alpha in alphas]
                style: dict[str, Any] = {"marker": _marker(i), "ms": 4, "color": _colour(i)}
                axes.plot(range(1, 1 + len(alphas)), _percent(over, key), _dashes(i), label=result.name, **style)
                axes.plot([0], _percent([result.scores], key), **style)
                axes.plot(range(1, 1 + len(alphas)), _percent(over, floor), ":_", lw=1, color=_colour(i))
                axes.plot([0], _percent([result.scores], floor), "_", color=_colour(i))
        axes.axvline(0.5, color="#bbbbbb", lw=0.8, ls=":")
        axes.set(xlabel="alpha", ylabel=label, xticks=range(1 + len(alphas)), title=f"new clients: {label}")
        axes.set_xticklabels(["training", *map(shown_kind, alphas)])
        axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _percent(scores: Sequence[Scores], key: str) -> list[float]:
    """One score of each as a percentage; a gap where there is none."""
    return [np.nan if row.get(key) is None else 100 * row[key] for row in scores]


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


def _promises(results: Sequence[Result]) -> Figure | None:
    """Every client's coverage beside the range of chance, a panel for each run with promises; new clients hollow."""
    kept = [section for section in sections(results) if section.rows]
    if not kept:
        return None
    figure = Figure(figsize=(8, 2.6 * len(kept)), layout="constrained")
    for place, section in enumerate(kept):
        axes = figure.add_subplot(len(kept), 1, place + 1)
        colour = _colour(section.run)
        for x, row in enumerate(section.rows):
            axes.bar(x, 100 * (row.high - row.low), 0.7, bottom=100 * row.low, color=colour, alpha=0.3)
            face = "white" if row.new else colour
            axes.plot(x, 100 * row.coverage, _marker(section.run), ms=5, color=colour, mfc=face, clip_on=False)
        axes.axhline(100 * section.promised, color="#777777", ls="--", lw=1)
        axes.set(ylabel="coverage, %", xlabel="clients, by their coverage", xticks=[])
        lowest = min(min(row.low, row.coverage) for row in section.rows)
        axes.set_ylim(bottom=max(100 * lowest - 3, 0), top=100)
        axes.set_title(f"{section.name}: {100 * section.promised:g} % promised (bars: where chance alone may lead)")
    return figure


def _ranks(results: Sequence[Result]) -> Figure | None:
    """A map of training clients and layers for each run that has masks."""
    ranks = [[client["ranks"] for client in result.clients if client["new_alpha"] is None] for result in results]
    masked = [(result, own) for result, own in zip(results, ranks, strict=True) if any(own)]
    if not masked:
        return None
    height = sum(0.9 + 0.25 * len(result.layers) for result, _ in masked)
    figure = Figure(figsize=(10, height), layout="constrained")
    for place, (result, own) in enumerate(masked):
        axes = figure.add_subplot(len(masked), 1, place + 1)
        unknown = [np.nan] * len(result.layers)
        table = np.array([of_client or unknown for of_client in own], dtype=float).T
        image = axes.imshow(table, vmin=0, vmax=result.max_rank, cmap="Blues", aspect="auto", interpolation="none")
        axes.set(yticks=range(len(result.layers)), yticklabels=result.layers, xlabel="client")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{result.name}: rank")
        figure.colorbar(image, ax=axes, label="open gates", ticks=range(result.max_rank + 1))
    return figure
