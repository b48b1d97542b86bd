"""Runs as cells of a study: each keyed by everything that changes its numbers, and computed once."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.errors import plain
from lrbpfl.experiments.build import build
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.experiments.store import fingerprint


class Cell(NamedTuple):
    """A cell that was run: its folder and its scores, or the reason why there are none."""

    path: Path
    scores: Mapping[str, Any]
    failure: str | None = None


def cell_folder(root: Path, config: Config) -> Path:
    """Where the cell of this configuration lies."""
    return root / fingerprint(config)[:16]


def run_cells(
    root: Path,
    configs: Mapping[str, Config],
    progress: Callable[[str, Config], Progress],
    *,
    loading: bool = False,
    keep_models: Callable[[Config], bool] = lambda config: False,
) -> Iterator[tuple[str, Cell]]:
    """Every cell under its label, in order: finished ones as they are, others from where they were cut off.

    A cell that fails is told, and does not stop the others. A finished one keeps its configuration, record, summary,
    predictions and names; checkpoints go, and models unless they are to be kept.
    """
    for label, config in configs.items():
        folder = cell_folder(root, config)
        try:
            if folder.exists():
                summary = resume(folder, progress(label, config), loading=loading)
            else:
                built = build(config, progress=loading)
                summary = start(built.config, folder, built.setup, progress(label, config))
        except Exception as error:
            yield label, Cell(path=folder, scores={}, failure=f"{type(error).__name__}: {plain(error, 500)}")
            continue
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        if not keep_models(config):
            shutil.rmtree(folder / "clients", ignore_errors=True)
            for file in folder.glob("W-*.safetensors"):
                file.unlink()
        yield label, Cell(path=folder, scores=summary[config.algorithm_name])
