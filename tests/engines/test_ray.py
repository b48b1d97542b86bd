"""Clients as tasks of a real Ray cluster of two nodes: the serial engine's bits, whatever dies, nothing left over."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrbpfl import plugins, trees
from lrbpfl.algorithms.protocol import Info, Task
from lrbpfl.core.descent import Data
from lrbpfl.engines import ray_engine, ray_session, ray_task, registry
from lrbpfl.engines.loop import Round, federate
from lrbpfl.engines.ray_engine import Ray
from lrbpfl.engines.ray_task import Common, Work, common_part, unwrap, wrap, wrap_setup
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup, granted, update_client
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import parse
from lrbpfl.testing import check_engine
from lrbpfl.trees import Tree
from tests.engines.fakes import Hoarder, Scripted, calls, line, same_rounds
from tests.engines.test_equality import assert_engines_agree, small
from tests.test_plugins import install

if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra ray is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
STORE = 80 * 2**20
SEEN = {"seen": torch.zeros(3)}
DEATH = "its worker or its node died (WorkerCrashedError)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each; this process is connected to the first."""
    ray = ray_session.ray_module()
    from ray.cluster_utils import Cluster

    sooner = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": sooner}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1, object_store_memory=STORE)
    ray.init(nodes.address, log_to_driver=False, logging_level="error")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def run(setup: Setup, rounds: int = 1) -> list[Round]:
    with closing(Ray(setup)) as engine:
        return list(federate(engine, rounds=rounds, cohort=len(setup.clients)))


def undisturbed(clients: int = 4, rounds: int = 1) -> list[Round]:
    return list(federate(Serial(line(Scripted(), clients)), rounds=rounds, cohort=clients))


def owned() -> int:
    """The objects in Ray's store that this process keeps there."""
    import ray

    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def used() -> float:
    """The bytes of all nodes' stores that are taken."""
    ray = ray_session.ray_module()
    return float(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Nodes tell each other what is freed, which takes a moment."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("name", ["lr-bpfl", "fedbe", "pfedbayes", "local"])  # who keeps what, and sends what
def test_the_bits_are_those_of_the_serial_engine(name: str, cluster: Any) -> None:
    assert_engines_agree(small(name), Ray, rounds=2)


def test_it_keeps_the_promises_of_an_engine(cluster: Any) -> None:
    check_engine(lambda setup, states: Ray(setup, states=states))
    assert_engines_agree(line(Hoarder()), Ray)


def test_clients_that_fail_make_no_difference_between_engines(cluster: Any) -> None:
    for script in ("nan", "raise", "shape", "big", "no tensor"):
        setup = line(Scripted(update=script, predicting="raise", culprits=(1, 2)))
        expected = list(federate(Serial(setup), rounds=1, cohort=4))
        assert same_rounds(run(setup), expected)
        assert list(expected[0].failures) == [1, 2]


def test_a_client_that_kills_its_worker_once_is_run_again(cluster: Any, tmp_path: Path) -> None:
    marker, before = tmp_path / "marker", owned()
    rounds = run(line(Scripted(update="die once", culprits=(1,), marker=str(marker))))
    assert [ended.retried for ended in rounds] == [{1: DEATH}]
    assert same_rounds(rounds, undisturbed())
    assert calls(marker) == 2
    assert becomes_true(lambda: owned() <= before)


@dataclass(frozen=True)
class Leaver(Scripted):
    """Client 2 ends its worker."""

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: torch.Generator
    ) -> tuple[Tree, Tree, Info]:
        upload, state, info = super().client_update(task, message, client, data, rng)
        if info["k"] == 2:
            with Path(self.marker).open("a") as file:
                file.write("x")
            os._exit(3)
        return upload, state, info


