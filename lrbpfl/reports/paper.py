"""The paper's tables from finished runs, as Markdown: our score and the printed one side by side."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.experiments.config import Config
from lrbpfl.metrics.calibration import BINS
from lrbpfl.reports import finished
from lrbpfl.reports.collect import Result, collect
from lrbpfl.reports.winners import BOLD, PAIRED, SEEDS, over_clients, over_seeds
from lrbpfl.studies import costs
from lrbpfl.studies.cells import cell_folder
from lrbpfl.studies.items import ITEMS, ONE_STEP, OVERHEAD, Item
from lrbpfl.studies.paper import SCALES, Planned, examples_per_client, overhead_file, runs, training_share
from lrbpfl.studies.printed import OVERHEAD as PRINTED_OVERHEAD

MOST_SEEDS = 20  # that a report looks for if it is not told
DASH = "–"


class Style(NamedTuple):
    """How a score is shown."""

    title: str
    digits: int
    times: float = 1.0
    floor: str | None = None  # the score of a calibrated model with the same confidences
    interval: tuple[str, str] | None = None  # the ends of its 95 % interval
    judged: bool = True  # whether one can be better than another


STYLES = {
    "accuracy": Style("Accuracy, %", 2, times=100),
    "nll": Style("NLL, nats", 3),
    "ece_pooled": Style(
        "ECE, all clients pooled (floor; 95 % interval of a single seed)",
        3,
        floor="ece_pooled_floor",
        interval=("ece_pooled_low", "ece_pooled_high"),
    ),
    "ece_pooled_debiased": Style("ECE, all clients pooled, without its bias", 3),
    "mce_pooled": Style("MCE: the largest gap of all bins, however few examples a bin has", 3),
    "ece_worst": Style("ECE of the worst client (floor)", 3, floor="ece_floor_worst"),
    "rank": Style("Mean rank that clients keep", 2, judged=False),
}

Cell = Sequence[
    tuple[Planned, Mapping[str, Any]]
]  # one row and column: the finished runs, seed by seed, and their scores
Found = Mapping[tuple[str, str], Cell]  # by row and column
Load = Callable[[Config], Result]  # a finished run, with its clients


def scored(root: Path, run: Planned) -> Mapping[str, Any] | None:
    """The scores of a run for its column; None if it is not finished."""
    folder = cell_folder(root, run.config)
    if not (folder / "summary.json").is_file():
        return None
    _, scores = finished.summary(folder)
    with finished.reading(folder / "summary.json"):
        own = scores if run.column.new_alpha is None else scores["new"][str(run.column.new_alpha)]
        return {"seconds": scores["seconds"], **own}


def page(name: str, scale: str, root: Path, most: int | None = None, first: int = 0) -> str | None:
    """One item as a Markdown page, of at most so many seeds from the first on; None if nothing of it is finished."""
    if name == OVERHEAD:
        return _overhead_page(root)
    item, found = ITEMS[name], find(name, scale, root, most, first)
    if not found:
        return None

    @cache
    def load(config: Config) -> Result:
        (result,) = collect([cell_folder(root, config)])
        return result

    seeds = _seeds(item, found, first)
    finished = {run.config: scores for cell in found.values() for run, scores in cell}
    hours = sum(scores["seconds"] for scores in finished.values()) / 3600
    printed = " *paper*: the printed value, of a larger federation." if any(s.printed for s in item.scores) else ""
    rates = "rates tuned on validation data" if SCALES[scale].tuned else "rates as printed"
    parts = [
        f"# {item.title}",
        f"Scale `{scale}`: {SCALES[scale]}, {rates}. Seeds: {_told(seeds, first)}. Runs: {len(finished)}, "
        f"{hours:.1f} hours in all. Made by",
        _commands(item, f"{name} --scale {scale}", seeds, most, first),
        *([item.about] if item.about else []),
        "Every client's own model after the last round, on its own test data. Over several seeds: mean ± standard "
        f"deviation. {BOLD}; only rows with all seeds are compared. Pairs are seeds if there are {SEEDS} or more, and "
        f"otherwise clients (a worst client, a largest gap and a debiased ECE have none).{printed}",
        *(_score_table(item, i, found, load) for i in range(len(item.scores))),
    ]
    if item.bins:
        parts.append(_bins_table(item, one_list(results(name, scale, root, first)), first))
    if len(item.rows) > 2 and not any("rounds" in column.federation for column in item.columns):
        parts.append(_work_table(item, scale, found))
    return "\n\n".join(parts) + "\n"


def _seeds(item: Item, found: Found, first: int) -> dict[str, int]:
    """How many seeds, counted from the first, each column has of what it has most of."""
    most: dict[str, int] = {}
    for column in item.columns:
        own = [run.seed - first + 1 for row in item.rows for run, _ in found.get((row.name, column.name), ())]
        if own:
            most[column.name] = max(own)
    return most


def _told(seeds: Mapping[str, int], first: int) -> str:
    """The seeds that all columns have and, in brackets, those of columns that have more."""

    def listed(number: int) -> str:
        return ", ".join(map(str, range(first, first + number)))

    fewest = min(seeds.values())
    more = [f"{column}: {listed(number)}" for column, number in seeds.items() if number > fewest]
    return listed(fewest) + (f" ({'; '.join(more)})" if more else "")


def _commands(item: Item, about: str, seeds: Mapping[str, int], most: int | None, first: int) -> str:
    """What makes the page: the seeds that all its columns have, then those that only some have."""
    about += f" --first-seed {first}" if first else ""
    lines = []
    for number in sorted(set(seeds.values())):
        own = [column for column, n in seeds.items() if n >= number]
        only = [f" --only '{column}'" for column in own] if len(own) < len(item.columns) else []
        lines.append(f"lrbpfl paper run {about} --seeds {number}{''.join(only)}")
    kept_to = f" --seeds {most}" if most else ""
    return "\n".join(["```", *lines, f"lrbpfl paper report {about}{kept_to}", "```"])


def find(name: str, scale: str, root: Path, most: int | None = None, first: int = 0) -> Found:
    """Everything of an item that is finished, of at most so many seeds from the first on."""
    found: dict[tuple[str, str], list[tuple[Planned, Mapping[str, Any]]]] = {}
    for run in runs(name, scale, range(first, first + (most or MOST_SEEDS))):
        scores = scored(root, run)
        if scores is not None:
            found.setdefault((run.row.name, run.column.name), []).append((run, scores))
    return found


def results(name: str, scale: str, root: Path, first: int = 0) -> dict[str, list[Result]]:
    """The finished runs of an item's first seed, under the names of their rows, by the first column that shows them."""
    chosen: dict[Path, tuple[str, str]] = {}
    for spot, cell in find(name, scale, root, first=first).items():
        chosen.setdefault(cell_folder(root, cell[0][0].config), spot)
    panels: dict[str, list[Result]] = {}
    for result, (row, column) in zip(collect(list(chosen)), chosen.values(), strict=True):
        panels.setdefault(column, []).append(result._replace(name=row))
    return panels


