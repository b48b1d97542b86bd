"""The command that tries many configurations: tune."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from lrbpfl.cli.progress import Display
from lrbpfl.cli.runs import NAME, resumable
from lrbpfl.disk import usable
from lrbpfl.errors import BadInput, plain
from lrbpfl.experiments import config
from lrbpfl.reports.tables import study_table
from lrbpfl.studies import tuning


def tune(
    algorithm: str | None,
    vary: Sequence[str],
    file: Path | None,
    settings: Iterable[str],
    out: Path | None,
    *,
    grid: bool,
    seeds: int,
    quiet: bool,
    any_version: bool,
) -> None:
    """Run the trials, and show them with the best on top; exit code 1 if one of them failed."""
    tables = config.override(config.read(file) if file else {}, settings)
    if algorithm is not None:
        tables["algorithm"] = config.section_of(tables, "algorithm") | {"name": algorithm}
    trials = tuning.plan(tables, vary, grid=grid, seeds=seeds)
    some = trials[0].configs[0]
    out = out or Path("runs") / f"tune-{some.algorithm_name}-{Path(some.data.dataset).name[:NAME]}".replace(":", "-")
    if usable(out).exists() and not out.is_dir():
        raise BadInput(f"{out} is no directory: name another with --out")
    tuning.check_trials(out, trials, loading=not quiet)
    with resumable(out, "the same command"), Display(quiet=quiet, many=True) as display:
        rows = list(tuning.search(out, trials, display.progress, loading=not quiet, any_version=any_version))
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(study_table(tuning.ranked(rows)))
    console.print(f"In {out}: study.json, and a directory for each run.", soft_wrap=True, markup=False, highlight=False)
    failures = [f"{row.label}: {reason}" for row in rows for reason in row.failures]
    for failure in failures:
        print(f"failed: {plain(failure)}", file=sys.stderr)
    if failures:
        sys.exit(1)
