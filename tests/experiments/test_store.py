"""A run's directory: appears whole, keeps bits, forgets what nobody needs, and refuses what is damaged."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from lrbpfl import trees
from lrbpfl.disk import write_file
from lrbpfl.errors import BadInput
from lrbpfl.experiments import store
from lrbpfl.experiments.config import Config, parse
from lrbpfl.experiments.store import Checkpoint, Run, create_directory, fingerprint
from tests.experiments.conftest import files
from tests.experiments.reaper import REAPER

CONFIG = parse({"federation": {"rounds": 9}})
STATES = {k: {"gates": torch.zeros(3), "deep": (torch.zeros(2), None)} for k in range(5)}
SERVER = {"w": torch.zeros(2, 2), "n": torch.zeros(3, dtype=torch.int64)}


def server(t: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([[t + 0.1, -0.0], [1e-45, 3e38]]), "n": torch.arange(3) + t}


def state(t: int, k: int) -> dict[str, Any]:
    return {"gates": torch.tensor([inf, -inf, t + k / 10]), "deep": (torch.tensor([t, k]).float(), None)}


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", CONFIG)


def save(run: Run, t: int, *clients: int, config: Config = CONFIG) -> None:
    run.save_checkpoint(config, t, server(t), {k: state(t, k) for k in clients})


def load(run: Run, config: Config = CONFIG) -> Checkpoint | None:
    return run.load_checkpoint(config, SERVER, STATES)


def test_a_new_run_holds_its_configuration_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "parents" / "run"
    Run.create(path, CONFIG)
    assert list(files(path)) == [Path("config.toml")]
    assert entries(path.parent) == ["run"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    text = (path / "config.toml").read_text()
    assert "[versions]" in text and f'torch = "{torch.__version__}"' in text
    _, config = Run.open(path)
    assert config == CONFIG


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_exists_is_never_written_over(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    with pytest.raises(BadInput, match=r"run exists already: name another with --out, or go on with: lrbpfl resume"):
        Run.create(path, CONFIG)
    assert entries(tmp_path) == ["run"]
    assert not path.is_dir() or entries(path) == []


def refused(path: Path) -> None:
    """The path cannot become a run, which is said in one line."""
    with pytest.raises(BadInput) as caught:
        Run.create(path, CONFIG)
    assert str(caught.value).startswith(f"{path} cannot be created: ")
    assert "\n" not in str(caught.value)


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file" / "run")
    refused(tmp_path / "file" / "deeper" / "run")
    assert list(files(tmp_path)) == [Path("file")]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_place_where_nobody_can_write_is_refused() -> None:
    refused(Path("/proc/nowhere/run"))


def test_a_name_too_long_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 300))
    refused(tmp_path / ("x" * 252))  # it fits, but not what is written aside
    assert entries(tmp_path) == []


def test_a_link_to_nowhere_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "run")
    assert entries(tmp_path) == ["run"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_file", full)
    with pytest.raises(BadInput, match="cannot be created: No space left on device"):
        create_directory(tmp_path / "run", CONFIG.tables())
    assert entries(tmp_path) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_without_configuration_is_no_run(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if there:
        path.mkdir()
    with pytest.raises(BadInput, match=r"run is no run directory: it holds no config\.toml"):
        Run.open(path)


def test_the_record_grows_by_a_line_each_and_writes_null_for_what_is_no_number(run: Run) -> None:
    assert run.read_record() == []
    run.record([{"round": 1, "value": nan}, {"round": 1, "value": inf}])
    run.record([{"round": 2, "value": 0.1, "reason": "ü\n"}, {"round": 2, "value": 3}])
    lines = run.metrics.read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.read_record()
    assert run.read_record() == [
        {"round": 1, "value": None},
        {"round": 1, "value": None},
        {"round": 2, "value": 0.1, "reason": "ü\n"},
        {"round": 2, "value": 3},
    ]
    assert "NaN" not in run.metrics.read_text()


def test_a_checkpoint_comes_back_bit_for_bit(run: Run) -> None:
    assert load(run) is None
    run.record([{"round": 1}])
    save(run, 1, 0, 3)
    found = load(run)
    assert found is not None
    assert (found.rounds, found.metrics_bytes) == (1, run.metrics.stat().st_size)
    assert trees.equal(found.server, server(1))
    assert list(found.states) == [0, 3]
    assert all(trees.equal(found.states[k], state(1, k)) for k in (0, 3))
    assert found.states[0]["deep"][1] is None


def test_clients_keep_the_state_of_their_last_round(run: Run) -> None:
    save(run, 1, 0, 1)
    save(run, 2, 1, 2)
    save(run, 3)
    found = load(run)
    assert found is not None
    assert found.rounds == 3
    assert {k: int(found.states[k]["deep"][0][0]) for k in found.states} == {0: 1, 1: 2, 2: 2}


def state_files(run: Run) -> list[str]:
    return [str(file) for file in files(run.path / "clients")]


def test_two_checkpoints_and_the_states_they_need_are_kept(run: Run) -> None:
    save(run, 1, 0, 1)
    save(run, 2, 1, 2)
    assert state_files(run) == [
        "00000/state-000001.safetensors",
        "00001/state-000001.safetensors",
        "00001/state-000002.safetensors",
        "00002/state-000002.safetensors",
    ]
    save(run, 3, 1)
    assert entries(run.path / "checkpoint") == ["000002", "000003"]
    assert state_files(run) == [
        "00000/state-000001.safetensors",  # its last round is long ago, and still what it knows
        "00001/state-000002.safetensors",
        "00001/state-000003.safetensors",
        "00002/state-000002.safetensors",
    ]
    assert not [name for name in entries(run.path) if name.startswith(".")]


def test_the_older_checkpoint_can_still_be_loaded(run: Run) -> None:
    for t in range(1, 5):
        save(run, t, 0, t)
    shutil.rmtree(run.path / "checkpoint" / "000004")
    found = load(run)
    assert found is not None
    assert trees.equal(found.server, server(3))
    assert {k: int(found.states[k]["deep"][0][0]) for k in found.states} == {0: 3, 1: 1, 2: 2, 3: 3}


def test_the_last_round_is_done_again_because_it_also_writes_results(run: Run) -> None:
    save(run, 8, 0)
    save(run, 9, 0)
    found = load(run)
    assert found is not None and found.rounds == 8
    assert trees.equal(found.states[0], state(8, 0))
    save(run, 9, 0)
    assert entries(run.path / "checkpoint") == ["000008", "000009"]


def test_the_last_checkpoint_done_again_may_be_cut_before_any_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the machine stays up: nothing to wait for
    cut = True
    cuts = 0
    while cut:
        run = Run.create(tmp_path / str(cuts), CONFIG)
        save(run, 7, 0, 1)
        save(run, 8, 0, 2)
        save(run, 9, 1, 2)
        cut = not REAPER.survives(run.path, cuts, partial(save, run, 9, 1, 2))
        found = load(run)
        assert found is not None and found.rounds == 8
        assert trees.equal(found.server, server(8))
        assert {k: int(found.states[k]["deep"][0][0]) for k in found.states} == {0: 8, 1: 7, 2: 8}
        run.rewind(found)
        assert not [name for name in entries(run.path) if name.startswith(".")]
        cuts += 1
    assert cuts > 10
    assert entries(run.path / "checkpoint") == ["000008", "000009"]


def test_tensors_that_share_memory_or_lie_crosswise_are_saved_whole(run: Run) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    twice = {"new": w, "old": w, "part": w[0], "turned": w.T, "one": torch.ones(1).expand(4)}
    run.save_checkpoint(CONFIG, 1, twice, {0: twice})
    found = run.load_checkpoint(CONFIG, twice, {0: twice})
    assert found is not None
    assert trees.equal(found.server, twice)
    assert trees.equal(found.states[0], twice)


@pytest.mark.parametrize("name", ["server.safetensors", "checkpoint.json", "state"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "noise"])
def test_a_damaged_checkpoint_is_refused_by_name(name: str, damage: str, run: Run) -> None:
    save(run, 1, 0)
    folder = run.path / "checkpoint" / "000001"
    path = run.path / "clients" / "00000" / "state-000001.safetensors" if name == "state" else folder / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-9], "empty": b"", "noise": b"\xff" * len(data)}[damage])
    with pytest.raises(BadInput, match="cannot be read, so this run cannot go on") as caught:
        load(run)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_algorithm_state_is_refused(run: Run) -> None:
    save(run, 1, 0)
    with pytest.raises(BadInput, match="cannot be read, so this run cannot go on"):
        run.load_checkpoint(CONFIG, {"other": torch.zeros(1)}, STATES)


@pytest.mark.parametrize(
    "tables",
    [
        {"federation": {"rounds": 10}},
        {"federation": {"rounds": 9, "seed": 1}},
        {"federation": {"rounds": 9}, "data": {"clients": 11}},
        {"federation": {"rounds": 9}, "algorithm": {"model_lr": 0.1}},
        {"federation": {"rounds": 9}, "algorithm": {"name": "fedavg"}},
    ],
)
def test_a_checkpoint_from_another_configuration_is_refused(tables: dict[str, Any], run: Run) -> None:
    save(run, 1, 0)
    assert fingerprint(parse(tables)) != fingerprint(CONFIG)
    with pytest.raises(BadInput, match="was written under another configuration than"):
        load(run, parse(tables))


def test_a_checkpoint_may_be_continued_by_another_engine(run: Run) -> None:
    save(run, 1, 0)
    other = parse({"federation": {"rounds": 9}, "engine": {"kind": "serial", "workers": 7}})
    assert load(run, other) is not None


def test_rewinding_cuts_the_record_to_the_checkpoint(run: Run) -> None:
    run.record([{"round": 1, "value": 0.5}])
    save(run, 1, 0)
    before = run.metrics.read_bytes()
    run.record([{"round": 2, "value": 0.25}])
    with run.metrics.open("a") as file:
        file.write('{"round": 2, "val')
    (run.path / ".checkpoint-x").mkdir()
    (run.path / ".checkpoint-x" / "server.safetensors").write_bytes(b"half")
    run.rewind(load(run))
    assert run.metrics.read_bytes() == before
    assert run.read_record() == [{"round": 1, "value": 0.5}]
    assert not list(run.path.glob(".checkpoint-*"))


def test_rewinding_to_the_beginning_empties_the_record(run: Run) -> None:
    run.rewind(None)
    run.record([{"round": 1}])
    run.rewind(None)
    assert run.read_record() == []


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_file(path, b"old")

    def die(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(KeyboardInterrupt):
            write_file(path, b"new")
    assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert entries(path.parent) == ["file"]
