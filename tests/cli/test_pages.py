"""`lrbpfl report` on what `run` and `compare` leave behind."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lrbpfl.cli import pages
from tests.cli.conftest import TINY, Lrbpfl


def embedded(page: Path) -> list[dict[str, object]]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    runs: list[dict[str, object]] = json.loads(data)["runs"]
    return runs


def test_a_comparison_ends_in_a_page_and_figures(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("compare", "-a", "lr-bpfl,fedavg", *TINY, "--out", "both")
    assert outcome.out.endswith("A page about it: lrbpfl report both\n")
    assert lrbpfl("report", "both", "--figures", "figures").out.startswith("The page: both/report.html\n")
    first, second = embedded(tmp_path / "both" / "report.html")
    assert (first["name"], second["name"]) == ("lr-bpfl", "fedavg")
    assert first["layers"] == ["fc1", "fc2", "fc3"] and second["layers"] == []
    recorded = json.loads((tmp_path / "both" / "summary.json").read_text())["lr-bpfl"]
    scores = first["scores"]
    assert isinstance(scores, dict)
    assert all(scores.pop(words) == recorded.pop(words) for words in ("evaluated", "temper"))
    assert scores == pytest.approx(recorded, rel=1e-5)
    assert (tmp_path / "figures" / "ranks.png").exists()


def test_clients_keep_the_names_of_their_files(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for name in ("ward-b", "ward <a>"):
        y = np.arange(20) % 2
        np.savez(tmp_path / "sites" / f"{name}.npz", x=np.ones((20, 6), dtype=np.float32) * y[:, None], y=y)
    few = ("--set", "federation.rounds=1", "--set", "federation.cohort=1", "--set", "engine.kind=serial")
    lrbpfl("run", "-a", "fedavg", "--set", "data.dataset=./sites", *few, "--out", "run")
    assert lrbpfl("report", "run", "--out", "page.html").code == 0
    (run,) = embedded(tmp_path / "page.html")
    clients = run["clients"]
    assert isinstance(clients, list)
    assert [client["name"] for client in clients] == ["ward <a>", "ward-b"]


def finished(path: Path) -> Path:
    path.mkdir()
    (path / "config.toml").write_text('[algorithm]\nname = "fedavg"\n')
    (path / "summary.json").write_text('{"fedavg": {"seconds": 1.0}}')
    return path


def test_figures_without_matplotlib_are_refused(
    lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    run = finished(tmp_path / "run")
    outcome = lrbpfl("report", run, "--figures", "figures")
    assert outcome.code == 2 and "pip install 'lrbpfl[report]'" in outcome.err
    assert not (run / "report.html").exists()
    assert lrbpfl("report", run).code == 0  # the page does without


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is no run directory"),
        (["cut"], "lrbpfl resume cut"),
        (["run", "--out", "taken"], "taken is a directory"),
        (["run", "--out", "run/config.toml/page.html"], "run/config.toml/page.html cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(lrbpfl: Lrbpfl, tmp_path: Path, arguments: list[str], words: str) -> None:
    finished(tmp_path / "run")
    (finished(tmp_path / "cut") / "summary.json").unlink()
    (tmp_path / "taken").mkdir()
    before = sorted(tmp_path.rglob("*"))
    outcome = lrbpfl("report", *arguments)
    assert outcome.code == 2 and words in outcome.err and outcome.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
