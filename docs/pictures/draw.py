"""The pictures of the pages on results and fields, from the CSV files of `docs/studies`.

python docs/pictures/draw.py            # all of them, beside this file (extra `report`)
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lrbpfl.studies import printed

HERE = Path(__file__).parent
STUDIES = HERE.parent / "studies"
OURS, OTHERS, PRINTED, PALE = "#c1440e", "#34495e", "#8e8e8e", "#dddddd"
STYLE = {"font.size": 9, "svg.hashsalt": "lrbpfl", "axes.spines.top": False, "axes.spines.right": False}
Row = dict[str, str]
NLL, ECE = "NLL, nats", "ECE, all clients pooled (floor; 95 % interval of a single seed)"
WORST = "ECE of the worst client (floor)"
METHODS = ("lr-bpfl", "pfedgp", "fedavg-ft", "fedavg-ft+temper", "fedavg", "local", "per-fedavg", "pfedme", "fedbe")
METHODS += ("metavd", "pfedbayes")
LINES = {  # colour and style of a method over rounds
    "lr-bpfl": (OURS, "o-"),
    "lr-bpfl:paper": (OURS, "s:"),
    "lr-bpfl, label prior": (OURS, "D--"),
    "pfedgp": ("#7d5ba6", "^-"),
    "pfedbayes": ("#b8860b", "v-"),
    "fedavg-ft": ("#2a7f62", "P-"),
    "fedavg": (OTHERS, "x-"),
}


def read(name: str) -> list[Row]:
    """The rows of a study, without its comments."""
    with (STUDIES / name).open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def ends(row: Row) -> tuple[float, float, float]:
    """Value and both ends: the interval of a seed, or the standard deviation over seeds, or nothing."""
    value = float(row["value"])
    if row["low"]:
        return value, float(row["low"]), float(row["high"])
    spread = float(row["spread"] or 0)
    return value, value - spread, value + spread


def dots(axes: Axes, rows: Sequence[Row], methods: Sequence[str], printed: bool = False) -> None:
    """A dot with its interval for each method, from the top; what a perfect model would score is a tick."""
    by_name = {row["row"]: row for row in rows}
    for place, name in enumerate(methods):
        row = by_name.get(name)
        if row is None or not row["value"]:
            continue
        value, low, high = ends(row)
        colour = OURS if name == "lr-bpfl" else OTHERS
        axes.plot([max(low, 0), high], [-place, -place], color=colour, lw=1.6)
        axes.plot([value], [-place], "o", color=colour, ms=5)
        if row["floor"]:
            axes.plot([float(row["floor"])], [-place], "|", color=PRINTED, ms=8)
        if printed and row["paper"]:
            axes.plot([float(row["paper"])], [-place], "D", mfc="white", mec=PRINTED, ms=5)
    axes.set_yticks([-place for place in range(len(methods))], methods)
    axes.grid(axis="x", color=PALE, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_ylim(-len(methods) + 0.5, 0.5)


def panels(rows: Sequence[Row], tables: dict[str, str], columns: Sequence[str], across: int, printed: bool) -> Figure:
    """A panel for each column and table; methods from the top, in one order."""
    known = {row["row"] for row in rows}
    methods = [name for name in METHODS if name in known]
    down = -(-len(columns) // across) * len(tables)
    figure = Figure(figsize=(9.2, down * (0.55 + 0.17 * len(methods)) + 0.3), layout="constrained", facecolor="white")
    for number, (table, title) in enumerate(tables.items()):
        for place, column in enumerate(columns):
            line = number * (-(-len(columns) // across)) + place // across
            axes = figure.add_subplot(down, across, line * across + place % across + 1)
            found = [row for row in rows if row["table"] == table and row["column"] == column]
            dots(axes, found, methods, printed)
            axes.set_title(f"{column.removeprefix('new, ')}: {title}", fontsize=9, loc="left")
            if place % across:
                axes.set_yticklabels([])
            likely = [float(row["value"]) for row in found if row["value"]]
            if table == NLL:  # a method that has learned nothing would push the others together
                axes.set_xlim(0, min(max(likely) * 1.08, 4.5 * sorted(likely)[0] + 0.3))
                beyond = axes.get_xlim()[1]
                for row in found:
                    if float(row["value"] or 0) > beyond:
                        axes.plot([beyond], [-methods.index(row["row"])], ">", color=OTHERS, ms=6, clip_on=False)
            else:
                axes.set_xlim(left=0)
    return figure


def forest(rows: Sequence[Row]) -> Figure:
    """How the NLL changes with one change each, three sets of clients; right of 0 is worse."""
    sets = list(dict.fromkeys(row["data"] for row in rows))
    shift = {name: sum(float(r["nll_change"]) for r in rows if r["change"] == name and r["nll_change"])
             for name in {row["change"] for row in rows if row["nll_change"]}}  # fmt: skip
    changes = sorted(shift, key=lambda name: shift[name])
    figure = Figure(figsize=(9.2, 4.2), layout="constrained", facecolor="white")
    for place, data in enumerate(("speakers", "digits-labels", "digits-concept")):
        assert data in sets
        axes = figure.add_subplot(1, 3, place + 1)
        for height, change in enumerate(changes):
            (row,) = [row for row in rows if row["data"] == data and row["change"] == change]
            low, value, high = (float(row[key]) for key in ("low", "nll_change", "high"))
            colour = OURS if low > 0 else OTHERS
            axes.plot([low, high], [height, height], color=colour, lw=1.6)
            axes.plot([value], [height], "o", color=colour, ms=4.5)
        axes.axvline(0, color=PRINTED, lw=1)
        axes.set_xscale("symlog", linthresh=0.05)
        axes.set_xticks([-0.05, 0, 0.05, 0.2, 0.5], ["-0.05", "0", "0.05", "0.2", "0.5"])
        axes.set_xlim(-0.15, 0.7)
        axes.set_yticks(range(len(changes)), changes if place == 0 else [""] * len(changes))
        axes.set_title(data.replace("-", ", "), fontsize=10, loc="left")
        axes.grid(axis="x", color=PALE, lw=0.6)
        axes.set_axisbelow(True)
    figure.supxlabel("change of the NLL in nats (worse to the right), 95 % over five seeds", fontsize=9)
    return figure


def onboarding(rows: Sequence[Row]) -> Figure:
    """The NLL of a new site over its number of examples."""
    figure = Figure(figsize=(9.2, 3.0), layout="constrained", facecolor="white")
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for place, data in enumerate(("speakers", "cifar10")):
        axes = figure.add_subplot(1, 2, place + 1)
        for way, style in zip(ways, ("o-", "s:", "^--", "v-."), strict=True):
            found = [(int(r["n"]), float(r["nll"])) for r in rows if r["data"] == data and r["way"] == way]
            axes.plot(*zip(*found, strict=True), style, label=way, ms=5, color=OURS if way == "mask" else None)
        axes.set(xscale="log", xlabel="examples of the new site", title=data)
        counts = sorted({int(r["n"]) for r in rows if r["data"] == data})
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
        axes.grid(color=PALE, lw=0.6)
        if place == 0:
            axes.set_ylabel("NLL, nats")
            axes.legend(frameon=False)
    return figure


def rounds(rows: Sequence[Row]) -> Figure:
    """Accuracy and ECE over the rounds of the paper's own federation; printed values behind the last round."""
    figure = Figure(figsize=(9.2, 3.2), layout="constrained", facecolor="white")
    columns = {
        "accuracy": ("accuracy", {name: values[0] / 100 for name, values in printed.ACCURACY_SMALL.items()}),
        "ece_pooled": ("ECE, all clients pooled", {name: ece[0][0] for name, ece in printed.CALIBRATION.items()}),
    }
    for place, (column, (title, paper)) in enumerate(columns.items()):
        axes = figure.add_subplot(1, 2, place + 1)
        for name, (colour, style) in LINES.items():
            found = [(int(row["round"]), float(row[column])) for row in rows if row["algorithm"] == name]
            if found:
                axes.plot(*zip(*found, strict=True), style, color=colour, label=name, ms=4.5, clip_on=False)
            value = paper.get(name.removesuffix(":paper"))
            if found and value is not None:
                axes.plot([1060], [value], "D", mfc="white", mec=colour, ms=5, clip_on=False)
        axes.set(xlabel="rounds", title=title, xlim=(150, 1080), xticks=range(200, 1001, 200))
        axes.set_ylim(0, 1 if column == "accuracy" else 0.4)
        axes.grid(color=PALE, lw=0.6)
        if place == 1:
            axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    return figure


