"""Tempered runs: what is fitted on what, what is written down, and comparisons beside runs that are not tempered."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lrbpfl.core.descent import Data
from lrbpfl.engines.loop import federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import Config, make_algorithm, parse
from lrbpfl.experiments.runner import Progress, start
from lrbpfl.experiments.store import Run, read_tables
from lrbpfl.metrics import tempering
from lrbpfl.studies import comparison
from tests.experiments.conftest import Configure, assert_same, contents

NEW = {"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5], "new_fraction": 0.4}


def aside(federation: Setup, n: int = 4, *, but: int = -1) -> Setup:
    """Every client but one keeps its last n training examples from training."""

    def part(data: Data, chosen: slice) -> Data:
        return Data(x=data.x[chosen], y=data.y[chosen])

    clients = [
        c if k == but else c._replace(train=part(c.train, slice(-n)), calibration=part(c.train, slice(-n, None)))
        for k, c in enumerate(federation.clients)
    ]
    return federation._replace(clients=tuple(clients))


def built(config: Config, **kept: int) -> Setup:
    """The clients of a configuration, which keep as much from training as is said here, whatever it says."""
    whole = dataclasses.replace(config, data=config.data.model_copy(update={"calibration_fraction": 0.0}))
    return aside(build_setup(whole), **kept)


def run(config: Config, path: Path, **kept: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[int, float]]:
    """A run's summary, its predictions, and the temperature of each client in the last round."""
    summary = start(config, path, built(config, **kept), Progress())
    lines = [line for line in Run(path).read_record() if line.get("metric") == "temperature"]
    last = {line["client"]: line["value"] for line in lines if line["round"] == config.federation.rounds}
    return summary[config.algorithm_name], load_file(path / "predictions.safetensors"), last


@pytest.mark.parametrize("name", ["lr-bpfl", "fedavg", "pfedgp"])  # masks, one network, no network's softmax
def test_an_algorithm_can_be_tempered(name: str, configure: Configure, tmp_path: Path) -> None:
    """At every temperature what is written is the plain run's probabilities to the power 1 / T."""
    small = {"rounds": 2, "evaluate_every": 1}
    plain, before, none = run(configure(federation=small, algorithm={"name": name}), tmp_path / "plain")
    for how in ("client", "all"):
        config = configure(federation={**small, "temper": how}, algorithm={"name": name})
        summary, after, temperatures = run(config, tmp_path / how)
        assert not none and temperatures.keys() == {0, 1, 2, 3}
        assert len(set(temperatures.values())) == 1 or how == "client"
        t = torch.tensor([temperatures[k] for k in after["client"].tolist()], dtype=torch.float64)[:, None]
        expected = torch.softmax(before["probs"].double().log() / t, dim=1)
        torch.testing.assert_close(after["probs"].double(), expected, rtol=1e-4, atol=1e-6)
        assert (plain["temper"], summary["temper"]) == ("no", how)
        assert summary["accuracy"] == pytest.approx(plain["accuracy"], abs=0.05)
        picked = after["probs"].double()[torch.arange(len(after["y"])), after["y"]].clamp(min=1.2e-38)
        assert summary["nll"] == pytest.approx(-picked.log().mean().item(), rel=1e-4)


def test_a_temperature_is_fitted_on_what_that_client_or_all_kept(configure: Configure, tmp_path: Path) -> None:
    algorithm = {"name": "fedavg-ft", "ft_lr": 0.5}
    own = configure(federation={"temper": "client"}, algorithm=algorithm)
    *_, last = federate(Serial(built(own)), rounds=4, cohort=2)
    kept = [e.result.calibration for e in last.evaluations.values() if e.result and e.result.calibration]
    assert len(kept) == 4
    assert run(own, tmp_path / "own")[2] == {k: tempering.fit([part]) for k, part in enumerate(kept)}
    together = configure(federation={"temper": "all"}, algorithm=algorithm)
    assert set(run(together, tmp_path / "all")[2].values()) == {tempering.fit(kept)}


def test_who_kept_nothing_predicts_as_it_was(configure: Configure, tmp_path: Path) -> None:
    algorithm = {"name": "fedavg-ft", "ft_lr": 0.5}
    _, _, own = run(configure(federation={"temper": "client"}, algorithm=algorithm), tmp_path / "own", but=1)
    assert own[1] == 1.0 and sum(t != 1.0 for t in own.values()) >= 2
    _, _, common = run(configure(federation={"temper": "all"}, algorithm=algorithm), tmp_path / "all", but=1)
    assert len(set(common.values())) == 1 and common[1] != 1.0


