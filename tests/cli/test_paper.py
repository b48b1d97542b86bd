"""`lrbpfl paper`: what would run, that nothing runs twice, and pages at the end."""

import re
from pathlib import Path

import pytest

from lrbpfl.cli import paper as command
from lrbpfl.studies import cells, costs, paper
from lrbpfl.studies.items import ITEMS, OVERHEAD, Column, Item, Row, Score
from lrbpfl.studies.paper import Scale
from tests.cli.conftest import Lrbpfl


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item on the digits, at a scale of seconds."""
    columns = [Column("digits", {"dataset": "digits"}, {"model": "mlp"})]
    rows = [Row("fedavg", "fedavg"), Row("lr-bpfl", "lr-bpfl", {"mask_steps": 1, "model_steps": 1})]
    item = Item("A toy", rows, columns, (Score("accuracy", {"fedavg": [12.5]}),), figure="ranks")
    monkeypatch.setitem(ITEMS, "toy", item)
    monkeypatch.setitem(paper.SCALES, "mini", Scale(5, 2, 2))


def test_the_list_names_every_item_and_scale(lrbpfl: Lrbpfl) -> None:
    out = lrbpfl("paper", "list").out
    assert all(name in out for name in (OVERHEAD, *ITEMS, *paper.SCALES))


def test_a_dry_run_tells_what_is_left_and_writes_nothing(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    told = lrbpfl("paper", "run", "toy", "--dry-run")
    assert told.code == 0 and told.out.count("to do") == 2 and "2 of 2 runs, about 0.0 hours" in told.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_times_the_network_that_a_run_trains(lrbpfl: Lrbpfl) -> None:
    small = lrbpfl("paper", "run", "transfer", "--only", "speakers", "--only", "fedavg-ft+temper", "--dry-run")
    assert small.code == 0 and "(mlp)" in small.out and "(cnn)" not in small.out


def test_rows_and_columns_can_be_picked(lrbpfl: Lrbpfl) -> None:
    one = lrbpfl(
        "paper", "run", "calibration", "--seeds", 2, "--only", "fedavg", "--only", "CIFAR-10 5/10", "--dry-run"
    )
    assert one.out.count("to do") == 2 and "fedavg, CIFAR-10 5/10, seed 1" in one.out
    fresh = lrbpfl("paper", "run", "toy", "--only", "fedavg", "--first-seed", 3, "--seeds", 2, "--dry-run")
    assert [f"seed {seed}" in fresh.out for seed in range(6)] == [False, False, False, True, True, False]
    wrong = lrbpfl("paper", "run", "calibration", "--only", "fedavgs", "--dry-run")
    assert wrong.code == 2 and "did you mean 'fedavg'" in wrong.err


def test_runs_are_finished_once_and_reported(lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lrbpfl("paper", "run", "toy", "--workers", 1).code == 0
    assert lrbpfl("paper", "run", "toy", "--dry-run").out.count("finished") == 2
    monkeypatch.setattr(cells, "start", None)  # a run that begins now would fail
    assert lrbpfl("paper", "run", "toy").code == 0
    told = lrbpfl("paper", "report", "toy", "--out", tmp_path / "pages")
    assert told.code == 0 and "toy.md" in told.out
    page = (tmp_path / "pages" / "toy.md").read_text()
    assert "| 12.5 |" in page and "(toy.svg)" in page
    assert "<svg" in (tmp_path / "pages" / "toy.svg").read_text()


def test_the_overhead_is_measured_once_and_told_beside_the_printed_one(
    lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "REPEATS", 1)
    assert lrbpfl("paper", "run", "overhead").code == 0
    monkeypatch.setattr(costs, "measure", None)  # a second measurement would fail
    assert lrbpfl("paper", "run", "overhead").code == 0
    assert lrbpfl("paper", "report", "overhead", "--out", tmp_path / "pages").code == 0
    (row,) = re.findall(r"^\| pfedbayes \| (.*) \|$", (tmp_path / "pages" / "overhead.md").read_text(), re.MULTILINE)
    seconds, *rest = row.split(" | ")
    assert float(seconds) > 0 and rest == ["0.034", "2.55", "2.44", "10.21", "9.76"]


def test_a_failed_run_is_told_and_stops_no_other(
    lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = ITEMS["toy"]
    bad = Column("nowhere", {"dataset": str(tmp_path / "nowhere")}, {"model": "mlp"})
    monkeypatch.setitem(ITEMS, "toy", item._replace(columns=[bad, *item.columns]))
    told = lrbpfl("paper", "run", "toy")
    assert told.code == 1 and "failed: 1/4 toy: " in told.err and told.err.count("failed: ") == 2
    assert lrbpfl("paper", "run", "toy", "--dry-run").out.count("finished") == 2


def test_bad_names_are_one_sentence(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    for arguments, said in (
        (("run", "calibrtion"), "did you mean 'calibration'"),
        (("run", "toy", "--scale", "huge"), "unknown scale 'huge'"),
        (("report", "toy"), "nothing of toy is finished"),
    ):
        told = lrbpfl("paper", *arguments)
        assert told.code == 2 and said in told.err and len(told.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
