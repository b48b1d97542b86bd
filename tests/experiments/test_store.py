"""A run's directory: one writer, whole files, checked checkpoints, and nothing inherited from what was undone."""

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
from lrbpfl.disk import DiskFault, write_file
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import Config, parse
from lrbpfl.experiments.store import Checkpoint, Run, claimed, fingerprint
from tests.experiments.conftest import files
from tests.experiments.reaper import REAPER

CONFIG = parse({"federation": {"rounds": 9}})
FORM = {"gates": torch.zeros(3), "deep": (torch.zeros(2), None)}
SERVER = {"w": torch.zeros(2, 2), "n": torch.zeros(3, dtype=torch.int64)}


def server(t: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([[t + 0.1, -0.0], [1e-45, 3e38]]), "n": torch.arange(3) + t}


def state(t: int, k: int) -> dict[str, Any]:
    return {"gates": torch.tensor([inf, -inf, t + k / 10]), "deep": (torch.tensor([t, k]).float(), None)}


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def create(path: Path) -> Run:
    with claimed(path):
        return Run.create(path, CONFIG)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create(tmp_path / "run")


def save(run: Run, t: int, *clients: int, config: Config = CONFIG) -> None:
    for k in clients:
        run.states.stage(k, t, state(t, k))
        run.states.accept(k)
    run.save(config, t, server(t))


def load(run: Run, config: Config = CONFIG, told: list[str] | None = None) -> Checkpoint | None:
    """As a new process would: nothing in memory."""
    run.record, run.states = Run(run.path).record, Run(run.path).states
    return run.load(config, SERVER, (told if told is not None else []).append)


def rounds_of(run: Run, *clients: int) -> dict[int, int]:
    """After which round each client's state was kept; 0 if it never took part."""
    return {k: int(run.states.get(k, lambda: FORM)["deep"][0][0]) for k in clients}


def test_a_new_run_holds_its_configuration_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "parents" / "run"
    create(path)
    assert list(files(path)) == [Path("config.toml")]
    assert entries(path.parent) == ["run"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    text = (path / "config.toml").read_text()
    assert "[versions]" in text and f'torch = "{torch.__version__}"' in text
    _, config = Run.open(path)
    assert config == CONFIG


def test_what_exists_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "mine.txt").touch()
    with pytest.raises(BadInput, match=r"run exists already: name another with --out, or go on with: lrbpfl resume"):
        create(path)
    assert entries(path) == ["mine.txt"]


def test_an_empty_directory_or_one_that_somebody_died_over_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / ".config.toml.part").write_bytes(b"half")
    create(path)
    assert entries(path) == ["config.toml"]


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    """Also within a process; between processes: tests/test_disk.py."""
    with claimed(tmp_path / "run"), pytest.raises(BadInput, match="run is being written by this process already"):
        create(tmp_path / "run")


def refused(path: Path) -> None:
    """The path cannot become a run, which is said in one line."""
    with pytest.raises(DiskFault) as caught:
        create(path)
    assert str(caught.value).startswith(f"{path} cannot be ")
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
    with pytest.raises(BadInput, match="cannot be created: File name too long"):
        create(tmp_path / ("x" * 300))
    assert entries(tmp_path) == []


def test_a_link_to_nowhere_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "run")
    assert entries(tmp_path) == ["run"]


