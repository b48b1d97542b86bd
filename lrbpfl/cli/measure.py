"""The commands that measure: bench, alone or with --cost, --serve, --scale or --engines, and doctor."""

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.data.datasets import default_root
from lrbpfl.studies import bench as benchmark
from lrbpfl.studies import costs as costing
from lrbpfl.studies import scale as scaling
from lrbpfl.studies import service as serving
from lrbpfl.studies.doctor import examine


def bench(repeats: int, *, as_json: bool) -> None:
    """Measure and print."""
    print("measuring; the ten repeats of the default take about two minutes", file=sys.stderr)
    title = f"The paper's CNN, batch {benchmark.BATCH}, C = {benchmark.SAMPLES}, rank {benchmark.RANK}"
    _show(benchmark.measure(repeats), title, as_json=as_json)


def engines(repeats: int, *, as_json: bool) -> None:
    """Time a round in every engine, and print."""
    print("measuring; the three repeats of the default take about a minute", file=sys.stderr)
    title = f"A round of {benchmark.CLIENTS} clients x {benchmark.STEPS} steps, two workers where there are workers"
    _show(benchmark.measure_engines(repeats), title, as_json=as_json)


def _show(figures: dict[str, float], title: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title=title)
    table.add_column("what")
    table.add_column(f"best of {figures['repeats']}", justify="right")
    for name, value in figures.items():
        if name != "repeats":
            shown = f"{1000 * value:.1f} ms" if name.endswith("_seconds") else f"{value:.2f}"
            table.add_row(name.removesuffix("_seconds").replace("_", " "), shown)
    Console().print(table)


def cost(repeats: int, *, as_json: bool) -> None:
    """Count and time every algorithm with its default fields, and print."""
    print("counting and timing every algorithm; the three repeats of the default take some minutes", file=sys.stderr)
    rows = dict(costing.ratios(costing.measure({name: kind() for name, kind in ALGORITHMS.items()}, repeats)))
    if as_json:
        print(json.dumps({"repeats": repeats, "algorithms": rows}))
        return
    console = Console(highlight=False)
    console.print(f"The paper's CNN, 10 classes, one client with {costing.EXAMPLES} examples. How many numbers are")
    numbers = {
        "sent\ndown": "numbers_down",
        "sent\nup": "numbers_up",
        "at the\nserver": "numbers_server",
        "kept by\na client": "numbers_kept",
        "in its own model,\nbeside the message": "numbers_own",
    }
    console.print(_columns(rows, numbers))
    console.print(f"What is computed, one thread, best of {repeats}, and the ratio to a round of FedAvg:")
    computed = {
        "examples forward\nin a round": "examples_a_round",
        "round\nratio": "round_ratio",
        "per example\nratio": "example_ratio",
        "own model\nratio": "personalise_ratio",
        "server\nseconds": "aggregate_seconds",
    }
    console.print(_columns(rows, computed))


def service(*, as_json: bool) -> None:
    """Ask models of many clients in this process, count their memory in another, and print."""
    print("measuring; this takes about a minute", file=sys.stderr)
    figures = serving.measure()
    if as_json:
        print(json.dumps(figures))
        return
    sizes = (
        f"{serving.CLIENTS} clients, {serving.ROWS} rows of different ones a request; memory: {serving.MANY} clients"
    )
    table = Table(title=f"The paper's CNN, {sizes}")
    table.add_column("what")
    table.add_column("one thread", justify="right")
    for name, value in figures.items():
        what, _, unit = name.rpartition("_")
        shown = {"seconds": f"{1000 * value:.1f} ms", "bytes": f"{value / 1e6:.1f} MB"}.get(unit)
        table.add_row((what if shown else name).replace("_", " "), shown or f"{value:,.2f}")
    Console().print(table)


def scale(*, as_json: bool) -> None:
    """Train with ever more clients, and print a line when a figure is there."""
    print("measuring; this takes some minutes", file=sys.stderr)
    rows = []
    for row in scaling.measure():
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in list(row.items())[:2]), "done", file=sys.stderr)
    if as_json:
        print(json.dumps({"cohort": scaling.COHORT, "workers": scaling.WORKERS, "rows": rows}))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    sizes = f"{scaling.FEATURES}-{scaling.HIDDEN}-{scaling.CLASSES} network, {scaling.COHORT} clients a round"
    console.print(
        f"{sizes}, {scaling.WORKERS} workers; the best of {scaling.ROUNDS - 1}, CPU on average, peaks of memory:"
    )
    console.print(_scales([row for row in rows if "algorithm" in row]))
    for row in rows:
        if "files" in row:
            told = f"{row['first_round_seconds']:.1f} s to the end of round 1, {row['bytes'] / 1e6:.0f} MB at most"
            console.print(f"lrbpfl run on a folder of {row['files']:,} .npz files, read {row['read']}: {told}")


def _scales(rows: list[dict[str, Any]]) -> Table:
    """A row for each algorithm and number of clients."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    headings = ["clients", "set-up\ns", "round\ns", "CPU\ns", "checkpoint\nms", "judged\n1/s", "CPU each\nms"]
    table.add_column("algorithm", no_wrap=True)
    for heading in [*headings, "memory\nMB", "a worker's\nMB"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = [f"{row[f'{key}_seconds']:.2f}" for key in ("setup", "round", "round_cpu")]
        checkpoint, one = (f"{1000 * row[f'{key}_seconds']:.0f}" for key in ("checkpoint", "judged_cpu"))
        sizes = [f"{row[key] / 1e6:.0f}" for key in ("bytes", "worker_bytes")]
        rate = f"{row['judged_per_second']:.1f}"
        table.add_row(row["algorithm"], f"{row['clients']:,}", *seconds, checkpoint, rate, one, *sizes)
    return table


def _columns(rows: dict[str, dict[str, float]], headings: dict[str, str]) -> Table:
    """A row for each algorithm and a column for each heading; whole numbers are shown as such."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        shown = (f"{row[key]:,}" if isinstance(row[key], int) else f"{row[key]:.2f}" for key in headings.values())
        table.add_row(name, *shown)
    return table


def doctor() -> None:
    """Print the findings as they come; exit code 1 if something is wrong."""
    console = Console(highlight=False, soft_wrap=True)
    fine = True
    for finding in examine(default_root()):
        mark = "[green]ok[/green]  " if finding.fine else "[red]FAIL[/red]"
        console.print(mark, f"{finding.what}:", end=" ")
        console.print(finding.detail, markup=False)
        fine = fine and finding.fine
    if not fine:
        sys.exit(1)