def test_a_client_that_always_ends_its_worker_is_given_up(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setattr(ray_engine, "TRIES", 2)
    (only,) = run(line(Leaver(marker=str(marker))))
    assert only.failures == {2: f"{DEATH}, 2 times"}
    assert only.accepted == [0, 1, 3]
    assert calls(marker) == 2
    assert all(evaluation.result for evaluation in only.evaluations.values())


def messages(size: int, t: int, clients: int = 4) -> dict[int, Tree]:
    """The same tensor for everybody, and one of its own for each."""
    common = torch.full((size,), float(t))
    return {k: {"w": common, "own": torch.full((size,), float(k))} for k in range(clients)}


def test_nothing_piles_up_in_the_store(cluster: Any) -> None:
    """Together the rounds send more than the stores hold."""
    before = owned()
    with closing(Ray(line(Scripted()))) as engine:
        for t in range(6):
            replies = list(engine.update(messages(2**20, t), t))
            assert [reply.update and reply.update.upload["w"].shape for reply in replies] == 4 * [(2**20,)]
            del replies
            assert becomes_true(lambda: owned() <= before + 1)  # the setup
        assert becomes_true(lambda: used() < 2**20)
    assert becomes_true(lambda: owned() <= before)
    assert ray_session.ray_module().is_initialized()


def test_what_is_common_is_sent_once() -> None:
    sent = messages(4, 1)
    common, rest = common_part(sent)
    assert [tensor.data_ptr() for tensor in common] == [sent[0]["w"].data_ptr()]
    assert all(rest[k]["w"] == Common(0) and rest[k]["own"] is sent[k]["own"] for k in sent)
    assert all(trees.equal(unwrap(wrap(rest[k]), wrap(common)), sent[k]) for k in sent)
    assert common_part({0: sent[0]}) == ((), {0: sent[0]})
    equal = {k: {"w": torch.zeros(4)} for k in range(2)}
    assert common_part(equal)[0] == ()  # equal is not the same


def test_any_tensor_travels_whole() -> None:
    halves = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    tree = {"a": halves.T, "b": (torch.tensor(True), None), "c": torch.zeros(0, 3), "d": "words"}
    found = unwrap(wrap(tree))
    assert found.pop("d") == tree.pop("d")
    assert trees.equal(found, tree)
    assert found["a"].data_ptr() % 64 == 0


def test_an_engine_can_be_left_early_and_used_after_closing(cluster: Any) -> None:
    setup = line(Scripted(update="sleep", culprits=(1, 3)), clients=6)
    engine = Ray(setup)
    for t in range(3):
        replies = engine.update({k: {"w": torch.ones(3)} for k in range(6)}, t)
        assert next(replies).client_id == 0
        assert isinstance(replies, Generator)
        if t:
            replies.close()
        else:
            engine.close()
    expected = list(federate(Serial(setup), rounds=1, cohort=6))
    assert same_rounds(list(federate(engine, rounds=1, cohort=6)), expected)
    engine.close()
    engine.close()


@dataclass(frozen=True)
class Slow(Scripted):
    """A client leaves a file that says at which node it runs, and takes its time."""

    folder: str = ""

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: torch.Generator
    ) -> tuple[Tree, Tree, Info]:
        import ray

        done = super().client_update(task, message, client, data, rng)
        Path(self.folder, ray.get_runtime_context().get_node_id()).touch()
        time.sleep(0.2)
        return done


