"""The commands about the paper's tables and figures: paper list, run and report."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from rich import box
from rich.console import Console
from rich.table import Table

from lrbpfl.cli.progress import Display
from lrbpfl.cli.runs import resumable
from lrbpfl.disk import usable, write_file
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import cores
from lrbpfl.experiments.config import Config, make_algorithm, unknown
from lrbpfl.experiments.store import claimed, fingerprint
from lrbpfl.reports import paper as pages
from lrbpfl.studies import costs, paper
from lrbpfl.studies.cells import cell_folder, run_cells
from lrbpfl.studies.items import ITEMS, ONE_STEP, OVERHEAD

REPEATS = 10  # of the measurement behind Table 1


def show() -> None:
    """Every item, its runs at one seed, and the scales."""
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("item", "what", "methods", "runs a seed"):
        table.add_column(heading, no_wrap=heading == "item")
    table.add_row(OVERHEAD, "Table 1: overhead", str(len(ONE_STEP)), "measured")
    for name, item in ITEMS.items():
        number = len({fingerprint(run.config) for run in paper.runs(name, "mini", [0])})
        table.add_row(name, item.title, str(len(item.rows)), str(number))
    console.print(table)
    for name, scale in paper.SCALES.items():
        console.print(f"--scale {name}: {scale}", markup=False)
    console.print("Items share runs: each is computed once.")


def run(
    items: Sequence[str],
    scale: str,
    seeds: range,
    workers: int,
    only: Sequence[str],
    out: Path,
    *,
    dry: bool,
    quiet: bool,
    any_version: bool,
) -> None:
    """Compute what is not there yet; exit code 1 if a run failed."""
    names = paper.wanted(items, scale)
    usable(out)
    cells = _cells(names, scale, seeds, workers, only)
    if dry:
        _plan(cells, out, workers or cores(), overhead=OVERHEAD in names and not paper.overhead_file(out).exists())
        return
    failures = []
    with resumable(out, "the same command"), claimed(out), Display(quiet=quiet, many=True) as display:
        if OVERHEAD in names:
            _measure_overhead(out)
        for label, cell in run_cells(
            out, cells, display.progress, loading=not quiet, any_version=any_version, keep_models=_has_masks
        ):
            if cell.failure:
                failures.append(f"{label}: {cell.failure}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    first = f" --first-seed {seeds.start}" if seeds.start else ""
    where = "" if out == Path("runs/paper") else f" --runs {quote(str(out))}"
    tables = f"lrbpfl paper report --scale {scale}{first}{where}"
    print(f"In {out}: a directory for each of {len(cells)} runs. Their tables: {tables}")
    if failures:
        sys.exit(1)


def report(items: Sequence[str], scale: str, seeds: int | None, first: int, root: Path, out: Path) -> None:
    """Write a page for each item of which something is finished, and its figure."""
    names = paper.wanted(items, scale)
    for path in (root, out):
        usable(path)
    drawn = find_spec("matplotlib") is not None
    written = []
    for name in names:
        text = pages.page(name, scale, root, seeds, first)
        if text is None:
            continue
        figure = ITEMS[name].figure if name in ITEMS else None
        if figure and drawn:
            from lrbpfl.reports.figures import draw

            file = out / f"{name}.svg"
            panels = pages.results(name, scale, root, first)
            image = dict(draw(pages.one_list(panels), panels, only=figure)).get(f"{figure}.svg")
            if image:
                write_file(file, image)
                text += f"\n![{ITEMS[name].title}]({file.name})\n"
        write_file(out / f"{name}.md", text.encode())
        written.append(f"{name}.md")
    if not written:
        raise BadInput(f"nothing of {', '.join(names)} is finished in {root} at scale {scale}: lrbpfl paper run first")
    print(f"In {out}: {', '.join(written)}")
    if not drawn:
        print("Figures need matplotlib: pip install 'lrbpfl[report]'")


def _cells(names: Sequence[str], scale: str, seeds: range, workers: int, only: Sequence[str]) -> dict[str, Config]:
    """Every run of the items once, the first seed of all items first; `only` names rows and columns to keep to."""
    items = {name: ITEMS[name] for name in names if name in ITEMS}
    rows = {row.name for item in items.values() for row in item.rows}
    columns = {column.name for item in items.values() for column in item.columns}
    for name in only:
        if name not in rows | columns:
            raise unknown("row or column", name, [*sorted(columns), *sorted(rows)])
    rows, columns = (kept & set(only) or kept for kept in (rows, columns))
    found: dict[str, tuple[str, Config]] = {}
    for seed in seeds:
        for name in items:
            for run in paper.runs(name, scale, [seed], workers):
                if run.row.name in rows and run.column.name in columns:
                    found.setdefault(fingerprint(run.config), (f"{name}: {run.label}", run.config))
    return {f"{i}/{len(found)} {label}": config for i, (label, config) in enumerate(found.values(), start=1)}


def _has_masks(config: Config) -> bool:
    """Masks are small, and a rank map is drawn from them."""
    return config.algorithm_name.startswith("lr-bpfl")


def _plan(cells: dict[str, Config], out: Path, workers: int, *, overhead: bool) -> None:
    """What would run, and for how long."""
    models = sorted({config.federation.model for config in cells.values()})
    steps = {model: costs.plain_step_seconds(model) for model in models}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, width in (("run", None), ("state", len("finished")), ("minutes, about", len("minutes, about"))):
        table.add_column(heading, no_wrap=True, min_width=width)  # in a narrow terminal the first is cut, not these
    works: dict[tuple[str, int], costs.Work] = {}  # seeds and data sets share it
    left, total = 0, 0.0
    for label, config in cells.items():
        folder = cell_folder(out, config)
        if (folder / "summary.json").is_file():
            table.add_row(label, "finished", "")
            continue
        examples = paper.examples_per_client(config)
        kind = (repr(config.algorithm), examples)
        if kind not in works:
            works[kind] = costs.work(config.algorithm, examples)
        seconds = paper.estimate(config, works[kind], steps[config.federation.model], workers)
        left, total = left + 1, total + seconds
        table.add_row(label, "begun" if folder.exists() else "to do", f"{seconds / 60:.1f}")
    console = Console(highlight=False)
    console.print(table)
    measured = " and the measurement of Table 1" if overhead else ""
    plain = " and ".join(f"{1000 * step:.2g} ms here ({model})" for model, step in steps.items())
    console.print(
        f"{left} of {len(cells)} runs{measured}, about {total / 3600:.1f} hours with {workers} workers: "
        f"a plain step takes {plain}, measured on three."
    )


def _measure_overhead(out: Path) -> None:
    """Table 1 into overhead.json, unless it is there."""
    file = paper.overhead_file(out)
    if file.exists():
        return
    rows = {row.name: make_algorithm(row.algorithm, row.fields) for row in ONE_STEP}
    measured = costs.measure(rows, REPEATS)
    found = {
        name: {"seconds": cost.round_seconds, "parameters": cost.numbers.model, "bytes": 4 * cost.numbers.up}
        for name, cost in measured.items()
    }
    write_file(file, (json.dumps({"repeats": REPEATS, "rows": found}, indent=2) + "\n").encode())
