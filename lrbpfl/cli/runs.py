"""The commands that run something: run, compare, resume."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.cli.progress import Display
from lrbpfl.disk import usable
from lrbpfl.experiments import config, runner, tracking
from lrbpfl.experiments.build import build
from lrbpfl.experiments.store import Run, refuse_existing
from lrbpfl.reports.collect import collect
from lrbpfl.reports.tables import best_of, footnote, new_clients_table, promises_table, summary_table
from lrbpfl.reports.verdict import verdict
from lrbpfl.studies import comparison

NAME = 60  # characters of a directory's name that come from the data's


def run(
    algorithm: str | None,
    file: Path | None,
    settings: Iterable[str],
    out: Path | None,
    *,
    quiet: bool,
    track: str | None,
) -> None:
    """One algorithm, one directory."""
    tracking.check_tracker(track)
    tables = config.override(config.read(file) if file else {}, settings)
    if algorithm is not None:
        tables["algorithm"] = config.section_of(tables, "algorithm") | {"name": algorithm}
    made = config.parse(tables)
    out = out or _fresh(f"{made.algorithm_name}-{made.data.dataset}")
    refuse_existing(out)  # before data are loaded, which may take long
    made, setup, remarks = build(made, progress=not quiet)
    for sentence in remarks:
        remark(sentence)
    with resumable(out, _go_on(track)), Display(quiet=quiet, track=track) as display:
        summary = runner.start(made, out, setup, display.progress(made.algorithm_name, made))
    _tell(summary, out)


def compare(
    algorithms: list[str],
    file: Path | None,
    settings: Iterable[str],
    out: Path | None,
    *,
    quiet: bool,
    track: str | None,
) -> None:
    """Several algorithms, one directory each, one table."""
    tracking.check_tracker(track)
    algorithms = list(ALGORITHMS) if algorithms == ["all"] else algorithms
    configs = comparison.plan(config.override(config.read(file) if file else {}, settings), algorithms)
    out = out or _fresh(f"compare-{next(iter(configs.values())).data.dataset}")
    refuse_existing(out)
    with resumable(out, _go_on(track)), Display(quiet=quiet, track=track) as display:
        summary = comparison.compare(configs, out, display.progress, loading=not quiet, tell=remark)
    _tell(summary, out)


def resume(directory: Path, *, quiet: bool, track: str | None, any_version: bool) -> None:
    """Whatever is left to do in a directory."""
    tracking.check_tracker(track)
    several = comparison.is_comparison(usable(directory))
    with resumable(directory, _go_on(track)), Display(quiet=quiet, track=track) as display:
        if several:
            summary = comparison.resume_comparison(
                directory, display.progress, loading=not quiet, any_version=any_version
            )
        else:
            _, made = Run.open(directory)
            progress = display.progress(made.algorithm_name, made)
            summary = runner.resume(directory, progress, loading=not quiet, any_version=any_version)
    _tell(summary, directory)


def remark(sentence: str) -> None:
    """Say something about the data that is allowed, but may not be meant."""
    print(f"note: {sentence}", file=sys.stderr)


@contextmanager
def resumable(directory: Path, how: str = "lrbpfl resume {}") -> Iterator[None]:
    """Ctrl-C leaves a run that can go on; say so, and how."""
    try:
        yield
    except KeyboardInterrupt:
        if directory.exists():
            print(f"interrupted; go on with: {how.format(quote(str(directory)))}", file=sys.stderr)
        sys.exit(130)


def _go_on(track: str | None) -> str:
    """The command that goes on with a run, for a directory to be named."""
    return "lrbpfl resume {}" + (f" --track {track}" if track else "")


def _fresh(name: str) -> Path:
    """A directory below runs/ that does not exist yet."""
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(name).name)[:NAME]
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"


def show(summary: dict[str, Any], out: Path) -> Console:
    """The tables of a summary, on a console for what follows them."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    best = best_of(collect([out])) if len(summary) > 1 else {}
    console.print(summary_table(summary, best if console.is_terminal else None))  # bold is seen nowhere else
    if new := new_clients_table(summary):
        console.print(new)
    if sets := promises_table(summary):
        console.print(sets)
    if words := verdict(summary, best):
        console.print(words, markup=False, highlight=False)
    console.print(footnote(summary), markup=False, highlight=False)
    return console


def _tell(summary: dict[str, Any], out: Path) -> None:
    console = show(summary, out)
    files = "config.toml, metrics.jsonl (every round, client and metric), summary.json, clients/ (their own models)"
    several = f"summary.json, and a directory for each algorithm with {files}"
    where = f"In {out}: {several if comparison.is_comparison(out) else files}."
    console.print(where, soft_wrap=True, markup=False, highlight=False)
    console.print(f"A page about it: lrbpfl report {quote(str(out))}", soft_wrap=True, markup=False, highlight=False)
    if lost := [name for name, scores in summary.items() if not scores.get("clients")]:
        print(f"no client's model could be judged ({', '.join(lost)}): metrics.jsonl has the reasons", file=sys.stderr)
        sys.exit(1)
