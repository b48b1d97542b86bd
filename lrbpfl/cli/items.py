"""The commands about the paper's tables and figures: paper list, run and report."""

from pathlib import Path
from typing import Annotated

import typer

from lrbpfl.cli.options import AnyVersion, Quiet

paper_app = typer.Typer(help="The paper's tables and figures, beside what it prints.", no_args_is_help=True)
Items = Annotated[list[str], typer.Argument(metavar="ITEM...", help="Names from `lrbpfl paper list`, or: all.")]
ScaleName = Annotated[str, typer.Option(help="mini (hours on two cores), half or paper.")]
FirstSeed = Annotated[int, typer.Option(help="Where seeds are counted from.", min=0)]
PaperRuns = Annotated[Path, typer.Option("--runs", help="Where the runs lie.")]


@paper_app.command("list")
def paper_list() -> None:
    """Show the items, their methods and the scales."""
    from lrbpfl.cli import paper

    paper.show()


@paper_app.command("run")
def paper_run(
    items: Items,
    scale: ScaleName = "mini",
    seeds: Annotated[int, typer.Option(help="How many, from the first on.", min=1)] = 1,
    first_seed: FirstSeed = 0,
    workers: Annotated[int, typer.Option(help="Processes; 0: one for each core.", min=0)] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A row or a column to keep to, e.g. lr-bpfl or 'CIFAR-10 2/10'; repeatable."),
    ] = None,
    runs: PaperRuns = Path("runs/paper"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and for how long.")] = False,
    quiet: Quiet = False,
    any_version: AnyVersion = False,
) -> None:
    """Run whatever is not finished yet; the same command goes on after a cut, and a failed run stops no other."""
    from lrbpfl.cli import paper

    numbers = range(first_seed, first_seed + seeds)
    paper.run(items, scale, numbers, workers, only or [], runs, dry=dry_run, quiet=quiet, any_version=any_version)


@paper_app.command("report")
def paper_report(
    items: Annotated[
        list[str] | None, typer.Argument(metavar="[ITEM]...", help="All that are finished if none.")
    ] = None,
    scale: ScaleName = "mini",
    seeds: Annotated[int | None, typer.Option(help="At most so many, from the first on; else all.", min=1)] = None,
    first_seed: FirstSeed = 0,
    runs: PaperRuns = Path("runs/paper"),
    out: Annotated[Path, typer.Option("--out", "-o", help="A directory for the pages.")] = Path("docs/results"),
) -> None:
    """Write each item as a Markdown page with our scores beside the printed ones, and its figure."""
    from lrbpfl.cli import paper

    paper.report(items or ["all"], scale, seeds, first_seed, runs, out)
