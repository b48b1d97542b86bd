"""Cells of a study: computed once, gone on with after a cut, and none of them stops the others."""

from pathlib import Path

import pytest

from lrbpfl.experiments.runner import Progress
from lrbpfl.studies.cells import run_cells
from tests.experiments.conftest import Configure, files


def test_a_cell_that_was_cut_off_goes_on(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    ((_, whole),) = run_cells(tmp_path / "whole", {"a": config}, lambda name, config: Progress())

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_cells(tmp_path / "cut", {"a": config}, lambda name, config: Progress(round=stop)))
    ((_, cut),) = run_cells(tmp_path / "cut", {"a": config}, lambda name, config: Progress())
    assert {**cut.scores, "seconds": 0} == {**whole.scores, "seconds": 0}


def test_a_cell_that_fails_is_told_and_the_others_run(configure: Configure, tmp_path: Path) -> None:
    configs = {"bad": configure(data={"dataset": "no such place"}), "good": configure()}
    outcomes = dict(run_cells(tmp_path, configs, lambda name, config: Progress()))
    assert "no such place" in str(outcomes["bad"].failure) and not outcomes["bad"].scores
    assert outcomes["good"].failure is None and outcomes["good"].scores["examples"] > 0


def test_finished_cells_keep_results_and_no_models(configure: Configure, tmp_path: Path) -> None:
    ((_, cell),) = run_cells(tmp_path, {"a": configure()}, lambda name, config: Progress())
    kept = {"config.toml", "metrics.jsonl", "summary.json", "clients.json", "predictions.safetensors"}
    assert {str(file) for file in files(cell.path)} == kept


def test_models_stay_where_they_are_wanted(configure: Configure, tmp_path: Path) -> None:
    configs = {"a": configure()}
    ((_, cell),) = run_cells(tmp_path, configs, lambda name, config: Progress(), keep_models=lambda config: True)
    assert list(cell.path.glob("W-*.safetensors")) and (cell.path / "clients").is_dir()
    assert not (cell.path / "checkpoint").exists()
