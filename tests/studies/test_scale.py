"""The benchmark of many clients, at toy sizes."""

import json
from pathlib import Path

import pytest

from lrbpfl.cli import measure
from lrbpfl.studies import scale


def test_figures_of_few_clients_and_a_small_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toys = {"SIZES": (3, 300), "NAMES": ("lr-bpfl",), "COHORT": 2, "FILES": 3, "WAYS": {"lazily": "no"}}
    for name, value in toys.items():
        monkeypatch.setattr(scale, name, value)
    monkeypatch.setattr(
        scale, "_apart", lambda name, clients: json.loads(scale.one(name, clients, cohort=2, rounds=3, judged=4))
    )
    measure.scale(as_json=True)
    *some, folder = json.loads(capsys.readouterr().out)["rows"]
    assert [row["clients"] for row in some] == [3, 300]
    for row in some:
        assert 0 < row["round_seconds"] < 60 and row["setup_seconds"] > 0 and row["judged_per_second"] > 0
        assert row["bytes"] > 0 or not Path("/proc").is_dir()
    assert folder["files"] == 3 and folder["first_round_seconds"] > 0
    monkeypatch.setattr(scale, "measure", lambda: iter([*some, folder]))
    measure.scale(as_json=False)
    shown = capsys.readouterr().out
    assert "300" in shown and "a folder of 3 .npz files, read lazily" in shown


def test_a_run_of_the_benchmark_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no-such with 3 clients failed"):
        scale._apart("no-such", 3)
