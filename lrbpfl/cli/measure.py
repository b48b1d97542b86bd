"""The commands that look at the machine: bench and doctor."""

import json
import sys

from rich.console import Console
from rich.table import Table

from lrbpfl.data.datasets import default_root
from lrbpfl.experiments import bench as benchmark
from lrbpfl.experiments.doctor import examine


def bench(repeats: int, *, as_json: bool) -> None:
    """Measure and print."""
    print("measuring; the ten repeats of the default take about two minutes", file=sys.stderr)
    figures = benchmark.measure(repeats)
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title=f"The paper's CNN, batch {benchmark.BATCH}, C = {benchmark.SAMPLES}, rank {benchmark.RANK}")
    table.add_column("what")
    table.add_column(f"best of {repeats}", justify="right")
    for name, value in figures.items():
        if name != "repeats":
            shown = f"{1000 * value:.1f} ms" if name.endswith("_seconds") else f"{value:.2f}"
            table.add_row(name.removesuffix("_seconds").replace("_", " "), shown)
    Console().print(table)


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