def save(figure: Figure, name: str) -> None:
    """Write an SVG, the same bytes for the same figures."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    (HERE / name).write_bytes(file.getvalue())


def main() -> None:
    """Draw them all."""
    transfer, new, table2 = read("transfer.csv"), read("new-clients.csv"), read("fixed-masks-calibration.csv")
    small = ["speakers", "digits, labels", "digits, Dirichlet", "digits, i.i.d.", "digits, features", "digits, concept"]
    cifar = ["CIFAR-10 2/10", "CIFAR-10 5/10", "CIFAR-10 5/10, features", "CIFAR-100 5/100"]
    alphas = [f"new, alpha {alpha}" for alpha in ("0.1", "0.25", "0.5", "0.75", "1.0")]
    with mpl.rc_context(STYLE):
        save(panels(transfer, {NLL: "NLL"}, small, 3, False), "differ-nll.svg")
        save(panels(transfer, {ECE: "ECE"}, small, 3, False), "differ-ece.svg")
        save(panels(transfer, {NLL: "NLL", ECE: "ECE"}, cifar, 4, False), "differ-cifar.svg")
        save(panels(new, {ECE: "ECE", WORST: "worst"}, alphas, 5, True), "new-clients.svg")
        save(panels(table2, {ECE: "ECE"}, [cifar[0], cifar[1], cifar[3]], 3, True), "paper-calibration.svg")
        save(forest([row for row in read("one-change.csv") if row["nll_change"]]), "one-change.svg")
        save(onboarding(read("onboarding.csv")), "onboarding.svg")
        save(rounds(read("paper-scale.csv")), "paper-scale.svg")


if __name__ == "__main__":
    main()