def one_list(panels: Mapping[str, Sequence[Result]]) -> list[Result]:
    """All runs, under the names of row and column where there are several columns."""
    return [
        result._replace(name=f"{result.name}, {column}") if len(panels) > 1 else result
        for column, of_column in panels.items()
        for result in of_column
    ]


def _score_table(item: Item, place: int, found: Found, load: Load) -> str:
    key, printed = item.scores[place]
    style = STYLES[key]
    columns = [column for column in item.columns if any((row.name, column.name) in found for row in item.rows)]
    most, won = {}, {}
    for column in columns:
        rivals = {row.name: found.get((row.name, column.name), ()) for row in item.rows}
        most[column.name] = max(map(len, rivals.values()))
        complete = {name: cell for name, cell in rivals.items() if len(cell) == most[column.name]}
        won[column.name] = _won(complete, key, column.new_alpha, load) if style.judged else set()
    lines = []
    for row in item.rows:
        cells: list[str] = []
        for column in columns:
            shown = _shown(found.get((row.name, column.name), ()), key, style, most[column.name])
            cells.append(f"**{shown}**" if row.name in won[column.name] else shown)
            if printed:
                values = dict(zip((c.name for c in item.columns), printed.get(row.name, ()), strict=False))
                cells.append(f"{values[column.name]:g}" if column.name in values else DASH)
        lines.append([row.name, *cells])
    heads = [head for column in columns for head in ([column.name, "paper"] if printed else [column.name])]
    return f"## {style.title}\n\n{markdown(['', *heads], lines)}"


def _mean(cell: Cell, key: str) -> float | None:
    values = [scores[key] for _, scores in cell if scores.get(key) is not None]
    return statistics.fmean(values) if values else None


def _won(cells: Mapping[str, Cell], key: str, alpha: float | None, load: Load) -> set[str]:
    """The rows of a column that are best, with equally many seeds each."""
    if len(next(iter(cells.values()))) >= SEEDS:
        by_seed = {
            name: {run.seed: scores[key] for run, scores in cell if scores.get(key) is not None}
            for name, cell in cells.items()
        }
        return over_seeds(by_seed, key)
    if len(cells) < 2 or key not in PAIRED:
        return set()
    return over_clients({name: [load(run.config) for run, _ in cell] for name, cell in cells.items()}, key, alpha)


