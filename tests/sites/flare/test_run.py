"""The package's own hub and sites as real processes on the loopback, left alone and disturbed."""

import json
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("nvflare")

from lrbpfl import trees
from lrbpfl.sites.demo import prepare
from lrbpfl.sites.flare.job import write_job
from lrbpfl.sites.flare.local import Running, jobs, processes, send
from lrbpfl.sites.job import write
from tests.sites.alone import Present, alone, network
from tests.sites.flare.loopback import Federation, Supervised, build, until

pytestmark = [pytest.mark.sites, pytest.mark.filterwarnings("default")]


class Speakers(Federation):
    """Fifteen speakers at three sites."""

    def __init__(self, folder: Path) -> None:
        self.__dict__ |= vars(build(folder))
        self.kits = {site: self.folder / site for site in self.sites}
        self.about = prepare(self.kits)["about"]

    def ask(self, run: str, rounds: int, **about: Any) -> dict[str, Any]:
        federation = {"rounds": rounds, "cohort": 15, "evaluate_every": rounds}
        tables = {"algorithm": {"name": "lr-bpfl"}, "federation": federation}
        return write(run, tables, {**self.about, "minimum": 2, "deadline": 60.0, **about})

    def path(self, run: str) -> Path:
        return self.server / "hub" / "runs" / run

    def rounds(self, run: str) -> int:
        return len(present(self.path(run) / "metrics.jsonl"))

    def network(self, run: str) -> dict[str, torch.Tensor]:
        return load_file(max((self.path(run) / "checkpoint").iterdir()) / "server.safetensors")


def present(metrics: Path) -> Present:
    """Who was counted in each round, by the run's own record."""
    found: dict[int, set[int]] = defaultdict(set)
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        row = json.loads(line)
        if row.get("metric") == "loss":
            found[row["round"]].add(row["client"])
    return found


@pytest.fixture(scope="module")
def speakers(tmp_path_factory: pytest.TempPathFactory) -> Speakers:
    return Speakers(tmp_path_factory.mktemp("federation") / "speakers")


@pytest.fixture(scope="module")
def running(speakers: Speakers) -> Iterator[Running]:
    with speakers.running() as running:
        yield running


def started(speakers: Speakers, job: dict[str, Any], out: Path, rounds: int = 0) -> Supervised:
    """A run that is under way for so many rounds."""
    run = Supervised(speakers, job, out, write_job)
    until(lambda: speakers.rounds(job["run"]) >= rounds or run.error is not None, 90, lambda: str(run.told))
    return run


def test_the_bits_of_one_machine(speakers: Speakers, running: Running, tmp_path: Path) -> None:
    job = speakers.ask("plain", 4)
    outcome = started(speakers, job, tmp_path).end()
    assert outcome["complete"] and outcome["leg"] == 1 and not outcome["lost"]
    assert trees.equal(speakers.network(job["run"]), network(alone(job, speakers.kits)))


def test_a_killed_server_ends_in_the_bits_of_an_undisturbed_run(
    speakers: Speakers, running: Running, tmp_path: Path
) -> None:
    job = speakers.ask("server", 25)
    run = started(speakers, job, tmp_path, rounds=3)
    send(processes(speakers.server), signal.SIGKILL)
    time.sleep(2)
    assert speakers.rounds(job["run"]) < 25
    running.start(speakers.server)
    assert run.end()["leg"] == 2
    assert trees.equal(speakers.network(job["run"]), network(alone(job, speakers.kits)))


@pytest.mark.nightly
def test_a_killed_site_and_a_killed_job_are_back_with_the_right_states(
    speakers: Speakers, running: Running, tmp_path: Path
) -> None:
    """As right as on one machine where the same clients were absent from the same rounds."""
    job = speakers.ask("site", 80, deadline=10.0)
    run = started(speakers, job, tmp_path, rounds=3)
    send(processes(speakers.kits["site-2"]), signal.SIGKILL)
    record = speakers.path(job["run"]) / "metrics.jsonl"
    until(lambda: 10 in map(len, present(record).values()), 60, lambda: str(run.told))
    send(jobs(speakers.kits["site-3"]), signal.SIGKILL)
    running.start(speakers.kits["site-2"])
    outcome = run.end(300)
    assert outcome["complete"] and outcome["leg"] >= 2 and not outcome["lost"]
    took_part = present(tmp_path / "metrics.jsonl")
    assert len(took_part[80]) == 15
    assert trees.equal(speakers.network(job["run"]), network(alone(job, speakers.kits, took_part)))


@pytest.mark.nightly
def test_a_frozen_site_costs_a_deadline(speakers: Speakers, running: Running, tmp_path: Path) -> None:
    job = speakers.ask("frozen", 60, deadline=10.0)
    run = started(speakers, job, tmp_path, rounds=3)
    frozen = processes(speakers.kits["site-3"])
    send(frozen, signal.SIGSTOP)
    try:
        until(lambda: speakers.rounds(job["run"]) >= 30, 60, lambda: str(run.told))
    finally:
        send(frozen, signal.SIGCONT)
    assert run.end()["complete"]
    took_part = present(tmp_path / "metrics.jsonl")
    assert trees.equal(speakers.network(job["run"]), network(alone(job, speakers.kits, took_part)))


def test_a_site_that_refuses_is_named(speakers: Speakers, running: Running, tmp_path: Path) -> None:
    own = speakers.kits["site-2"] / "site.toml"
    before = own.read_text()
    own.write_text(before + "steps = 1\n")
    try:
        run = started(speakers, speakers.ask("limits", 2, minimum=3), tmp_path)
        until(lambda: not run.thread.is_alive(), 90, lambda: str(run.told))
    finally:
        own.write_text(before)
    assert "site-2: " in str(run.error) and "needs 3 sites, and 2 joined (site-1, site-3)" in str(run.error)
