"""A search: what it tries, that it never sees test data, that nothing is computed twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lrbpfl.errors import BadInput
from lrbpfl.experiments.runner import Progress
from lrbpfl.studies import cells, tuning
from lrbpfl.studies.cells import Cell, run_cells
from lrbpfl.studies.tuning import UNCHANGED, Scored, plan, ranked, search
from tests.experiments.conftest import Configure, files


@pytest.fixture
def tables(folder: Path) -> dict[str, Any]:
    return {
        "data": {"dataset": str(folder), "train_fraction": 0.5},
        "federation": {"rounds": 2, "cohort": 2, "model": "mlp"},
        "engine": {"kind": "serial"},
        "algorithm": {"name": "fedavg", "local_steps": 2},
    }


def test_one_change_at_a_time_after_the_base(tables: dict[str, Any]) -> None:
    trials = plan(tables, ["algorithm.lr=0.01,0.2", "federation.label_prior=1.0"], grid=False, seeds=2)
    changes = [UNCHANGED, "algorithm.lr=0.01", "algorithm.lr=0.2", "federation.label_prior=1.0"]
    assert [trial.label for trial in trials] == changes
    assert [trial.configs[0].tables()["algorithm"]["lr"] for trial in trials] == [0.1, 0.01, 0.2, 0.1]
    assert [trial.configs[0].federation.label_prior for trial in trials] == [0, 0, 0, 1]
    assert all([config.federation.seed for config in trial.configs] == [0, 1] for trial in trials)


def test_a_grid_has_every_combination(tables: dict[str, Any]) -> None:
    trials = plan(tables, ["algorithm.lr=0.01,0.2", "algorithm.local_steps=1,2,3"], grid=True, seeds=1)
    fields = [trial.configs[0].tables()["algorithm"] for trial in trials]
    assert {(f["lr"], f["local_steps"]) for f in fields} == {(lr, n) for lr in (0.01, 0.2) for n in (1, 2, 3)}
    assert len(trials) == 6


def test_validation_data_judge_and_test_data_never(tables: dict[str, Any]) -> None:
    (trial,) = plan(tables, [], grid=False, seeds=1)
    assert trial.configs[0].federation.evaluate_on == "validation"
    assert trial.configs[0].data.validation_fraction == 0.2
    tables["federation"]["evaluate_on"] = "test"
    with pytest.raises(BadInput, match="judged on validation data"):
        plan(tables, [], grid=False, seeds=1)


def test_a_change_may_set_several_fields(tables: dict[str, Any]) -> None:
    trials = plan(tables, ["algorithm.lr=0.01; algorithm.local_steps=1,3"], grid=False, seeds=1)
    fields = [trial.configs[0].tables()["algorithm"] for trial in trials]
    assert [(f["lr"], f["local_steps"]) for f in fields] == [(0.1, 2), (0.01, 1), (0.01, 3)]
    assert trials[1].label == "algorithm.lr=0.01, algorithm.local_steps=1"


@pytest.mark.parametrize("text", ["algorithm.lr", "algorithm.lr=", "=1,2", "algorithm.lr=,", "algorithm.lr=0.1;"])
def test_a_variation_without_values_is_refused(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput, match="--vary"):
        plan(tables, [text], grid=False, seeds=1)


@pytest.mark.parametrize(
    ("vary", "grid"),
    [(["algorithm.lr=0.1; algorithm.lr=0.2"], False), (["algorithm.lr=0.1", "algorithm.lr=0.2"], True)],
)
def test_a_field_has_one_value_in_a_change(tables: dict[str, Any], vary: list[str], grid: bool) -> None:
    with pytest.raises(BadInput, match=r"twice: algorithm\.lr=0\.1, algorithm\.lr=0\.2"):
        plan(tables, vary, grid=grid, seeds=1)


def test_seeds_cannot_be_varied_because_every_trial_gets_the_same(tables: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="--seeds"):
        plan(tables, ["federation.seed=1,2"], grid=False, seeds=1)


def test_every_value_is_checked_before_anything_runs(tables: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"algorithm\.lr = -1"):
        plan(tables, ["algorithm.lr=0.1,-1.0"], grid=False, seeds=1)


def test_rows_are_means_over_seeds_and_best_first(tables: dict[str, Any], tmp_path: Path) -> None:
    trials = plan(tables, ["algorithm.lr=0.5"], grid=False, seeds=2)
    rows = list(search(tmp_path, trials, lambda name, config: Progress()))
    by_trial = []
    for row, trial in zip(rows, trials, strict=True):
        nlls = []
        for name, config in zip(row.folders, trial.configs, strict=True):
            (summary,) = json.loads((tmp_path / name / "summary.json").read_text()).values()
            assert "own validation split" in summary["evaluated"]
            assert cells.cell_folder(tmp_path, config).name == name
            nlls.append(summary["nll"])
        assert row.scores["nll"] == pytest.approx(sum(nlls) / 2)
        assert row.nll_spread == pytest.approx(abs(nlls[0] - nlls[1]) / 2**0.5)
        by_trial.append(nlls)
    changes = [after - before for before, after in zip(*by_trial, strict=True)]
    assert rows[0].nll_change is rows[0].nll_change_spread is None
    assert rows[1].nll_change == pytest.approx(sum(changes) / 2)
    assert rows[1].nll_change_spread == pytest.approx(abs(changes[0] - changes[1]) / 2**0.5)
    told = json.loads((tmp_path / "study.json").read_text())
    assert [row["label"] for row in told] == [row.label for row in ranked(rows)]
    assert told[0]["scores"]["nll"] <= told[1]["scores"]["nll"]


def test_a_row_without_scores_comes_last() -> None:
    empty = Scored(
        "broken", {}, nll_spread=None, nll_change=None, nll_change_spread=None, folders=(), failures=("why",)
    )
    rows = [empty, empty._replace(label="good", scores={"nll": 1.0}, failures=())]
    assert [row.label for row in ranked(rows)] == ["good", "broken"]


def test_what_is_finished_is_not_computed_again(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = plan(tables, [], grid=False, seeds=1)
    first = list(search(tmp_path, trials, lambda name, config: Progress()))
    before = {file: (tmp_path / file).read_bytes() for file in files(tmp_path)}

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("this cell is there already")

    monkeypatch.setattr(cells, "start", never)
    assert list(search(tmp_path, trials, lambda name, config: Progress())) == first
    assert {file: (tmp_path / file).read_bytes() for file in files(tmp_path)} == before


def test_the_judges_are_part_of_every_summary(configure: Configure, tmp_path: Path) -> None:
    ((_, cell),) = run_cells(tmp_path, {"a": configure()}, lambda name, config: Progress())
    assert {*tuning.JUDGED} - {"rank"} <= cell.scores.keys()


def test_a_seed_that_failed_in_either_trial_is_no_part_of_a_change(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nlls = iter([1.0, 2.0, 4.0, 1.5, None, 4.25])

    def scored(root: Path, configs: dict[str, Any], *args: object, **kwargs: object) -> Iterator[tuple[str, Cell]]:
        for label in configs:
            nll = next(nlls)
            yield label, Cell(root / label, {}, "why") if nll is None else Cell(root / label, {"nll": nll})

    monkeypatch.setattr(tuning, "run_cells", scored)
    trials = plan(tables, ["algorithm.lr=0.5"], grid=False, seeds=3)
    _, row = search(tmp_path, trials, lambda name, config: Progress())
    assert row.scores == {"nll": pytest.approx((1.5 + 4.25) / 2)}
    assert row.nll_change == pytest.approx((0.5 + 0.25) / 2)
    assert row.failures == ("why",)
