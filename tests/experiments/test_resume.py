"""A run ends in the same bits, whenever, however and however often it is cut off."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from lrbpfl.disk import LOCK
from lrbpfl.engines.loop import Round
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import Config, parse, to_toml
from lrbpfl.experiments.runner import Progress, read_summary, resume, start
from lrbpfl.experiments.store import Run
from tests.experiments.conftest import Configure, assert_same, contents, run
from tests.experiments.reaper import REAPER, Cut

ROOT = Path(__file__).parents[2]
FEW_STEPS = {"mask_steps": 2, "model_steps": 2, "predict_samples": 2}


def cut_after(t: int) -> Progress:
    def stop(ended: Round, pooled: Mapping[str, float]) -> None:
        if ended.t == t:
            raise Cut

    return Progress(round=stop)


def test_every_algorithm_goes_on_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    _, config = Run.open(finished)
    with pytest.raises(Cut):
        start(config, tmp_path / "cut", build_setup(config), cut_after(0))
    with pytest.raises(Cut):
        resume(tmp_path / "cut", cut_after(2))
    assert resume(tmp_path / "cut", Progress()) == read_summary(tmp_path / "cut")
    assert_same(tmp_path / "cut", contents(finished))


@pytest.mark.parametrize("engine", [{"kind": "processes", "workers": 1}, {"kind": "processes", "workers": 3}])
def test_another_engine_goes_on_to_the_same_bits(engine: dict[str, Any], configure: Configure, tmp_path: Path) -> None:
    config = configure(algorithm={"name": "lr-bpfl", **FEW_STEPS})
    run(config, tmp_path / "whole")
    with pytest.raises(Cut):
        start(config, tmp_path / "cut", build_setup(config), cut_after(1))
    tables = configure(algorithm={"name": "lr-bpfl", **FEW_STEPS}, engine=engine).tables()
    (tmp_path / "cut" / "config.toml").write_text(to_toml(tables))
    resume(tmp_path / "cut", Progress())
    assert_same(tmp_path / "cut", contents(tmp_path / "whole"), but=("config.toml",))


@pytest.mark.parametrize("name", ["lr-bpfl", "metavd", "pfedbayes"])
def test_a_run_with_new_clients_goes_on_to_the_same_bits(name: str, configure: Configure, tmp_path: Path) -> None:
    """Cut early, cut after the last round and before its summary, and finished by other engines."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5, 5.0]},
        "algorithm": {"name": name, **(FEW_STEPS if name == "lr-bpfl" else {})},
    }
    config, path = configure(**sections), tmp_path / "cut"
    run(config, tmp_path / "whole")
    with pytest.raises(Cut):
        start(config, path, build_setup(config), cut_after(1))
    (path / "config.toml").write_text(
        to_toml(configure(**sections, engine={"kind": "processes", "workers": 2}).tables())
    )
    with pytest.raises(Cut):
        resume(path, cut_after(3))
    resume(path, Progress())
    assert_same(path, contents(tmp_path / "whole"), but=("config.toml",))


def test_checkpoints_may_lie_rounds_apart(configure: Configure, tmp_path: Path) -> None:
    """Cut between two of them, the rounds since the last one are done again."""
    config = configure(
        federation={"rounds": 7, "evaluate_every": 2},
        engine={"kind": "serial", "checkpoint_every": 3},
        algorithm={"name": "lr-bpfl", **FEW_STEPS},
    )
    run(config, tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole" / "checkpoint").iterdir()) == ["000006", "000007"]
    for t in (1, 4):
        with pytest.raises(Cut):
            go_on(config, tmp_path / "cut", cut_after(t))
    resume(tmp_path / "cut", Progress())
    assert_same(tmp_path / "cut", contents(tmp_path / "whole"))


def test_a_run_may_be_cut_before_any_change_to_its_files(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the machine stays up: nothing to wait for
    steps = {"mask_steps": 1, "model_steps": 1, "predict_samples": 1}
    config = configure(
        data={"partition": "size", "clients": 2},
        federation={"rounds": 3, "cohort": 1, "evaluate_every": 0},
        algorithm={"name": "lr-bpfl", **steps},
    )
    federation = build_setup(config)
    start(config, tmp_path / "whole", federation, Progress())
    expected = contents(tmp_path / "whole")
    path = tmp_path / "cut"

    def work() -> object:
        return (
            resume(path, Progress()) if (path / "config.toml").exists() else start(config, path, federation, Progress())
        )

    cuts = 0
    while not REAPER.survives(tmp_path, cuts, work):
        if cuts % 4 == 0:
            REAPER.survives(tmp_path, cuts % 9, work)  # and once more, soon after
        work()
        assert_same(path, expected)
        shutil.rmtree(path)
        cuts += 1
    assert cuts > 40
    assert_same(path, expected)


def test_a_disk_may_refuse_any_change(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cannot be written is told in a sentence; once there is room again, the run ends in the same bits."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    config = configure(
        data={"partition": "size", "clients": 2, "calibration_fraction": 0.2},
        federation={"rounds": 2, "cohort": 1, "evaluate_every": 0, "temper": "all"},
        algorithm={"name": "lr-bpfl", "mask_steps": 1, "model_steps": 1, "predict_samples": 1},
    )
    setup = build_setup(config)
    start(config, tmp_path / "whole", setup, Progress())
    expected, path = contents(tmp_path / "whole"), tmp_path / "cut"
    full, refusals = OSError(errno.ENOSPC, "No space left on device"), 0

    def work() -> object:
        begun = (path / "config.toml").exists()
        return resume(path, Progress()) if begun else start(config, path, setup, Progress())

    while not REAPER.survives(path, refusals, work, full):
        strays = [entry.name for entry in path.rglob(".*")] if path.exists() else []
        assert not strays or strays == [LOCK]
        work()
        assert_same(path, expected)
        shutil.rmtree(path)
        refusals += 1
    assert refusals > 30
    assert_same(path, expected)


def digits(name: str, rounds: int = 8) -> Config:
    """A run of a second or two in two workers."""
    return parse(
        {
            "data": {"dataset": "digits", "clients": 6},
            "federation": {"rounds": rounds, "cohort": 3, "evaluate_every": 3},
            "engine": {"workers": 2},
            "algorithm": {"name": name, **(FEW_STEPS if name == "lr-bpfl" else {})},
        }
    )


def go_on(config: Config, path: Path, progress: Progress) -> None:
    """Start the run, or resume it if it is there."""
    if (path / "config.toml").exists():
        resume(path, progress)
    else:
        start(config, path, build_setup(config), progress)


def live(config: Config, path: Path, pids: Path) -> None:
    """The life of a process of its own, with a session of its own; it writes down who works for it."""
    os.setsid()

    def note(ended: Round, pooled: Mapping[str, float]) -> None:
        pids.write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))

    go_on(config, path, Progress(round=note))


