"""Data of one's own on the command line: nothing need be set, what is odd is said, and sites can be held out."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.rng import numpy_generator
from tests.cli.conftest import Lrbpfl

QUICK = ("--set", "federation.rounds=1", "--set", "engine.kind=serial", "--quiet")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Four hospitals in one file, with ages and a text label."""
    rng, lines = numpy_generator(0), ["hospital,age,dose,outcome"]
    for k in (1, 2, 10, 3):
        for _ in range(12):
            ill = rng.random() < 0.5
            lines.append(
                f"ward-{k},{rng.normal(60 + 10 * ill, 8):.1f},{rng.normal(ill):.3f},{'ill' if ill else 'well'}"
            )
    file = tmp_path / "wards.csv"
    file.write_text("\n".join(lines) + "\n")
    return file


def columns(file: Path) -> tuple[str, ...]:
    keys = {"dataset": file, "client_column": "hospital", "label_column": "outcome"}
    return tuple(word for key, value in keys.items() for word in ("--set", f"data.{key}={value}"))


def test_a_table_runs_as_it_is_and_its_scale_is_told(table: Path, lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("run", *columns(table), *QUICK, "--out", "first run")
    assert outcome.code == 0
    assert outcome.err.count("column 'age' the most") == 1 and "data.standardise=pooled" in outcome.err
    assert "lrbpfl report 'first run'" in outcome.out
    config = tomllib.loads((tmp_path / "first run" / "config.toml").read_text())
    assert config["federation"]["cohort"] == 4
    assert json.loads((tmp_path / "first run" / "clients.json").read_text()) == [
        "ward-1",
        "ward-2",
        "ward-3",
        "ward-10",
    ]
    assert json.loads((tmp_path / "first run" / "classes.json").read_text()) == ["ill", "well"]
    again = lrbpfl("run", "--config", "first run/config.toml", *QUICK[2:], "--out", "again")
    assert again.code == 0
    assert (tmp_path / "again" / "config.toml").read_text() == (tmp_path / "first run" / "config.toml").read_text()
    scaled = lrbpfl("run", *columns(table), *QUICK, "--set", "data.standardise=pooled", "--out", "scaled")
    assert scaled.code == 0 and "note:" not in scaled.err


def test_partition_tells_it_once_and_keeps_json_clean(table: Path, lrbpfl: Lrbpfl) -> None:
    outcome = lrbpfl("partition", *columns(table), "--json")
    assert outcome.err.count("out of scale") == 1
    assert list(json.loads(outcome.out)) == ["ward-1", "ward-2", "ward-3", "ward-10"]


def test_all_algorithms_run_on_tiny_clients(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for k in range(3):
        np.savez(
            tmp_path / "sites" / f"s{k}.npz", x=numpy_generator(0, k).normal(size=(2 + k, 3)), y=[0, 1, 1, 0][: 2 + k]
        )
    outcome = lrbpfl("compare", "--algorithms", "all", "--set", "data.dataset=sites", *QUICK, "--out", "all")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("fewer than 10 examples") == 1
    assert list(json.loads((tmp_path / "all" / "summary.json").read_text())) == list(ALGORITHMS)


def test_sites_are_held_out_and_judged_apart(table: Path, lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    keys = (
        *columns(table),
        "--set",
        'data.new_sites=["ward-10", "ward-2"]',
        *QUICK,
        "--set",
        "data.standardise=pooled",
    )
    outcome = lrbpfl("compare", "-a", "lr-bpfl,fedavg", *keys, "--out", "held")
    assert outcome.code == 0, outcome.err
    assert "New clients, which never trained" in outcome.out
    summary = json.loads((tmp_path / "held" / "summary.json").read_text())
    assert summary["fedavg"]["clients"] == 2 and list(summary["fedavg"]["new"]) == ["sites"]
    assert summary["fedavg"]["new"]["sites"]["clients"] == 2
    assert lrbpfl("report", "held").code == 0
    (tmp_path / "held" / "summary.json").unlink()
    (tmp_path / "held" / "fedavg" / "summary.json").unlink()
    assert lrbpfl("resume", "held").code == 0
    again = json.loads((tmp_path / "held" / "summary.json").read_text())
    assert again["fedavg"]["new"] == summary["fedavg"]["new"]


def test_a_column_that_is_not_there_is_told_with_those_that_are(table: Path, lrbpfl: Lrbpfl) -> None:
    outcome = lrbpfl("run", "--set", f"data.dataset={table}")
    assert outcome.code == 2
    assert "no column 'client'" in outcome.err and "'hospital'" in outcome.err and "data.client_column" in outcome.err


def test_keys_are_listed_and_narrowed(lrbpfl: Lrbpfl) -> None:
    everything, some = lrbpfl("keys", "--json"), lrbpfl("keys", "algorithm.fedavg-ft")
    assert {"data.standardise", "algorithm.lr-bpfl.max_rank"} <= {key["name"] for key in json.loads(everything.out)}
    assert "ft_steps" in some.out and "cohort" not in some.out
    assert lrbpfl("keys", "algorithm.fedavgg").code == 2