def full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFault, match=r"config\.toml cannot be written: No space left on device"):
        create(tmp_path / "run")
    assert entries(tmp_path) == []


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1, 0)
    before = list(files(run.path))
    with monkeypatch.context() as patch, pytest.raises(DiskFault, match="No space left on device"):
        patch.setattr(os, "fsync", full)
        save(run, 2, 1)
    assert not [name for name in map(str, files(run.path)) if ".part" in name]
    found = load(run)
    assert found is not None and found.rounds == 1
    assert rounds_of(run, 0, 1) == {0: 1, 1: 0}
    assert set(before) <= set(files(run.path))


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_without_configuration_is_no_run(there: bool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if there:
        path.mkdir()
    with pytest.raises(BadInput, match=r"run is no run directory: it holds no config\.toml"):
        Run.open(path)


def test_the_record_grows_by_a_line_each_and_writes_null_for_what_is_no_number(run: Run) -> None:
    assert run.read_record() == []
    run.record.append([{"round": 1, "value": nan}, {"round": 1, "value": inf}])
    run.record.append([{"round": 2, "value": 0.1, "reason": "ü\n"}, {"round": 2, "value": 3}])
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
    run.record.append([{"round": 1}])
    save(run, 1, 0, 3)
    found = load(run)
    assert found is not None and found.rounds == 1
    assert trees.equal(found.server, server(1))
    assert all(trees.equal(run.states.get(k, lambda: FORM), state(1, k)) for k in (0, 3))
    assert run.states.get(0, lambda: FORM)["deep"][1] is None
    assert rounds_of(run, 1) == {1: 0}


def test_clients_keep_the_state_of_their_last_round(run: Run) -> None:
    save(run, 1, 0, 1)
    save(run, 2, 1, 2)
    save(run, 3)
    found = load(run)
    assert found is not None and found.rounds == 3
    assert rounds_of(run, 0, 1, 2) == {0: 1, 1: 2, 2: 2}


def state_files(run: Run) -> list[str]:
    return [str(file) for file in files(run.path / "clients") if file.name != "states.jsonl"]


def test_two_checkpoints_and_the_states_they_need_are_kept(run: Run) -> None:
    save(run, 1, 0, 1)
    save(run, 2, 1, 2)
    save(run, 3, 1)
    assert entries(run.path / "checkpoint") == ["000002", "000003"]
    assert state_files(run) == [
        "00000/state-000001.safetensors",  # its last round is long ago, and still what it knows
        "00001/state-000002.safetensors",
        "00001/state-000003.safetensors",
        "00002/state-000002.safetensors",
    ]
    assert not [name for name in entries(run.path) if name.startswith(".")]


def test_a_checkpoint_costs_what_its_cohort_costs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was kept before: as many files are opened, synced and removed, and the file names nobody."""
    counts = []
    for t in range(1, 9):
        calls: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", calls.append)
            save(run, t, *range(3 * t, 3 * t + 3))
        counts.append((len(calls), (run.path / "checkpoint" / f"{t:06d}" / "checkpoint.json").stat().st_size // 64))
    assert len(set(counts[2:])) == 1


def test_the_last_round_is_done_again_because_it_also_writes_results(run: Run) -> None:
    save(run, 8, 0)
    save(run, 9, 0)
    found = load(run)
    assert found is not None and found.rounds == 8
    assert rounds_of(run, 0) == {0: 8}
    assert entries(run.path / "checkpoint") == ["000008"]
    save(run, 9, 0)
    assert entries(run.path / "checkpoint") == ["000008", "000009"]


def test_nothing_is_inherited_from_rounds_that_were_undone(run: Run) -> None:
    """A client that trained in the lost round 3, and fails when that is done again, has what it had after round 1."""
    save(run, 1, 0)
    save(run, 2, 1)
    save(run, 3, 0)
    shutil.rmtree(run.path / "checkpoint" / "000003")
    assert load(run) is not None
    save(run, 3, 1)
    save(run, 4, 2)
    load(run)
    assert rounds_of(run, 0, 1, 2) == {0: 1, 1: 3, 2: 4}


def test_a_folder_without_checkpoints_begins_anew_whatever_else_lies_there(run: Run) -> None:
    save(run, 8, 0)
    save(run, 9, 0)
    shutil.rmtree(run.path / "checkpoint" / "000008")
    assert load(run) is None
    assert rounds_of(run, 0) == {0: 0}
    save(run, 1, 1)
    load(run)
    assert rounds_of(run, 0, 1) == {0: 0, 1: 1}


def test_the_last_checkpoint_done_again_may_be_cut_before_any_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the machine stays up: nothing to wait for
    cut = True
    cuts = 0
    while cut:
        run = create(tmp_path / str(cuts))
        save(run, 7, 0, 1)
        save(run, 8, 0, 2)
        cut = not REAPER.survives(run.path, cuts, partial(save, run, 9, 1, 2))
        found = load(run)
        assert found is not None and found.rounds == 8
        assert trees.equal(found.server, server(8))
        assert rounds_of(run, 0, 1, 2) == {0: 8, 1: 7, 2: 8}
        cuts += 1
    assert cuts > 10
    save(run, 9, 1, 2)
    assert entries(run.path / "checkpoint") == ["000008", "000009"]
    assert not [name for name in map(str, files(run.path)) if ".part" in name]


def test_tensors_that_share_memory_or_lie_crosswise_are_saved_whole(run: Run) -> None:
    w = torch.arange(6.0).reshape(2, 3)
    twice = {"new": w, "old": w, "part": w[0], "turned": w.T, "one": torch.ones(1).expand(4)}
    run.save(CONFIG, 1, twice)
    found = run.load(CONFIG, twice, print)
    assert found is not None
    assert trees.equal(found.server, twice)


def path_of(run: Run, name: str, t: int) -> Path:
    if name == "state":
        return run.path / "clients" / "00000" / f"state-{t:06d}.safetensors"
    return run.path / "checkpoint" / f"{t:06d}" / {"server": "server.safetensors", "said": "checkpoint.json"}[name]


def flip(data: bytes) -> bytes:
    """One bit of the last number."""
    return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-9],
    "empty": lambda data: b"",
    "noise": lambda data: b"\xff" * len(data),
    "flipped": flip,
}


@pytest.mark.parametrize("name", ["server", "said", "state"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_told_by_name_and_the_one_before_is_taken(name: str, damage: str, run: Run) -> None:
    save(run, 1, 0)
    save(run, 2, 0)
    path, told = path_of(run, name, 2), list[str]()
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    found = load(run, told=told)
    assert found is not None and found.rounds == 1
    assert rounds_of(run, 0) == {0: 1}
    assert len(told) == 1 and str(path) in told[0] and "going on from round 1 instead" in told[0]


@pytest.mark.parametrize("name", ["server", "said", "state"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_in_all_checkpoints_is_refused_by_name(name: str, damage: str, run: Run) -> None:
    save(run, 1, 0)
    path = path_of(run, name, 1)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(BadInput) as caught:
        load(run)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", [Path.unlink, lambda path: path.write_bytes(flip(path.read_bytes()))])
def test_an_old_state_that_is_damaged_or_gone_is_refused_when_needed(how: Callable[[Path], Any], run: Run) -> None:
    save(run, 1, 0)
    save(run, 2, 1)
    save(run, 3, 1)
    how(path_of(run, "state", 1))
    load(run)
    with pytest.raises(BadInput, match=r"00000/state-000001\.safetensors"):
        run.states.get(0, lambda: FORM)


def test_a_state_in_another_clients_place_is_refused(run: Run) -> None:
    save(run, 1, 0, 1)
    shutil.copy(path_of(run, "state", 1), run.path / "clients" / "00001")
    with pytest.raises(BadInput, match=r"00001/state-000001\.safetensors holds another client's"):
        load(run)


@pytest.mark.parametrize(
    "form", [{"other": torch.zeros(1)}, {**SERVER, "w": torch.zeros(4)}, {**SERVER, "w": SERVER["w"].double()}]
)
def test_a_checkpoint_of_another_form_is_refused(form: Any, run: Run) -> None:
    save(run, 1, 0)
    with pytest.raises(BadInput, match=r"server\.safetensors cannot be used: "):
        run.load(CONFIG, form, print)


def test_a_server_that_is_not_finite_is_refused(run: Run) -> None:
    run.save(CONFIG, 1, {**SERVER, "w": torch.tensor([[nan, 0.0], [0.0, 0.0]])})
    with pytest.raises(BadInput, match=r"server\.safetensors cannot be used: w holds numbers that are not finite"):
        load(run)


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


def test_going_back_cuts_the_record_to_the_checkpoint(run: Run) -> None:
    run.record.append([{"round": 1, "value": 0.5}])
    save(run, 1, 0)
    before = run.metrics.read_bytes()
    run.record.append([{"round": 2, "value": 0.25}])
    with run.metrics.open("a") as file:
        file.write('{"round": 2, "val')
    load(run)
    assert run.metrics.read_bytes() == before
    assert run.read_record() == [{"round": 1, "value": 0.5}]


def test_going_back_to_the_beginning_empties_the_record(run: Run) -> None:
    run.record.append([{"round": 1}])
    load(run)
    assert run.read_record() == []


@pytest.mark.parametrize("how", ["shorter", "gone", "altered"])
def test_a_record_that_lost_something_is_noticed(how: str, run: Run) -> None:
    run.record.append([{"round": 1, "value": 0.5}])
    save(run, 1, 0)
    data = run.metrics.read_bytes()
    if how == "gone":
        run.metrics.unlink()
    else:
        run.metrics.write_bytes(data[:-4] if how == "shorter" else data.replace(b"0.5", b"0.6"))
    with pytest.raises(BadInput, match=r"metrics\.jsonl (is shorter than it was|was altered)"):
        load(run)


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
