"""Workers of every kind: from scripts as people write them, and gone when their parent is."""

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.core.descent import Data
from lrbpfl.engines import launch
from lrbpfl.engines.launch import Start, hidden_main, method, pack, unpack
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.errors import BadInput
from tests.engines.fakes import Hoarder, Scripted, line, noise

METHODS = ("fork", "forkserver", "spawn")

# No `if __name__ == "__main__"`, a model and an algorithm of its own, and a NamedTuple that clients keep and send back.
SCRIPT = """
import sys
from typing import NamedTuple
import torch
from pydantic.dataclasses import dataclass
from torch import nn
from lrbpfl import ClientData, Data, FedAvg, Processes, Setup, Task, federate

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))

class Kept(NamedTuple):
    rounds: torch.Tensor

@dataclass(frozen=True)
class Counting(FedAvg):
    def init_client(self, task, rng):
        return Kept(rounds=torch.zeros(()))

    def client_update(self, task, message, client, data, rng):
        assert __file__.endswith("script.py")
        upload, _, info = super().client_update(task, message, None, data, rng)
        return upload, Kept(rounds=client.rounds + 1), info

x = torch.linspace(-1, 1, 40).reshape(20, 2)
data = Data(x=x, y=torch.arange(20) % 2)
clients = tuple(ClientData(name=name, train=data, test=data) for name in "ab")
setup = Setup(Counting(local_steps=2), Task(model=Net(), num_classes=2), clients, seed=0)
engine = Processes(setup, workers=2, start=sys.argv[1])
for round in federate(engine, rounds=2, cohort=2):
    print(round.t, round.accepted, round.failures)
print(sorted(k for k, e in round.evaluations.items() if e.result), __file__ is not None)
print([int(kept.rounds) for kept in engine.states.kept.values() if isinstance(kept, Kept)])
engine.close()
"""


@pytest.mark.parametrize("start", METHODS[1:])  # a fork imports no script again
def test_a_script_needs_no_guard_and_may_define_its_own_classes(start: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", start]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["0 [0, 1] {}", "1 [0, 1] {}", "[0, 1] True", "[2, 2]"]


ORPHANS = """
import os, signal, sys
from lrbpfl import Processes, federate
from tests.engines.fakes import Scripted, line

engine = Processes(line(Scripted()), 2, sys.argv[1])
for round in federate(engine, rounds=2, cohort=2):
    print(round.accepted, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", METHODS)
def test_workers_end_when_their_parent_dies(start: str) -> None:
    """They hold its standard output: that it ends means that they all did."""
    command = [sys.executable, "-c", ORPHANS, start]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert (ran.returncode, ran.stderr) == (-9, "")
    assert len(ran.stdout.splitlines()) == 1


@pytest.mark.parametrize("start", get_args(Start))
def test_closing_ends_workers_and_a_killed_one_is_replaced(start: Start, tmp_path: Path) -> None:
    setup = line(Scripted(update="die once", culprits=(1,), marker=str(tmp_path / "marker")))
    with closing(Processes(setup, 1, start)) as engine:
        (only,) = federate(engine, rounds=1, cohort=4)
        workers = [worker.process for worker in engine._workers]
    assert only.retried == {1: "its worker died (exit code -9)"}
    assert only.accepted == [0, 1, 2, 3]
    assert len(workers) == 1 and not workers[0].is_alive()


def test_a_setup_arrives_as_it_was_sent() -> None:
    setup = noise(Hoarder(), nn.Linear(5, 3), (5,))
    x = setup.clients[0].train.x
    view = setup.clients[1]._replace(train=Data(x=x[2:5], y=torch.arange(3)))
    setup = setup._replace(clients=(setup.clients[0], view), task=setup.task._replace(public=x[:0]))
    found = unpack(pack(setup))
    for a, b in zip(found.clients, setup.clients, strict=True):
        assert a.name == b.name
        assert trees.equal((a.train, a.test, a.calibration), (b.train, b.test, b.calibration))
    assert trees.equal(found.task.public, setup.task.public)
    assert trees.equal(dict(found.task.model.state_dict()), dict(setup.task.model.state_dict()))


def test_a_model_that_cannot_be_sent_is_refused_in_a_sentence() -> None:
    setup = line(Scripted())
    vars(setup.task.model)["lock"] = threading.Lock()
    with closing(Processes(setup, 1, "spawn")) as engine, pytest.raises(BadInput, match="cannot be sent"):
        next(federate(engine, rounds=1, cohort=1))


def test_a_setup_that_only_the_parent_can_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    only_here = ModuleType("only_here")
    vars(only_here)["Net"] = type("Net", (nn.Linear,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    setup = line(Scripted())
    setup = setup._replace(task=setup.task._replace(model=vars(only_here)["Net"](1, 2)))
    with closing(Processes(setup, 1, "forkserver")) as engine:
        (only,) = federate(engine, rounds=1, cohort=1)
    (reason,) = only.failures.values()
    assert reason == "its worker cannot read the setup: ModuleNotFoundError: No module named 'only_here'"


@pytest.mark.parametrize(
    ("start", "device", "words"),
    [("threads", "cpu", "'threads' here: give one of auto, fork"), ("fork", "cuda", "use cuda cannot be forked")],
)
def test_a_way_that_cannot_work_is_refused(start: Start, device: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        method(start, device)


def test_forks_are_for_the_cpu_only() -> None:
    assert method("auto", "cuda:1") == "spawn"
    is_fit = sys.platform == "linux" and not launch.ray_ran.is_set() and launch.forks_learn()
    assert method("auto", "cpu") == ("fork" if is_fit else "spawn")


def test_where_a_ray_ran_nobody_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()
    ran.set()
    monkeypatch.setattr(launch, "ray_ran", ran)
    assert method("auto", "cpu") == "spawn"


class Lethal:
    """Ends a fork that collects it."""

    def __init__(self) -> None:
        self.itself, self.parent = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.parent:
            os._exit(11)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_does_not_collect_what_its_parent_let_go() -> None:
    def collects(setup: object, pipe: launch.Pipe, slot: torch.Tensor) -> None:
        gc.collect()
        pipe.send("alive")

    gc.disable()
    try:
        Lethal()
        process, pipe = launch.launch("fork", collects, line(Scripted()), torch.empty(1))
    finally:
        gc.enable()
    assert pipe.recv() == "alive"
    process.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_that_hangs_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    monkeypatch.setattr(launch, "TRIAL", 1)
    monkeypatch.setattr(launch, "_gradient", lambda: None if os.getpid() == parent else time.sleep(60))
    assert not launch.forks_learn()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_where_forks_compute_no_gradients_nobody_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses them in a fork of a process that has threads for a GPU, even if all clients are on the CPU."""
    parent = os.getpid()

    def gradient() -> None:
        if os.getpid() != parent:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(launch, "_gradient", gradient)
    assert method("auto", "cpu") == "spawn"
    with pytest.raises(BadInput, match="no gradients in forks: start worker processes by spawn"):
        method("fork", "cpu")


def test_the_main_module_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = "script.py", ModuleSpec("package.__main__", None)
    before = dict(vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(OSError), hidden_main():
        assert vars(main) == before | {"__file__": None, "__spec__": None}
        raise OSError
    assert vars(main) == before
    del main.__file__  # as in a notebook
    with hidden_main():
        assert not hasattr(main, "__file__")
    assert not hasattr(main, "__file__")
