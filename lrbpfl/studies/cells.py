"""Runs as cells of a study: each keyed by everything that changes its numbers, and computed once."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.disk import DiskFault, remove_folder
from lrbpfl.errors import plain
from lrbpfl.experiments import provenance
from lrbpfl.experiments.build import build, data_hash
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.experiments.store import fingerprint, read_origin


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
    any_version: bool = False,
    keep_models: Callable[[Config], bool] = lambda config: False,
) -> Iterator[tuple[str, Cell]]:
    """Every cell under its label, in order: finished ones as they are, others from where they were cut off.

    A cell that fails is told, and does not stop the others, unless the disk does. A finished one keeps its
    configuration, record, summary, predictions and names; checkpoints go, and models unless they are to be kept. One
    that was made with other data than there are now fails, and one of other versions unless these are allowed.
    """
    for label, config in configs.items():
        folder = cell_folder(root, config)
        try:
            summary = _run(folder, config, progress(label, config), loading=loading, any_version=any_version)
        except DiskFault:
            raise
        except Exception as error:
            yield label, Cell(path=folder, scores={}, failure=f"{type(error).__name__}: {plain(error, 500)}")
            continue
        remove_folder(folder / "checkpoint")
        if not keep_models(config):
            remove_folder(folder / "clients")
            for file in folder.glob("W-*.safetensors"):
                file.unlink()
        yield label, Cell(path=folder, scores=summary[config.algorithm_name])


def _run(folder: Path, config: Config, progress: Progress, *, loading: bool, any_version: bool) -> dict[str, Any]:
    if (folder / "summary.json").exists():
        now = {**provenance.versions(), "device": config.engine.device, "data": data_hash(config.data)}
        if told := provenance.check_provenance(folder, read_origin(folder), now, any_version=any_version):
            progress.tell(told)
    if (folder / "config.toml").exists():
        return resume(folder, progress, loading=loading, any_version=any_version)
    built = build(config, progress=loading)
    return start(built.config, folder, built.setup, progress)
