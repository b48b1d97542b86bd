"""The figure at a glance: how sure each run is and how often it is right, with its NLL and ECE."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lrbpfl.errors import BadInput
from lrbpfl.reports.collect import Result
from lrbpfl.reports.figures import COLOURS, FEW, STYLE, encoded

ACROSS = 2  # panels in a row, so that a phone shows them large enough
INK, PALE = "#222222", "#888888"


def overview(results: Sequence[Result], kind: str) -> bytes:
    """The figure as a file of that kind, png or svg."""
    kept = [result for result in results if result.pooled and result.scores.get("nll") is not None]
    if not kept:
        raise BadInput("--overview draws predictions and scores, and none of these runs has both")
    with mpl.rc_context(STYLE):
        return encoded(_drawn(kept), kind)


def _drawn(kept: Sequence[Result]) -> Figure:
    """A reliability diagram for each run, all clients together, under its NLL and ECE; the likeliest in bold."""
    rows = -(-len(kept) // ACROSS)
    figure = Figure(figsize=(6.4, 0.5 + 3.3 * rows), layout="constrained", facecolor="white")
    best = min(kept, key=lambda result: result.scores["nll"])
    for place, result in enumerate(kept):
        axes = figure.add_subplot(rows, ACROSS, place + 1)
        _panel(axes, result)
        weight = "bold" if result is best else "normal"
        axes.set_title(_caption(result), fontsize=12, fontweight=weight, loc="left", color=INK)
        axes.set_xlabel("how sure it is, %" if place >= len(kept) - ACROSS else "")
        axes.set_ylabel("how often it is right, %" if place % ACROSS == 0 else "")
    return figure


def _caption(result: Result) -> str:
    scores = result.scores
    ece = scores.get("ece_pooled")
    return f"{result.name}\nNLL {scores['nll']:.2f}" + ("" if ece is None else f", ECE {100 * ece:.1f} %")


def _panel(axes: Axes, result: Result) -> None:
    """Accuracy over confidence, bins as dots whose area is their number of predictions, and the gap to the diagonal."""
    assert result.pooled
    bins = [row for row in result.pooled["bins"] if row[1] >= FEW]
    most = max((examples for _, examples, _, _ in bins), default=1)
    sure, right = ([100 * row[column] for row in bins] for column in (2, 3))
    axes.plot([0, 100], [0, 100], "--", color=PALE, lw=1.2)
    axes.fill_between(sure, right, sure, color=COLOURS[1], alpha=0.25, lw=0)
    axes.plot(sure, right, "-", color=COLOURS[0], lw=2)
    axes.scatter(sure, right, [20 + 130 * row[1] / most for row in bins], color=COLOURS[0], zorder=3, clip_on=False)
    axes.set(xlim=(0, 100), ylim=(0, 100), xticks=range(0, 101, 25), yticks=range(0, 101, 25), aspect="equal")
    axes.tick_params(labelsize=10)
    axes.xaxis.label.set_fontsize(11)
    axes.yaxis.label.set_fontsize(11)