def test_a_node_killed_in_mid_round_changes_no_bit(cluster: Any, tmp_path: Path) -> None:
    victim = next(iter(cluster.worker_nodes), None) or cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def kill() -> None:
        while not (tmp_path / victim.node_id).exists():
            time.sleep(0.01)
        cluster.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(line(Slow(folder=str(tmp_path)), clients=20), rounds=2)
    killer.join()
    assert same_rounds(found, undisturbed(clients=20, rounds=2))
    assert any(ended.retried for ended in found)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere", "is neither auto nor host:port"),
        ("ray://127.0.0.1:10001", "is neither auto nor host:port"),
        ("127.0.0.1:1", "no Ray cluster can be used there: 127.0.0.1:1 does not answer"),
        ("auto", "no Ray cluster can be used there: 127.0.0.1:2 does not answer"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")  # of a cluster that is gone
    with pytest.raises(BadInput, match=words):
        ray_session._check_reachable(address)


def test_a_connected_process_is_not_sent_elsewhere(cluster: Any) -> None:
    with pytest.raises(BadInput, match=f"connected to the Ray cluster at {cluster.address}"):
        Ray(line(Scripted()), address="127.0.0.1:1")
    for address in ("auto", cluster.address):
        Ray(line(Scripted()), address=address).close()
    assert ray_session.ray_module().is_initialized()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(BadInput, match=r"engine\.device = 'cuda': the engine ray runs clients on CPUs"):
        Ray(line(Scripted())._replace(device="cuda"))
    with pytest.raises(BadInput, match=r"engine\.address = 'auto' names a cluster, and the engine 'processes' runs on"):
        parse({"engine": {"address": "auto"}})


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install lrbpfl\[ray\]"):
        Ray(line(Scripted()))


class Place:
    """A reference to a setup that this process has read already."""

    def hex(self) -> str:
        return "here"


def test_a_worker_without_work_forgets_its_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = granted(line(Scripted()))
    monkeypatch.setattr(ray_task, "IDLE", 0.05)
    monkeypatch.setitem(ray_task._known, "here", setup)
    answer = unwrap(ray_task.run([Place()], None, wrap(Work("update", 2, 0, {"w": torch.ones(3)}, SEEN))))
    assert trees.equal(answer.upload, update_client(setup, {"w": torch.ones(3)}, SEEN, 0, 2).upload)
    assert answer.examples == 6
    assert becomes_true(lambda: not ray_task._known)


def test_a_worker_with_another_torch_refuses_the_setup() -> None:
    _, rest, block = wrap_setup(line(Scripted()))
    assert isinstance(ray_task._read_setup(ray_task.versions(), rest, block), Setup)
    told = ray_task._read_setup({"torch": "0.4.1"}, rest, block)
    assert (
        told == f"its worker cannot read the setup: BadInput: torch {torch.__version__} is installed there, not 0.4.1"
    )


def test_the_last_engine_ends_the_ray_that_the_first_one_began(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class FakeRay:
        """Remembers what it was told."""

        def is_initialized(self) -> bool:
            return happened.count("init") > happened.count("shutdown")

        def init(self, address: str, num_cpus: int | None, **rest: Any) -> None:
            happened.append("init")

        def shutdown(self) -> None:
            happened.append("shutdown")

        def get_runtime_context(self) -> SimpleNamespace:
            return SimpleNamespace(gcs_address="here:1")

    fake = FakeRay()
    monkeypatch.setattr(ray_session, "ray_module", lambda: fake)
    ray_session.enter(2, "")
    ray_session.enter(2, "auto")
    ray_session.leave()
    assert happened == ["init"]
    ray_session.leave()
    assert happened == ["init", "shutdown"]
    fake.init("somebody else's", None)
    ray_session.enter(2, "")
    ray_session.leave()
    assert happened == ["init", "shutdown", "init"]


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The entry points of this very pyproject.toml, whatever was installed when."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    install(tmp_path, "lrbpfl", points)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.offered.cache_clear()
    yield tmp_path
    plugins.offered.cache_clear()


def test_it_comes_in_by_our_own_entry_point(offered: Path) -> None:
    assert registry.names()[:3] == ["processes", "serial", "ray"]
    assert registry.find("ray") is ray_engine.make


def test_the_command_line_runs_a_ray_of_its_own(offered: Path, tmp_path: Path) -> None:
    """Quietly, to the same record, and nothing is left running; Ray is imported for it alone."""
    script = """
import os
import sys
from lrbpfl.cli.main import app
for engine in ("serial", "ray"):
    assert "ray" not in sys.modules
    small = ["federation.rounds=2", "federation.cohort=3", "engine.workers=2", "data.dataset=digits"]
    settings = [word for setting in small for word in ("--set", setting)]
    app(["run", "-a", "fedavg", "--engine", engine, *settings, "--quiet", "--out", engine], standalone_mode=False)
assert not sys.modules["ray"].is_initialized()
"""
    outside = os.environ | {"PYTHONPATH": os.pathsep.join([str(offered), str(ROOT)])}
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    here, there = (ran.stdout.split("In serial:")[0], ran.stdout.split("lrbpfl report serial")[1])
    assert len(here.splitlines()) == len(there.split("In ray:")[0].splitlines()) - 1
    assert "ray" not in ran.stderr.lower()
    records = [(tmp_path / engine / "metrics.jsonl").read_text().splitlines() for engine in ("serial", "ray")]
    ours, theirs = ([line for line in record if "seconds" not in line] for record in records)
    assert ours == theirs
    assert 'kind = "ray"' in (tmp_path / "ray" / "config.toml").read_text()
    assert "address" not in (tmp_path / "ray" / "config.toml").read_text()