def _shown(cell: Cell, key: str, style: Style, most: int) -> str:
    """The mean over seeds, its spread, floor and interval, and how many seeds it has if another row has more."""

    def text(value: float) -> str:
        return f"{style.times * value:.{style.digits}f}"

    mean = _mean(cell, key)
    if mean is None:
        return DASH
    values = [scores[key] for _, scores in cell if scores.get(key) is not None]
    spread = f" ± {text(statistics.stdev(values))}" if len(values) > 1 else ""
    floor = _mean(cell, style.floor) if style.floor else None
    aside = [] if floor is None else [text(floor)]
    if len(values) == 1 and style.interval and all(end in cell[0][1] for end in style.interval):
        aside.append(" to ".join(text(cell[0][1][end]) for end in style.interval))
    if len(values) < most:
        aside.append(f"{len(values)} of {most} seeds")
    return f"{text(mean)}{spread}" + (f" ({'; '.join(aside)})" if aside else "")


def _bins_table(item: Item, loaded: Iterable[Result], seed: int) -> str:
    """Accuracy in each bin of confidence, all clients together, where the paper draws it."""
    pooled = {result.name: result.pooled for result in loaded}
    lines = []
    for row, printed in item.bins.items():
        view = pooled.get(row)
        ours = {place: f"{accuracy:.2f} ({n})" for place, n, _, accuracy in view["bins"]} if view else {}
        lines.append([row, *(ours.get(b, DASH) for b in range(len(printed)))])
        lines.append(["paper", *(DASH if value is None else f"{value:.2f}" for value in printed)])
    edges = [f"{b / BINS:.2f}–{(b + 1) / BINS:.2f}" for b in range(BINS)]
    return f"## Accuracy (examples) in each bin of confidence, seed {seed}\n\n{markdown(['', *edges], lines)}"


def _work_table(item: Item, scale: str, found: Found) -> str:
    """What clients compute, in plain steps: examples that go forward, and back, divided by a batch."""
    clients, cohort, rounds, _ = SCALES[scale]
    lines = []
    for row in item.rows:
        configs = [cell[0][0].config for (name, _), cell in found.items() if name == row.name]
        shares: dict[tuple[str, ...], float] = {}  # of the images, for training: the first with so much work
        for config in configs:
            work = costs.work(config.algorithm, examples_per_client(config))
            whole = work.round * cohort * rounds / clients + work.own
            parts = tuple(f"{part / costs.BATCH:,.0f}" for part in (work.round, work.own, whole))
            shares.setdefault(parts, training_share(config))
        for parts, share in shares.items():
            lines.append([f"{row.name}, {100 * share:g} % for training" if len(shares) > 1 else row.name, *parts])
    heads = ["", "a round at one client", "its own model at the end", "the whole run, per client"]
    return f"## Client compute, in plain steps of 32 examples\n\n{markdown(heads, lines)}"


def _overhead_page(root: Path) -> str | None:
    """Table 1, from the measurement in the folder."""
    file = overhead_file(root)
    if not file.is_file():
        return None
    with finished.reading(file):
        return _overhead(json.loads(file.read_text()))


def _overhead(measured: Mapping[str, Any]) -> str:
    lines = []
    for row in ONE_STEP:
        ours = measured["rows"][row.name]
        values = (f"{ours['seconds']:.3f}", f"{ours['parameters'] / 1e6:.2f}", f"{ours['bytes'] / 1e6:.2f}")
        paper = [f"{value:g}" for value in PRINTED_OVERHEAD.get(row.name, ())] or [DASH] * 3
        lines.append([row.name, *(cell for pair in zip(values, paper, strict=True) for cell in pair)])
    heads = ["", "seconds a step", "paper", "parameters, millions", "paper", "MB sent", "paper"]
    about = (
        f"One optimiser step on a batch of 32 (for `pfedgp` on all of a client's {costs.EXAMPLES} examples) on the "
        f"paper's CNN, one thread, best of {measured['repeats']}; the paper's seconds are of another machine. "
        "Parameters: of a client's own model. MB: one message up, 4 bytes a number. Made by"
    )
    command = f"```\nlrbpfl paper run {OVERHEAD}\nlrbpfl paper report {OVERHEAD}\n```"
    return "\n\n".join(["# Table 1: overhead", about, command, markdown(heads, lines)]) + "\n"


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = ["---"] * len(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))
