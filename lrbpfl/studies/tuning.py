"""A search over fields, judged on validation parts of the training splits: one change at a time, or a grid."""

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.disk import write_file
from lrbpfl.engines.work import Setup, check_setup
from lrbpfl.errors import BadInput, plain, shown
from lrbpfl.experiments.build import build
from lrbpfl.experiments.config import SECTIONS, Config, override, parse, section_of
from lrbpfl.experiments.runner import Progress
from lrbpfl.experiments.store import claimed
from lrbpfl.studies.cells import Cell, cell_folder, run_cells

UNCHANGED = "as it is"
JUDGED = ("nll", "accuracy", "ece_pooled", "ece_pooled_floor", "ece_pooled_debiased", "ece_worst", "rank", "seconds")


class Trial(NamedTuple):
    """One row of a study: settings on top of the base, with one configuration for each seed."""

    label: str
    configs: tuple[Config, ...]


class Scored(NamedTuple):
    """What a trial scored: means over its seeds, and what it gains or loses against the first trial, seed by seed.

    A seed deals the data anew, so seeds differ by more than most changes do: the differences under the same seed tell.
    """

    label: str
    scores: dict[str, float]
    nll_spread: float | None  # standard deviation over the seeds; None with a single one
    nll_change: float | None  # mean of NLL - the first trial's NLL with the same seed; None for the first itself
    nll_change_spread: float | None  # standard deviation of these differences; None with a single one
    folders: tuple[str, ...]
    failures: tuple[str, ...]


def plan(tables: Mapping[str, Any], vary: Sequence[str], *, grid: bool, seeds: int) -> list[Trial]:
    """The base first, then one trial for each change (or each combination of them, base included, in a grid)."""
    wanted = section_of(tables, "federation")
    if wanted.get("evaluate_on", "validation") != "validation":
        raise BadInput("a search is judged on validation data: leave federation.evaluate_on out")
    base = override(tables, ['federation.evaluate_on="validation"'])
    base["data"] = {"validation_fraction": 0.2, **section_of(base, "data")}
    first = parse(base).federation.seed

    def trial(settings: tuple[str, ...]) -> Trial:
        keys = [setting.partition("=")[0] for setting in settings]
        if len(set(keys)) < len(keys):
            raise BadInput(f"one change sets a field twice: {plain(', '.join(settings), 300)}")
        changed = override(base, settings)
        configs = (parse(override(changed, [f"federation.seed={first + s}"])) for s in range(seeds))
        return Trial(label=", ".join(settings) or UNCHANGED, configs=tuple(configs))

    changes = [_changes(text) for text in vary]
    if grid:
        return [trial(tuple(itertools.chain(*combined))) for combined in itertools.product(*changes)]
    return [trial(()), *(trial(change) for values in changes for change in values)]


def _changes(text: str) -> list[tuple[str, ...]]:
    """`section.key=a,b,c` as one change for each value; `section.key=a; section.other=b` as one change of both."""
    return list(itertools.product(*(_values(part, text) for part in text.split(";"))))


def _values(part: str, text: str) -> list[str]:
    """`section.key=a,b,c`, a part of a --vary, as one setting for each value."""
    key, equals, values = part.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not (equals and key.strip() and found):
        raise BadInput(f"--vary {shown(text)} is not of the form section.key=value,value, e.g. algorithm.lr=0.01,0.1")
    if key.strip() == "federation.seed":
        raise BadInput("seeds are no change to compare: --seeds N runs every trial with N of them")
    return [f"{key.strip()}={value}" for value in found]


def check_trials(root: Path, trials: Sequence[Trial], *, loading: bool = False) -> None:
    """Refuse what would fail before anything runs: data, clients and devices of all trials that are not there yet.

    Trials that differ in fields of the algorithm alone share the data that they are tried on.
    """
    last: tuple[Config, Setup] | None = None
    for config in (trial.configs[0] for trial in trials):
        if cell_folder(root, config).exists():
            continue
        if last is None or any(getattr(last[0], part) != getattr(config, part) for part in SECTIONS):
            last = config, build(config, progress=loading).setup
        check_setup(last[1]._replace(algorithm=config.algorithm))
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{root} cannot be created: {error.strerror}") from None


def search(
    root: Path,
    trials: Sequence[Trial],
    progress: Callable[[str, Config], Progress],
    *,
    loading: bool = False,
    any_version: bool = False,
) -> Iterator[Scored]:
    """Run what is not there yet; one row for each trial as it is done. The rows also go to study.json, best first."""
    rows: list[Scored] = []
    first: list[Cell] = []
    with claimed(root):
        for trial in trials:
            cells = {f"{trial.label} (seed {config.federation.seed})": config for config in trial.configs}
            done = [cell for _, cell in run_cells(root, cells, progress, loading=loading, any_version=any_version)]
            rows.append(_row(trial.label, done, first))
            first = first or done
            write_file(root / "study.json", (json.dumps([r._asdict() for r in ranked(rows)], indent=2) + "\n").encode())
            yield rows[-1]


def _row(label: str, cells: Sequence[Cell], first: Sequence[Cell]) -> Scored:
    """Cells of one trial, one for each seed, beside those of the first trial (none: this is the first)."""
    scored = [cell.scores for cell in cells if "nll" in cell.scores]
    common = [key for key in JUDGED if scored and all(key in scores for scores in scored)]  # not all have ranks
    nlls = [scores["nll"] for scores in scored]
    pairs = [(cell.scores, base.scores) for cell, base in zip(cells, first, strict=False)]
    changes = [now["nll"] - base["nll"] for now, base in pairs if "nll" in now and "nll" in base]
    return Scored(
        label=label,
        scores={key: statistics.fmean(s[key] for s in scored) for key in common},
        nll_spread=_spread(nlls),
        nll_change=statistics.fmean(changes) if changes else None,
        nll_change_spread=_spread(changes),
        folders=tuple(cell.path.name for cell in cells),
        failures=tuple(cell.failure for cell in cells if cell.failure),
    )


def _spread(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def ranked(rows: Sequence[Scored]) -> list[Scored]:
    """The rows by their NLL, best first; those without one at the end."""
    return sorted(rows, key=lambda row: row.scores.get("nll", float("inf")))
