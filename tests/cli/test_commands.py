"""The commands as a new user meets them."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.cli import measure
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.gaussian import sample
from lrbpfl.core.network import init_params, maskable
from lrbpfl.core.objective import masked_network
from lrbpfl.data import deal_corruptions
from lrbpfl.disk import locked
from lrbpfl.engines import registry
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.studies import bench as benchmark
from tests.cli.conftest import DIGITS, TINY, Lrbpfl


def test_run_ends_with_a_table_and_where_things_are(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("run", *TINY, "--out", "here")
    assert outcome.code == 0
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())["lr-bpfl"]
    assert f"{100 * summary['accuracy']:.2f}" in outcome.out
    assert f"{summary['ece_pooled']:.3f}  {summary['ece_pooled_floor']:.3f}" in outcome.out
    assert "In here: config.toml" in outcome.out
    assert "own test split" in outcome.out
    assert "round 2/2" in outcome.err


def test_run_names_its_directory_itself(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    assert lrbpfl("run", "--algorithm", "fedavg", *TINY).code == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith("fedavg-digits-")


def test_compare_gives_the_same_data_to_all(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    fields = ("--set", "algorithm.fedavg.lr=0.05", "--set", "algorithm.lr-bpfl.max_rank=3")
    outcome = lrbpfl("compare", *TINY, *fields, "--out", "both")
    assert outcome.code == 0
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert list(summary) == ["lr-bpfl", "fedavg", "fedavg-ft", "local"]
    assert "training alone (local)" in " ".join(outcome.out.split())  # it may be broken into lines
    assert summary["lr-bpfl"]["examples"] == summary["fedavg"]["examples"]
    assert "lr = 0.05" in (tmp_path / "both" / "fedavg" / "config.toml").read_text()
    assert "max_rank = 3" in (tmp_path / "both" / "lr-bpfl" / "config.toml").read_text()


def test_an_unfinished_comparison_is_finished(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    few = ("--set", "algorithm.lr-bpfl:paper.mask_steps=2")
    whole = ("compare", "--algorithms", "lr-bpfl:paper,fedavg", *TINY, *few)
    lrbpfl(*whole, "--out", "whole")
    lrbpfl(*whole, "--out", "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    (tmp_path / "cut" / "fedavg").rename(tmp_path / "gone")
    (tmp_path / "cut" / "lr-bpfl-paper" / "summary.json").unlink()
    assert lrbpfl("resume", "cut").code == 0
    for part in ("lr-bpfl-paper", "fedavg"):
        files = [tmp_path / name / part / "predictions.safetensors" for name in ("whole", "cut")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_repeats_from_its_own_configuration(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    lrbpfl("run", *TINY, "--out", "first")
    assert lrbpfl("run", "--config", "first/config.toml", "--out", "second").code == 0
    files = [tmp_path / name / "predictions.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_partition_shows_every_client(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("partition", *DIGITS, "--set", "data.clients=5", "--set", "data.labels_per_client=3")
    assert outcome.code == 0
    assert all(f"client-{k}" in outcome.out for k in range(5))
    assert "1797 examples of 1797" in outcome.out
    rows = json.loads(lrbpfl("partition", "--json", *DIGITS, "--set", "data.clients=5").out)
    assert sum(row["train"] + row["test"] for row in rows.values()) == 1797
    assert all(len(row["classes"]) == 2 for row in rows.values())
    assert list(tmp_path.iterdir()) == []


def test_partition_shows_the_speakers(lrbpfl: Lrbpfl) -> None:
    outcome = lrbpfl("partition", "--set", "data.calibration_fraction=0.2")
    assert outcome.code == 0
    (row,) = (line.split() for line in outcome.out.splitlines() if "Wendy" in line)
    assert row[:7] == ["Wendy", "26", "0", "33", "0", "7", "11"]
    assert "15 clients, 990 examples of 990" in outcome.out
    assert "training parts: the data's own; parts are drawn class by class" in outcome.out
    dealt = lrbpfl("partition", "--set", "data.train_fraction=0.5", "--set", "data.stratified=false").out
    assert "training parts: a fraction of 0.5; parts are drawn at random" in dealt


def test_partition_shows_shifts(lrbpfl: Lrbpfl) -> None:
    """Labels are told as clients have them: those of group 1 are swapped."""
    keys = (*DIGITS, "--set", "data.clients=5")
    plain = json.loads(lrbpfl("partition", "--json", *keys).out)
    rows = json.loads(lrbpfl("partition", "--json", *keys, "--set", "data.shift=concept").out)
    assert [row["group"] for row in rows.values()] == [0, 1, 0, 1, 0]
    assert rows["client-2"]["classes"] == plain["client-2"]["classes"]
    assert set(rows["client-3"]["classes"]) == {str(int(c) ^ 1) for c in plain["client-3"]["classes"]}
    assert "  group 1: 0→1 1→0 2→3" in lrbpfl("partition", *keys, "--set", "data.shift=concept").out
    shown = lrbpfl("partition", *keys, "--set", "data.shift=features", "--set", "data.shift_strength=0.3").out
    assert "in a way of its own, strength 0.3" in shown and "group" not in shown


def test_partition_shows_new_clients(lrbpfl: Lrbpfl) -> None:
    keys = (*DIGITS, "--set", "data.clients=5", "--set", "data.new_clients=2", "--set", "data.new_alpha=[0.1, 1.0]")
    outcome = lrbpfl("partition", *keys)
    assert all(name in outcome.out for name in ("new-0.1-0", "new-0.1-1", "new-1.0-0", "new-1.0-1"))
    assert "5 clients, 1438 examples of 1797" in outcome.out
    assert "2 new clients for alpha 0.1, 1.0: 359 other examples" in outcome.out
    rows = json.loads(lrbpfl("partition", "--json", *keys).out)
    assert [row.get("new_alpha") for row in rows.values()] == 5 * [None] + [0.1, 0.1, 1.0, 1.0]


def test_partition_shows_corruptions(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    """Which pair each client has; no image is corrupted for that, so no package is needed."""
    (tmp_path / "sites").mkdir()
    for name in ("north", "south"):
        np.savez(tmp_path / "sites" / f"{name}.npz", x=np.zeros((9, 3, 32, 32), np.uint8), y=np.arange(9) % 3)
    keys = ("--set", "data.dataset=./sites", "--set", "data.corruptions=true", "--set", "federation.seed=4")
    pairs = deal_corruptions(2, seed=4)
    rows = json.loads(lrbpfl("partition", "--json", *keys).out)
    assert [row["corruption"] for row in rows.values()] == [pair._asdict() for pair in pairs]
    lines = [line for line in lrbpfl("partition", *keys).out.splitlines() if "north" in line or "south" in line]
    shown = [f"{kind.replace('_', ' ')} {severity}" for kind, severity in pairs]
    assert all(pair in line for pair, line in zip(shown, lines, strict=True))
    assert "corruption" not in lrbpfl("partition", "--set", "data.dataset=./sites").out


def test_a_run_tells_of_new_clients(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("run", "-a", "fedavg", *TINY, "--set", "data.new_clients=2", "--out", "here")
    assert outcome.code == 0 and "New clients, which never trained" in outcome.out
    scores = json.loads((tmp_path / "here" / "summary.json").read_text())["fedavg"]["new"]["0.1"]
    assert f"{100 * scores['accuracy']:.2f}" in outcome.out


def test_bench_prints_one_object(lrbpfl: Lrbpfl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, smaller in {"CLIENTS": 2, "STEPS": 2, "BATCH": 8}.items():
        monkeypatch.setattr(benchmark, name, smaller)
    outcome = lrbpfl("bench", "--json", "--repeats", 2)
    assert outcome.code == 0
    figures = json.loads(outcome.out)
    assert {"mask_step_over_plain_steps", "rank_summed_over_mask_step", "workers_speedup"} <= figures.keys()
    assert figures["repeats"] == 2
    ratio = figures["mask_step_seconds"] / (4 * figures["plain_step_seconds"])
    assert figures["mask_step_over_plain_steps"] == pytest.approx(ratio)
    gain = figures["plain_step_channels_last_seconds"] / figures["plain_step_bf16_seconds"]
    assert figures["channels_last_step_over_bf16_step"] == pytest.approx(gain)


def test_bench_times_a_round_in_every_engine(lrbpfl: Lrbpfl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, smaller in {"CLIENTS": 2, "STEPS": 2, "BATCH": 8}.items():
        monkeypatch.setattr(benchmark, name, smaller)
    monkeypatch.setattr(benchmark, "usable", lambda engine: engine in ("processes", "serial"))
    figures = json.loads(lrbpfl("bench", "--engines", "--json", "--repeats", 1).out)
    assert list(figures) == ["round_processes_seconds", "round_serial_seconds", "repeats"]
    assert min(figures.values()) > 0
    assert lrbpfl("bench", "--engines", "--cost").code == 2


def test_a_client_that_fails_is_not_taken_for_a_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(LRBPFL, "client_update", fail)
    monkeypatch.setattr(benchmark, "CLIENTS", 1)
    with pytest.raises(RuntimeError, match="client 0 of the benchmark failed: ValueError: no such luck"):
        benchmark.measure_workers(1)


def test_the_benchmark_compares_equal_things() -> None:
    generator = torch.Generator().manual_seed(0)
    model = cnn(10)
    layers = maskable(model)
    network = masked_network(model, layers, {name: gating.init(benchmark.RANK) for name in layers})
    masks = masking.init(network.places, spread=0.1, std=0.05, rng=generator)
    W = init_params(model, generator, "kaiming")
    draws = sample(masks, masking.draw(masks, benchmark.SAMPLES, generator))
    x = torch.randn(2, 3, 32, 32, generator=generator)
    expected = network.logits(W, draws, network.before(W, x))
    got = benchmark.rank_summed(model, W, draws, network.places, x)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_doctor_finds_a_healthy_machine(lrbpfl: Lrbpfl) -> None:
    outcome = lrbpfl("doctor")
    assert outcome.code == 0
    assert "agree bit for bit" in outcome.out
    assert "torch" in outcome.out


def test_doctor_tells_of_broken_data(lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBPFL_DATA", str(tmp_path))
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(b"")
    outcome = lrbpfl("doctor")
    assert outcome.code == 1
    assert "FAIL cifar100" in outcome.out


def _seconds_of_children() -> float:
    """Computing, without what they waited for a busy processor."""
    times = os.times()
    return times.children_user + times.children_system


def test_help_is_quick_and_version_is_told() -> None:
    command = [sys.executable, "-c", "from lrbpfl.cli.main import run; run()"]
    seconds = []
    for _ in range(5):
        before = _seconds_of_children()
        shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
        seconds.append(_seconds_of_children() - before)
    assert "compare" in shown.stdout
    assert min(seconds) <= 0.5
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("lrbpfl 0.")


def test_bad_input_leaves_no_traceback_in_a_real_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from lrbpfl.cli.main import run; run()", "run", "--set", "federation.rounds=0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "lrbpfl: federation.rounds = 0: input should be greater than or equal to 1\n"
    assert list(tmp_path.iterdir()) == []


def test_tune_shows_the_best_first_and_goes_on(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    command = ("tune", "-a", "fedavg", "--vary", "algorithm.lr=0.0,0.2", *TINY, "--out", "study")
    outcome = lrbpfl(*command)
    assert outcome.code == 0
    rows = json.loads((tmp_path / "study" / "study.json").read_text())
    places = [outcome.out.index(row["label"].removeprefix("algorithm.")) for row in rows]
    assert len(rows) == 3 and places == sorted(places)
    assert lrbpfl(*command).out == outcome.out


def test_tune_refuses_the_test_split(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("tune", "--set", "federation.evaluate_on=test")
    assert outcome.code == 2 and "validation" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_cost_names_every_algorithm(lrbpfl: Lrbpfl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ALGORITHMS", {"fedavg": partial(FedAvg, local_steps=1)})
    outcome = lrbpfl("bench", "--cost", "--repeats", 1)
    assert outcome.code == 0 and "1,276,234" in outcome.out
    told = json.loads(lrbpfl("bench", "--cost", "--json", "--repeats", 1).out)
    assert told["algorithms"]["fedavg"]["numbers_up"] == 1_276_234
    assert told["algorithms"]["fedavg"]["round_ratio"] == 1.0


@pytest.mark.parametrize("command", ["run", "compare"])
def test_nothing_is_written_where_there_is_no_engine(
    command: str, lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(*arguments: object) -> None:
        raise BadInput("no cluster answers")

    monkeypatch.setitem(registry.ENGINES, "processes", nowhere)
    code, _, err = lrbpfl(command, "-a", "fedavg", "-o", "here", "-q")
    assert (code, err.strip().splitlines()[-1]) == (2, "lrbpfl: no cluster answers")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["tune", "-a", "fedavg", "-s", "federation.rounds=1", "--vary", "algorithm.lr=0.1", "-o", "here"],
        ["paper", "run", "transfer", "--only", "speakers", "--only", "fedavg", "--runs", "here"],
        ["run", "-a", "fedavg", "-s", "federation.rounds=1", "-o", "here"],
    ],
)
def test_a_directory_that_somebody_else_writes_to_is_refused_by_name(
    command: list[str], lrbpfl: Lrbpfl, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    with locked(tmp_path / "here"):
        code, _, err = lrbpfl(*command)
    assert code == 2 and "here is being written by" in err
    assert not list((tmp_path / "here").iterdir())
