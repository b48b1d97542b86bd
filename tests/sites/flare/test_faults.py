"""Real processes on the loopback: what a run survives, and whom the server turns away."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from lrbpfl.errors import BadInput
from lrbpfl.sites.flare import kits, project
from lrbpfl.sites.flare import supervise as supervision
from lrbpfl.sites.flare.admin import Admin
from lrbpfl.sites.flare.local import Running, jobs, processes, send
from lrbpfl.sites.flare.supervise import supervise
from tests.sites.flare.loopback import ROOT, Federation, Supervised, build, until, write_toy

# NVFlare's own threads warn, and an exception there would be a lost connection.
pytestmark = [pytest.mark.sites, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return build(tmp_path_factory.mktemp("federation") / "toys")


@pytest.fixture(scope="module")
def running(federation: Federation) -> Iterator[Running]:
    with federation.running() as running:
        yield running
    assert not [pid for kit in (running.server, *running.sites) for pid in processes(kit)]


def test_a_run_ends_with_its_public_files(federation: Federation, running: Running, tmp_path: Path) -> None:
    """One of the sites fails on the way: its error's type is told, and no text."""
    run = Supervised(federation, federation.job("plain", 8, fails="site-2"), tmp_path)
    outcome = run.end()
    assert outcome["complete"] and outcome["leg"] == 1 and outcome["lost"].keys() == {"site-2"}
    assert any(0 < seen.get("rounds", 0) <= 8 and seen["away"] == ["site-2"] for seen in run.seen)
    log = [json.loads(line)["good"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert log == [["site-1", "site-3"]] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]  # state.json is not the admin's
    texts = [path.read_bytes() for path in federation.server.rglob("*") if path.is_file()]
    assert not any(b"a secret text" in text for text in texts)


@pytest.mark.nightly
def test_a_killed_job_process_costs_one_leg(federation: Federation, running: Running, tmp_path: Path) -> None:
    run = Supervised(federation, federation.job("job", 20), tmp_path)
    run.until_round(3)
    send(jobs(federation.folder / "site-2"), signal.SIGKILL)
    assert run.end()["complete"]
    state = federation.state("job")
    assert state["leg"] == 2 and state["log"][-1] == ["site-1", "site-2", "site-3"]


def test_a_killed_site_comes_back_in_the_next_leg(
    federation: Federation, running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BACK", 3.0)
    run = Supervised(federation, federation.job("site", 100), tmp_path)
    run.until_round(3)
    send(processes(federation.folder / "site-2"), signal.SIGKILL)
    run.until_round(6)
    running.start(federation.folder / "site-2")
    assert run.end()["complete"]
    log = federation.state("site")["log"]
    assert ["site-1", "site-3"] in log and log[-1] == ["site-1", "site-2", "site-3"]


def test_a_frozen_site_does_not_hold_up_the_others(federation: Federation, running: Running, tmp_path: Path) -> None:
    run = Supervised(federation, federation.job("frozen", 20), tmp_path)
    run.until_round(3)
    frozen = processes(federation.folder / "site-3")
    send(frozen, signal.SIGSTOP)
    try:
        run.until_round(12)
    finally:
        send(frozen, signal.SIGCONT)
    outcome = run.end()
    assert outcome["complete"] and outcome["lost"] == {"site-3": "no answer in time"}


@pytest.mark.nightly
def test_a_killed_server_goes_on_where_it_was(federation: Federation, running: Running, tmp_path: Path) -> None:
    run = Supervised(federation, federation.job("server", 20), tmp_path)
    run.until_round(3)
    send(processes(federation.server), signal.SIGKILL)
    time.sleep(3)
    reached = federation.state("server")["rounds"]
    running.start(federation.server)
    assert run.end()["complete"] and reached < 20
    state = federation.state("server")
    assert state["leg"] == 2 and len(state["log"]) == 20


def test_ctrl_c_ends_the_leg_at_the_sites_too(federation: Federation, running: Running, tmp_path: Path) -> None:
    text = (
        "import json, sys; from pathlib import Path; from lrbpfl.sites.flare.admin import Admin; "
        "from lrbpfl.sites.flare.supervise import supervise; from tests.sites.flare.loopback import write_toy\n"
        "with Admin(Path(sys.argv[1])) as admin: "
        "supervise(admin, json.loads(sys.argv[2]), Path(sys.argv[3]), print, 60, write_toy)"
    )
    job = json.dumps(federation.job("cut", 1000))
    command = [sys.executable, "-c", text, str(federation.admin), job, str(tmp_path)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: federation.state("cut")["rounds"] >= 2, 90)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert said.rstrip().endswith(b"KeyboardInterrupt")
    until(lambda: not any(jobs(kit) for kit in (running.server, *running.sites)), 60)


def test_a_member_may_look_and_not_start(federation: Federation, running: Running, tmp_path: Path) -> None:
    with Admin(federation.folder / "member@toys.org") as member:
        until(lambda: set(member.sites()) == set(federation.sites), 60)
        with pytest.raises(BadInput, match=r"member@toys.org may not submit jobs: its role is member"):
            supervise(member, federation.job("member", 1), tmp_path, print, 20, write_toy)


def test_a_kit_of_another_project_is_told_so(federation: Federation, running: Running, tmp_path: Path) -> None:
    with Admin(federation.admin) as admin:
        host, port = admin.host, admin.port
    project.create(tmp_path / "others", "others", host, ["a"], federation.port, port)
    kits.make_kits(tmp_path / "others")
    kit = tmp_path / "others" / kits.KITS / "admin@others.org"
    with Admin(kit) as stranger, pytest.raises(BadInput, match=r"is not of the project of"):
        supervise(stranger, federation.job("other", 1), tmp_path, print, 20, write_toy)


def test_no_server_is_told_so_in_the_end(federation: Federation, tmp_path: Path) -> None:
    elsewhere = build(tmp_path / "none")
    told: list[str] = []
    with Admin(elsewhere.admin) as admin, pytest.raises(BadInput, match=r"there is no server at .*we stop asking"):
        supervise(admin, elsewhere.job("none", 1), tmp_path, told.append, 3, write_toy)
    assert len(told) == 1


def test_a_kit_runs_once_and_in_one_place(federation: Federation, running: Running, tmp_path: Path) -> None:
    kit, copy = federation.folder / "site-1", tmp_path / "site-1"
    assert "runs already" in _refused(running, kit)
    shutil.copytree(kit, copy)
    assert "is a copy of a kit" in _refused(running, copy)


def _refused(running: Running, kit: Path) -> str:
    command = ["bash", str(kit / "run.sh")]
    ended = subprocess.run(command, env=running.environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    return ended.stderr
