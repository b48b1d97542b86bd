"""A run writes what it promises, and ends in the same bits whenever and however often it is killed."""

import json
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
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.fedavg import FedAvg, Personal
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params
from lrbpfl.engines.loop import Round
from lrbpfl.engines.work import evaluate_client
from lrbpfl.experiments.build import build_federation
from lrbpfl.experiments.config import Config, parse, to_toml
from lrbpfl.experiments.runner import Progress, read_summary, resume, start
from lrbpfl.experiments.store import Run
from lrbpfl.trees import Tree
from tests.experiments.conftest import Configure, files, run
from tests.experiments.reaper import REAPER, Cut

ROOT = Path(__file__).parents[2]

SCORES = {"accuracy", "nll", "brier", "ece_pooled", "mce_pooled", "ece_mean", "ece_worst", "ece_floor_mean"}
SCORES |= {"ece_debiased_mean", "bytes_up", "bytes_down", "parameters", "seconds"}


def contents(path: Path) -> dict[str, Any]:
    """Everything in a run's directory that does not tell the time; tensors as bytes."""
    found: dict[str, Any] = {str(file): (path / file).read_bytes() for file in files(path)}
    found["metrics.jsonl"] = [line for line in Run(path).read_record() if line.get("metric") != "seconds"]
    found["summary.json"] = {
        name: {key: value for key, value in table.items() if key != "seconds"}
        for name, table in json.loads(found["summary.json"]).items()
    }
    for name in [name for name in found if name.endswith("checkpoint.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "metrics_bytes"}
    return found


def assert_same(path: Path, expected: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    """The directory holds the same files with the same bits."""
    found = contents(path)
    assert found.keys() == expected.keys()
    assert [name for name in expected if name not in but and found[name] != expected[name]] == []


# What a run leaves behind.


@pytest.fixture(scope="module", params=ALGORITHMS)
def finished(request: pytest.FixtureRequest, configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run(configure(algorithm={"name": request.param}), path)
    return path


def test_a_run_leaves_its_files_and_nothing_else(finished: Path) -> None:
    names = {str(file) for file in files(finished)}
    assert {"config.toml", "metrics.jsonl", "summary.json", "shared.safetensors", "predictions.safetensors"} <= names
    assert {f"clients/{k:05d}/personal.safetensors" for k in range(4)} <= names
    rest = {name for name in names if not name.startswith(("clients/", "checkpoint/"))}
    assert len(rest) == 5
    assert not [name for name in names if ".part" in name or "/." in name or name.startswith(".")]


def test_the_summary_has_its_keys_under_the_name_of_the_algorithm(finished: Path) -> None:
    _, config = Run.open(finished)
    summary = read_summary(finished)
    assert list(summary) == [config.algorithm_name]
    scores = summary[config.algorithm_name]
    assert set(scores) >= SCORES
    assert all(0 <= scores[name] <= 1 for name in SCORES if name.startswith(("acc", "ece", "mce")))
    assert scores["clients"] == 4 and scores["examples"] == 52 and scores["events"] == 0
    assert scores["evaluated"] == "each client's own model after round 4, on its own test split"


def test_the_accuracy_is_that_of_the_stored_predictions(finished: Path) -> None:
    (scores,) = read_summary(finished).values()
    table = load_file(finished / "predictions.safetensors")
    assert table["probs"].shape == (52, 3)
    assert torch.allclose(table["probs"].sum(1), torch.ones(52))
    correct = (table["probs"].argmax(1) == table["y"]).double()
    assert scores["accuracy"] == pytest.approx(correct.mean().item(), abs=1e-12)
    each = [correct[table["client"] == k].mean().item() for k in range(4)]
    assert scores["accuracy_worst"] == pytest.approx(min(each), abs=1e-12)
    picked = table["probs"][torch.arange(52), table["y"]].double()
    assert scores["nll"] == pytest.approx(-picked.log().mean().item(), rel=1e-5)


def test_bytes_are_those_of_the_cohorts_messages(finished: Path) -> None:
    (scores,) = read_summary(finished).values()
    _, config = Run.open(finished)
    federation = build_federation(config)
    server = last_server(finished, federation.algorithm.init_server(federation.task, Generator()))
    message = federation.algorithm.broadcast(federation.task, server, 0)
    assert scores["bytes_down"] == 4 * 2 * trees.nbytes(message)  # four rounds of two clients
    assert scores["bytes_up"] == scores["bytes_down"]
    assert scores["parameters_server"] == trees.count(server)


def last_server(path: Path, template: Tree) -> Tree:
    return trees.rebuild(template, load_file(path / "checkpoint" / "000004" / "server.safetensors"))


def personal_tensors(path: Path, k: int) -> dict[str, Tensor]:
    """Client k's own model as the files tell it."""
    shared = load_file(path / "shared.safetensors")
    with safe_open(path / "clients" / f"{k:05d}" / "personal.safetensors", "pt") as file:
        own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {**own, **{name: shared[there] for name, there in json.loads(file.metadata()["shared"]).items()}}


def test_the_personal_files_predict_what_the_run_predicted(finished: Path) -> None:
    _, config = Run.open(finished)
    federation = build_federation(config)
    algorithm, task, clients = federation.algorithm, federation.task, federation.clients
    table = load_file(finished / "predictions.safetensors")
    checkpoint = json.loads((finished / "checkpoint" / "000004" / "checkpoint.json").read_text())
    server = last_server(finished, algorithm.init_server(task, Generator()))
    for k in range(4):
        state = algorithm.init_client(task, Generator())
        if str(k) in checkpoint["states"]:
            name = f"state-{checkpoint['states'][str(k)]:06d}.safetensors"
            state = trees.rebuild(state, load_file(finished / "clients" / f"{k:05d}" / name))
        message = algorithm.broadcast(task, server, k)
        evaluated = evaluate_client(federation, message, state, 3, k)
        sent = dict(trees.named_leaves(message))
        personal = {**evaluated.personal, **{name: sent[there] for name, there in evaluated.shared.items()}}
        assert trees.equal(personal_tensors(finished, k), personal)
        probs = torch.from_numpy(evaluated.predictions.probs).float()
        assert torch.equal(table["probs"][table["client"] == k], probs)
        assert len(clients[k].test.y) == len(probs)


def test_the_record_has_a_line_for_every_round_client_and_metric(finished: Path) -> None:
    record = Run(finished).read_record()
    assert {line["round"] for line in record} == {1, 2, 3, 4}
    accuracy = {(line["round"], line.get("client")) for line in record if line.get("metric") == "accuracy"}
    assert accuracy == {(t, k) for t in (2, 4) for k in (None, 0, 1, 2, 3)}
    (scores,) = read_summary(finished).values()
    last = {line["metric"]: line["value"] for line in record if line["round"] == 4 and "client" not in line}
    assert all(last[name] == scores[name] for name in ("accuracy", "nll", "ece_pooled", "ece_worst"))
    seconds = [line["value"] for line in record if line.get("metric") == "seconds"]
    assert scores["seconds"] == pytest.approx(sum(seconds)) and len(seconds) == 4


def test_a_finished_run_is_told_and_not_touched(finished: Path) -> None:
    before = {file: ((finished / file).stat().st_mtime_ns, (finished / file).read_bytes()) for file in files(finished)}
    assert resume(finished, Progress()) == read_summary(finished)
    after = {file: ((finished / file).stat().st_mtime_ns, (finished / file).read_bytes()) for file in files(finished)}
    assert before == after


def test_clients_that_fail_are_events_in_the_record(configure: Configure, tmp_path: Path) -> None:
    config = configure(algorithm={"name": "fedavg", "lr": 1e30})  # steps so large that nothing finite comes up
    summary = run(config, tmp_path / "run")["fedavg"]
    events = [line for line in Run(tmp_path / "run").read_record() if "event" in line]
    assert len(events) == summary["events"] == 4 * 2
    assert {event["event"] for event in events} == {"skipped"}
    assert all("not finite" in event["reason"] for event in events)
    assert summary["accuracy"] >= 0  # of the network they all began with


@dataclass(frozen=True)
class Unjudgeable(FedAvg):
    """Learns, but nobody can predict."""

    def predict(self, task: Task, personal: Personal, x: Tensor, rng: Generator) -> Tensor:
        return torch.full((1, len(x), 3), float("nan"))


def test_a_run_of_which_nothing_can_be_judged_still_ends(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    federation = build_federation(config)._replace(algorithm=Unjudgeable())
    summary = start(config, tmp_path / "run", federation, Progress())["fedavg"]
    assert "accuracy" not in summary
    assert summary["events"] == 2 * 4
    assert resume(tmp_path / "run", Progress())["fedavg"] == summary


@dataclass(frozen=True)
class Private(FedAvg):
    """Every client gets a message of its own, of which its personal model holds one tensor twice, and one turned."""

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        return {name: leaf + client_id for name, leaf in server.items()}

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Personal:
        weight = message["fc1.weight"]
        return super().personalise(task, {**message, "again": weight, "turned": weight.T}, client, data, rng)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_not_common_to_all_clients_is_in_each_ones_file(
    workers: int, configure: Configure, tmp_path: Path
) -> None:
    engine = {"kind": "processes", "workers": workers} if workers else {"kind": "serial"}
    config = configure(engine=engine)
    federation = build_federation(config)._replace(algorithm=Private())
    start(config, tmp_path / "run", federation, Progress())
    server = load_file(tmp_path / "run" / "checkpoint" / "000004" / "server.safetensors")
    for k in range(4):
        personal = personal_tensors(tmp_path / "run", k)
        assert torch.equal(personal["W/fc1.weight"], server["fc1.weight"] + k)
        assert torch.equal(personal["W/again"], server["fc1.weight"] + k)
        assert torch.equal(personal["W/turned"], server["fc1.weight"].T + k)


# Cut off and resumed.

FEW_STEPS = {"mask_steps": 2, "model_steps": 2, "adapt_steps": 2, "predict_samples": 2}


def cut_after(t: int) -> Progress:
    def stop(round: Round, pooled: Mapping[str, float]) -> None:
        if round.t == t:
            raise Cut

    return Progress(round=stop)


def test_every_algorithm_goes_on_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    _, config = Run.open(finished)
    with pytest.raises(Cut):
        start(config, tmp_path / "cut", build_federation(config), cut_after(0))
    with pytest.raises(Cut):
        resume(tmp_path / "cut", cut_after(2))
    assert resume(tmp_path / "cut", Progress()) == read_summary(tmp_path / "cut")
    assert_same(tmp_path / "cut", contents(finished))


@pytest.mark.parametrize("engine", [{"kind": "processes", "workers": 1}, {"kind": "processes", "workers": 3}])
def test_another_engine_goes_on_to_the_same_bits(engine: dict[str, Any], configure: Configure, tmp_path: Path) -> None:
    config = configure(algorithm={"name": "lr-bpfl", **FEW_STEPS})
    run(config, tmp_path / "whole")
    with pytest.raises(Cut):
        start(config, tmp_path / "cut", build_federation(config), cut_after(1))
    tables = configure(algorithm={"name": "lr-bpfl", **FEW_STEPS}, engine=engine).tables()
    (tmp_path / "cut" / "config.toml").write_text(to_toml(tables))
    resume(tmp_path / "cut", Progress())
    assert_same(tmp_path / "cut", contents(tmp_path / "whole"), but=("config.toml",))


def test_a_run_may_be_cut_before_any_change_to_its_files(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the machine stays up: nothing to wait for
    steps = {"mask_steps": 1, "model_steps": 1, "adapt_steps": 0, "samples": 1, "predict_samples": 1}
    config = configure(
        data={"partition": "size", "clients": 2},
        federation={"rounds": 3, "cohort": 1, "evaluate_every": 0},
        algorithm={"name": "lr-bpfl", **steps},
    )
    federation = build_federation(config)
    start(config, tmp_path / "whole", federation, Progress())
    expected = contents(tmp_path / "whole")
    path = tmp_path / "cut"

    def work() -> object:
        return resume(path, Progress()) if path.exists() else start(config, path, federation, Progress())

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


# Killed and resumed.


def digits(name: str, rounds: int = 8) -> Config:
    """A run of a second or two in two workers."""
    return parse(
        {
            "data": {"clients": 6},
            "federation": {"rounds": rounds, "cohort": 3, "evaluate_every": 3},
            "engine": {"workers": 2},
            "algorithm": {"name": name, **(FEW_STEPS if name == "lr-bpfl" else {})},
        }
    )


def go_on(config: Config, path: Path, progress: Progress) -> None:
    """Start the run, or resume it if it is there."""
    if path.exists():
        resume(path, progress)
    else:
        start(config, path, build_federation(config), progress)


def live(config: Config, path: Path, pids: Path) -> None:
    """The life of a process of its own, with a session of its own; it writes down who works for it."""
    os.setsid()

    def note(round: Round, pooled: Mapping[str, float]) -> None:
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


@pytest.mark.parametrize("name", ["fedavg", "lr-bpfl"])
def test_a_run_killed_again_and_again_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    config, path, rng = digits(name), tmp_path / "killed", random.Random(name)
    run(config, tmp_path / "whole")
    # Kill at any time after the start, and then some time after a round, until it is nearly through.
    waits = [(0, rng.uniform(0.0, 0.3)), (0, rng.uniform(0.1, 0.5))]
    waits += [(t, rng.uniform(0.0, 0.05)) for t in (1, 3, 5, 7)]
    killed = 0
    for rounds, delay in waits:
        process = fork(config, path)
        wait_until(lambda: rounds_done(path) >= rounds or not process.is_alive())  # noqa: B023
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
        "from tests.experiments.test_runner import Progress, go_on;"
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
    wait_until(lambda: rounds_done(path) >= 3)
    workers = [int(pid) for pid in path.with_suffix(".pids").read_text().split()]
    assert len(workers) == 2 and all(map(is_running, workers))
    os.kill(process.pid or 0, signal.SIGKILL)  # it alone
    process.join()
    wait_until(lambda: not any(map(is_running, workers)), seconds=10)