def fork(config: Config, path: Path) -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=live, args=(config, path, path.with_suffix(".pids")))
    process.start()
    wait_until(lambda: not process.is_alive() or os.getpgid(process.pid or 0) == process.pid)
    return process


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def rounds_done(path: Path) -> int:
    return max((int(entry.name) for entry in (path / "checkpoint").glob("[0-9]*")), default=0)


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it may have finished
        os.killpg(pid, signal.SIGKILL)


def reached_or_dead(path: Path, rounds: int, process: ForkProcess) -> bool:
    return rounds_done(path) >= rounds or not process.is_alive()


@pytest.mark.parametrize("name", ["fedavg", "lr-bpfl"])
def test_a_run_killed_again_and_again_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    config, path, rng = digits(name), tmp_path / "killed", random.Random(name)
    run(config, tmp_path / "whole")
    # Kill at any time after the start, and then some time after a round, until it is nearly through.
    waits = [(0, rng.uniform(0.0, 0.1)), (0, rng.uniform(0.0, 0.1))]
    waits += [(t, rng.uniform(0.0, 0.02)) for t in (1, 2, 3, 5, 7)]
    killed = 0
    for rounds, delay in waits:
        process = fork(config, path)
        wait_until(partial(reached_or_dead, path, rounds, process))
        time.sleep(delay)
        kill_group(process.pid or 0)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed >= 2
    go_on(config, path, Progress())
    assert_same(path, contents(tmp_path / "whole"))


def test_a_python_killed_from_outside_can_be_resumed_by_another(tmp_path: Path) -> None:
    config, path = digits("lr-bpfl"), tmp_path / "killed"
    run(config, tmp_path / "whole")
    (tmp_path / "config.toml").write_text(to_toml(config.tables()))
    code = (
        "import sys; from pathlib import Path; from lrbpfl.experiments.config import parse, read;"
        "from tests.experiments.test_resume import Progress, go_on;"
        "go_on(parse(read(Path(sys.argv[1]))), Path(sys.argv[2]), Progress())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "config.toml", path], cwd=ROOT, start_new_session=True
    )
    wait_until(lambda: rounds_done(path) >= 3)
    kill_group(process.pid)
    assert process.wait() == -signal.SIGKILL
    resume(path, Progress())
    assert_same(path, contents(tmp_path / "whole"))


def is_running(pid: int) -> bool:
    """Whether a process is there and no mere entry that nobody has asked about yet."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = fork(digits("lr-bpfl", rounds=1000), path)
    workers: list[int] = []

    def two_at_work() -> bool:
        """The file of their numbers is written anew after each round, so it may be found empty."""
        if rounds_done(path) >= 3:
            workers[:] = [int(pid) for pid in path.with_suffix(".pids").read_text().split()]
        return len(workers) == 2

    wait_until(two_at_work)
    assert all(map(is_running, workers))
    os.kill(process.pid or 0, signal.SIGKILL)  # it alone
    process.join()
    wait_until(lambda: not any(map(is_running, workers)), seconds=10)
