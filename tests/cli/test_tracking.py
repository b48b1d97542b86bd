"""`--track`, as a user meets it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lrbpfl.experiments import judging, tracking
from tests.cli.conftest import TINY, Lrbpfl

needs_tensorboard = pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed")


def rounds(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("costs/seconds")]


@needs_tensorboard
def test_each_run_of_a_comparison_has_its_curves(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    algorithms = ("--algorithms", "fedavg,local", *TINY)
    assert lrbpfl("compare", *algorithms, "--out", "both", "--track", "tensorboard").code == 0
    assert [rounds(tmp_path / "both" / part / "tensorboard") for part in ("fedavg", "local")] == [[1, 2], [1, 2]]
    assert lrbpfl("resume", "both", "--track", "tensorboard").code == 0
    assert [rounds(tmp_path / "both" / part / "tensorboard") for part in ("fedavg", "local")] == [[1, 2], [1, 2]]


@needs_tensorboard
def test_a_run_that_was_interrupted_tells_how_to_go_on_with_its_tracker(
    lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(judging, "Results", interrupt)
        outcome = lrbpfl("run", "-a", "fedavg", *TINY, "--out", "here", "--track", "tensorboard")
    assert outcome.code == 130 and "go on with: lrbpfl resume here --track tensorboard\n" in outcome.err
    assert lrbpfl("resume", "here", "--track", "tensorboard").code == 0
    assert rounds(tmp_path / "here" / "tensorboard") == [1, 2]


@pytest.mark.parametrize("kind", tracking.TRACKERS)
@pytest.mark.parametrize("command", ["run", "compare", "resume nowhere"])
def test_a_missing_package_is_told_before_anything_is_written(
    kind: str, command: str, lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    outcome = lrbpfl(*command.split(), "--track", kind)
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert outcome.err.startswith(f"lrbpfl: --track {kind} needs {kind}")
    assert "pip install 'lrbpfl[track]'" in outcome.err
    assert list(tmp_path.iterdir()) == []


@needs_tensorboard
def test_a_tracker_that_fails_is_told_as_a_line(
    lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no [space] left")

    monkeypatch.setattr(tracking.TensorBoard, "write", fail)
    outcome = lrbpfl("run", "-a", "fedavg", *TINY, "--out", "here", "--track", "tensorboard")
    assert outcome.code == 0
    assert outcome.err.count("tensorboard fails") == 1
    assert "fedavg: tensorboard fails, the run goes on without it: OSError: no [space] left\n" in outcome.err


@pytest.mark.skipif(not all(map(find_spec, tracking.PACKAGES["mlflow"])), reason="mlflow or its store is missing")
def test_mlflow_writes_beside_and_calls_nobody(tmp_path: Path) -> None:
    """In a process of its own, where MLflow does not know that this is a test."""
    code = (
        "import sys, time\n"
        "sys.addaudithook(lambda name, what: name.startswith(('socket.connect', 'socket.getaddrinfo'))"
        " and print('calls', name, what, flush=True))\n"
        "from lrbpfl.cli import main\n"
        "try:\n    main.run()\n"
        "finally:\n    time.sleep(1)\n"  # for threads that would call
    )
    own = ("run", "-a", "fedavg", *TINY, "--set", 'engine.kind="serial"', "--out", "here", "--track", "mlflow")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MLFLOW", "CI"))}
    outside["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *own], cwd=tmp_path, env=outside, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "fails" not in done.stderr
    assert "calls" not in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"here", "mlflow.db"}
    assert list(json.loads((tmp_path / "here" / "mlflow.json").read_text())) == ["run_id"]