def test_new_clients_have_a_temperature_and_move_nobody_elses(configure: Configure, tmp_path: Path) -> None:
    for how in ("client", "all"):
        config = configure(data=NEW, federation={"temper": how}, algorithm={"name": "fedavg-ft", "ft_lr": 0.5})
        federation = built(config, n=2)
        summary = start(config, tmp_path / how, federation, Progress())["fedavg-ft"]
        told = [line for line in Run(tmp_path / how).read_record() if line.get("metric") == "temperature"]
        last = {line["client"]: line["value"] for line in told if line["round"] == 4}
        assert last.keys() == set(range(5)) and "nll" in summary["new"]["0.5"]
        alone = federation._replace(clients=federation.clients[:3])
        start(config, tmp_path / f"{how} alone", alone, Progress())
        lines = [line for line in Run(tmp_path / f"{how} alone").read_record() if line.get("metric") == "temperature"]
        assert {line["client"]: line["value"] for line in lines if line["round"] == 4} == {k: last[k] for k in range(3)}


def test_a_tempered_run_is_the_same_in_two_processes(configure: Configure, tmp_path: Path) -> None:
    tables: dict[str, dict[str, Any]] = {"federation": {"temper": "client"}, "algorithm": {"name": "lr-bpfl"}}
    run(configure(**tables), tmp_path / "one")
    run(configure(**tables, engine={"kind": "processes", "workers": 2}), tmp_path / "two")
    assert_same(tmp_path / "two", contents(tmp_path / "one"), but=("config.toml",))


def test_what_a_tempered_configuration_keeps_from_training() -> None:
    assert parse({}).data.calibration_fraction == 0.0
    assert not {"calibration_fraction", "temper"} & {key for table in parse({}).tables().values() for key in table}
    config = parse({"federation": {"temper": "all"}})
    assert config.data.calibration_fraction == 0.15
    assert parse({name: table for name, table in config.tables().items() if name != "versions"}) == config
    assert parse({"data": {"calibration_fraction": 0.4}}).data.calibration_fraction == 0.4
    with pytest.raises(BadInput, match=r"temper = 'all' needs data\.calibration_fraction above 0"):
        parse({"data": {"calibration_fraction": 0.0}, "federation": {"temper": "all"}})


def test_a_suffix_tempers_one_algorithm() -> None:
    config = parse({"algorithm": {"name": "lr-bpfl:paper+temper", "samples": 3}})
    assert config.algorithm == make_algorithm("lr-bpfl:paper", {"samples": 3})
    assert (config.federation.temper, config.data.calibration_fraction) == ("all", 0.15)
    assert parse(config.tables()) == config
    said = parse({"federation": {"temper": "client"}, "algorithm": {"name": "fedavg+temper"}})
    assert said.federation.temper == "client"
    with pytest.raises(BadInput, match=r"unknown suffix of fedavg 'tempre' \(did you mean 'temper'\?\)"):
        make_algorithm("fedavg+tempre", {})


def test_a_tempered_algorithm_beside_the_same_one_as_it_is(folder: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "data": {"dataset": str(folder), "train_fraction": 0.5},
        "federation": {"rounds": 2, "cohort": 2, "model": "mlp"},
        "engine": {"kind": "serial"},
        "algorithm": {name: {"ft_lr": 0.5} for name in ("fedavg-ft", "fedavg-ft+temper")},
    }
    names = ["fedavg-ft+temper", "fedavg-ft", "local"]
    configs = comparison.plan(tables, names)
    summary = comparison.compare(configs, tmp_path / "both", lambda name, config: Progress())
    assert {name: scores["temper"] != "no" for name, scores in summary.items()} == {
        "fedavg-ft+temper": True,
        "fedavg-ft": False,
        "local": False,
    }
    parts = comparison.parts(tmp_path / "both")
    assert [path.name for path in parts.values()] == ["fedavg-ft-temper", "fedavg-ft", "local"]
    judged = [load_file(path / "predictions.safetensors") for path in parts.values()]
    assert all(torch.equal(judged[0][key], table[key]) for table in judged for key in ("client", "y"))
    expected = contents(tmp_path / "both" / "fedavg-ft-temper")
    alone = parse({**tables, "algorithm": {"name": "fedavg-ft", "ft_lr": 0.5}})
    start(alone, tmp_path / "alone", build_setup(alone), Progress())
    assert_same(tmp_path / "both" / "fedavg-ft", contents(tmp_path / "alone"))

    tables = {name: table for name, table in read_tables(tmp_path / "both").items() if name != "compare"}
    again = comparison.plan(tables, names)
    assert again == configs, "a comparison that was cut off goes on with what it was"
    (tmp_path / "both" / "fedavg-ft-temper").rename(tmp_path / "away")
    comparison.resume_comparison(tmp_path / "both", lambda name, config: Progress())
    assert_same(tmp_path / "both" / "fedavg-ft-temper", expected)
