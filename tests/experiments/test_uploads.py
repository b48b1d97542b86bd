"""What a run does with uploads, from its configuration to its record."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Generator

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.network import Params
from lrbpfl.engines.intake import Intake
from lrbpfl.engines.privacy import epsilon
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import intake_of
from lrbpfl.experiments.runner import Progress, start
from lrbpfl.experiments.store import Run
from lrbpfl.reports.collect import collect
from lrbpfl.reports.page import render
from tests.experiments.conftest import Configure, run

NOISY = {"rounds": 4, "cohort": 2, "evaluate_every": 2, "clip": 1.0, "noise": 3.0, "delta": 1e-4}


def test_fields_travel_and_what_is_off_is_not_written_down(configure: Configure) -> None:
    fields = set(Intake._fields)
    plain = configure()
    assert intake_of(plain.federation) == Intake()
    assert not fields & plain.tables()["federation"].keys()
    trimmed = configure(federation={"aggregate": "trimmed", "trim": 0.3, "farthest": 0.0})
    assert intake_of(trimmed.federation) == Intake(farthest=0.0, aggregate="trimmed", trim=0.3)
    assert fields & trimmed.tables()["federation"].keys() == {"aggregate", "trim", "farthest"}
    assert fields & configure(federation={"aggregate": "median"}).tables()["federation"].keys() == {"aggregate"}


def test_what_cannot_be_together_is_told_with_its_section(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"it needs federation\.clip"):
        configure(federation={"noise": 1.0})
    with pytest.raises(BadInput, match=r"federation\.farthest = 0\.5"):
        configure(federation={"farthest": 0.5})


def test_with_noise_nothing_else_of_a_client_may_be_shared(configure: Configure) -> None:
    pytest.importorskip("dp_accounting.rdp")
    with pytest.raises(BadInput, match=r"data\.public_fraction = 0\.04 moves inputs of clients"):
        configure(federation=NOISY, algorithm={"name": "fedbe"})
    with pytest.raises(BadInput, match=r"data\.standardise = 'pooled' makes sums"):
        configure(federation=NOISY, data={"standardise": "pooled"})


def test_epsilon_is_in_the_record_and_in_the_summary(configure: Configure, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting.rdp")
    config = configure(federation=NOISY)
    summary = run(config, tmp_path / "run")["fedavg"]
    told = {n: epsilon(intake_of(config.federation), clients=4, cohort=2, rounds=n) for n in (2, 4)}
    lines = [line for line in Run(tmp_path / "run").read_record() if line.get("metric") == "epsilon"]
    assert lines == [{"round": n, "metric": "epsilon", "value": value} for n, value in told.items()]
    assert (summary["epsilon"], summary["delta"]) == (told[4], 1e-4)
    assert "epsilon" not in run(configure(), tmp_path / "plain")["fedavg"]


def test_too_little_noise_is_told_before_anything_is_written(configure: Configure, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting.rdp")
    with pytest.raises(BadInput, match="too little"):
        run(configure(federation={**NOISY, "noise": 1e-200}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Broken(FedAvg):
    """A server that loses its numbers in every round."""

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        lost: Params = trees.tree_map(
            lambda leaf: leaf * torch.nan, super().server_aggregate(task, server, updates, rng)
        )
        return lost


def test_a_round_that_was_undone_is_an_event_of_no_client(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    summary = start(config, tmp_path / "run", build_setup(config)._replace(algorithm=Broken()), Progress())["fedavg"]
    events = [line for line in Run(tmp_path / "run").read_record() if "event" in line]
    assert [(line["round"], line["event"], "client" in line) for line in events] == [
        (n, "undone", False) for n in (1, 2, 3, 4)
    ]
    assert all("unfit: fc1.weight holds numbers that are not finite" in line["reason"] for line in events)
    assert summary["events"] == 4 and summary["accuracy"] >= 0
    assert "round 1, undone: the server&#39;s next state is unfit" in render(collect([tmp_path / "run"]))
