"""Runs with prediction sets: what they are fitted on, what is written down, and who gets none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from lrbpfl.engines.loop import federate
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import Config, parse, to_toml
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.experiments.store import Run
from lrbpfl.metrics.conformal import Promise, promise
from lrbpfl.studies import comparison
from tests.experiments.conftest import Configure, assert_same, contents, run
from tests.experiments.reaper import Cut
from tests.experiments.test_resume import cut_after

ALGORITHM = {"name": "fedavg-ft", "ft_lr": 0.5}
NEW = {"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5], "new_fraction": 0.4}


def asking(configure: Configure, coverage: float = 0.8, **sections: dict[str, Any]) -> Config:
    """Clients that keep 3, 4, 4 and 5 examples from training; the first has too few for 0.8."""
    data = {"calibration_fraction": 0.3, **sections.pop("data", {})}
    federation = {"coverage": coverage, **sections.pop("federation", {})}
    return configure(data=data, federation=federation, **{"algorithm": ALGORITHM, **sections})


def told(path: Path, metric: str, t: int = 4) -> dict[int, float]:
    lines = [line for line in Run(path).read_record() if line.get("metric") == metric and line["round"] == t]
    return {line["client"]: line["value"] for line in lines if "client" in line}


def test_a_promise_is_fitted_on_what_that_client_kept(configure: Configure, tmp_path: Path) -> None:
    config = asking(configure, 0.7)
    *_, last = federate(Serial(build_setup(config)), rounds=4, cohort=2)
    kept = {k: e.result.calibration for k, e in last.evaluations.items() if e.result}
    summary = run(config, tmp_path / "run")["fedavg-ft"]
    given = {k: promise(part, 0.7) for k, part in kept.items() if part}
    assert told(tmp_path / "run", "threshold") == {k: given[k].threshold for k in range(4)}
    assert told(tmp_path / "run", "calibration_examples") == {0: 3, 1: 4, 2: 4, 3: 5}
    assert told(tmp_path / "run", "coverage", t=2).keys() == {0, 1, 2, 3}

    table = {name: tensor.numpy() for name, tensor in load_file(tmp_path / "run" / "predictions.safetensors").items()}
    sizes, covered = np.zeros(len(table["y"])), np.zeros(len(table["y"]), bool)
    for k, own in given.items():
        rows = np.flatnonzero(table["client"] == k)
        sets = own.sets(table["probs"][rows])
        sizes[rows], covered[rows] = sets.sum(axis=1), sets[np.arange(len(rows)), table["y"][rows]]
        assert told(tmp_path / "run", "coverage")[k] == covered[rows].mean()
        assert told(tmp_path / "run", "singletons")[k] == (sizes[rows] == 1).mean()
    assert summary["coverage"] == pytest.approx(covered.mean())
    assert summary["set_size"] == pytest.approx(sizes.mean())
    assert summary["coverage_worst"] == min(told(tmp_path / "run", "coverage").values())
    assert summary["set_size_worst"] == max(told(tmp_path / "run", "set_size").values())
    assert (summary["promises"], summary["coverage_promised"], summary["confidence"]) == (4, 0.7, None)


def test_a_client_that_kept_too_few_has_no_promise_and_did_not_fail(configure: Configure, tmp_path: Path) -> None:
    config = asking(configure, 0.8)
    summary = run(config, tmp_path / "run")["fedavg-ft"]
    events = [line for line in Run(tmp_path / "run").read_record() if "event" in line]
    reason = "a coverage of 0.8 needs 4 calibration examples at least, not 3"
    assert events == [{"round": 4, "client": 0, "event": "no promise", "reason": reason}]
    assert (summary["promises"], summary["clients"], summary["events"]) == (3, 4.0, 0)
    assert told(tmp_path / "run", "coverage").keys() == {1, 2, 3}
    assert summary["coverage_worst"] == min(told(tmp_path / "run", "coverage").values())


def test_a_client_without_a_calibration_part_has_no_promise(configure: Configure, tmp_path: Path) -> None:
    config = asking(configure, 0.7)
    setup = build_setup(config)
    first = setup.clients[0]._replace(calibration=None)
    summary = start(config, tmp_path / "run", setup._replace(clients=(first, *setup.clients[1:])), Progress())
    assert summary["fedavg-ft"]["promises"] == 3
    (event,) = [line for line in Run(tmp_path / "run").read_record() if "event" in line]
    assert event["reason"] == "a coverage of 0.7 needs 3 calibration examples at least, not 0"


def test_new_clients_have_promises_of_their_own(configure: Configure, tmp_path: Path) -> None:
    config = asking(configure, 0.5, data=NEW, federation={"confidence": 0.5})
    summary = run(config, tmp_path / "run")["fedavg-ft"]
    assert summary["promises"] == 3 and summary["new"]["0.5"]["promises"] == 2
    own = told(tmp_path / "run", "coverage")
    assert own.keys() == set(range(5)) and told(tmp_path / "run", "coverage", t=2).keys() == set(range(3))
    assert summary["new"]["0.5"]["coverage_worst"] == min(own[3], own[4])
    assert summary["coverage_worst"] == min(own[k] for k in range(3))
    assert summary["confidence"] == 0.5


def test_a_run_with_promises_goes_on_to_the_same_bits(configure: Configure, tmp_path: Path) -> None:
    """Cut early, cut after the last round and before its summary, and finished by another engine."""
    sections: dict[str, Any] = {"data": {**NEW, "new_clients": 3}, "algorithm": {"name": "lr-bpfl", "mask_steps": 2}}
    config, path = asking(configure, 0.8, **sections), tmp_path / "cut"
    run(config, tmp_path / "whole")
    with pytest.raises(Cut):
        start(config, path, build_setup(config), cut_after(1))
    other = asking(configure, 0.8, **sections, engine={"kind": "processes", "workers": 2})
    (path / "config.toml").write_text(to_toml(other.tables()))
    with pytest.raises(Cut):
        resume(path, cut_after(3))
    resume(path, Progress())
    assert_same(path, contents(tmp_path / "whole"), but=("config.toml",))
    assert {line["event"] for line in Run(path).read_record() if "event" in line} == {"no promise"}


def test_who_asks_for_no_sets_hears_nothing_of_them(configure: Configure, tmp_path: Path) -> None:
    """And predicts the same: sets change no other number."""
    silent = configure(data={"calibration_fraction": 0.3}, algorithm=ALGORITHM)
    run(silent, tmp_path / "silent")
    run(asking(configure, 0.7), tmp_path / "asked")
    without, beside = contents(tmp_path / "silent"), contents(tmp_path / "asked")
    assert without["predictions.safetensors"] == beside["predictions.safetensors"]
    extra = beside["summary.json"]["fedavg-ft"].keys() - without["summary.json"]["fedavg-ft"].keys()
    assert extra == {
        "promises", "coverage", "coverage_worst", "set_size", "set_size_worst", "coverage_promised", "confidence",
    }  # fmt: skip
    assert [line for line in beside["metrics.jsonl"] if line in without["metrics.jsonl"]] == without["metrics.jsonl"]


def test_what_a_promise_asks_of_a_configuration() -> None:
    config = parse({"federation": {"coverage": 0.9}})
    assert config.data.calibration_fraction == 0.15 and config.federation.confidence is None
    assert parse(config.tables()) == config
    assert not {"coverage", "confidence"} & parse({}).tables()["federation"].keys()
    for federation, sentence in (
        ({"coverage": 1.0}, r"federation\.coverage = 1\.0: input should be less than 1"),
        ({"coverage": 0.9, "confidence": 0.0}, r"federation\.confidence = 0\.0: input should be greater than 0"),
        ({"confidence": 0.95}, r"federation\.confidence = 0\.95 .* needs federation\.coverage"),
        ({"coverage": 0.9, "temper": "client"}, r"coverage = 0\.9 and federation\.temper = 'client' would be fitted"),
    ):
        with pytest.raises(BadInput, match=sentence):
            parse({"federation": federation})
    with pytest.raises(BadInput, match=r"federation\.temper = 'all'"):
        parse({"federation": {"coverage": 0.9}, "algorithm": {"name": "fedavg+temper"}})
    with pytest.raises(BadInput, match=r"coverage = 0\.9 needs data\.calibration_fraction above 0"):
        parse({"data": {"calibration_fraction": 0.0}, "federation": {"coverage": 0.9}})


def test_a_promise_that_nobody_could_be_given_is_refused_at_once(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"needs 9 .* not 5, the most that data\.calibration_fraction = 0\.3 leaves"):
        build_setup(asking(configure, 0.9))


def test_a_comparison_gives_everybody_the_same_part(folder: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "data": {"dataset": str(folder), "train_fraction": 0.5, "calibration_fraction": 0.3},
        "federation": {"rounds": 1, "cohort": 2, "model": "mlp", "coverage": 0.7},
        "engine": {"kind": "serial"},
    }
    configs = comparison.plan(tables, ["fedavg", "local"])
    summary = comparison.compare(configs, tmp_path / "both", lambda name, config: Progress())
    assert [s["promises"] for s in summary.values()] == [4, 4]
    assert comparison.resume_comparison(tmp_path / "both", lambda name, config: Progress()) == summary


def test_the_record_is_enough_to_make_the_promise_again(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(asking(configure, 0.7), path)
    threshold, fitted = told(path, "threshold"), told(path, "calibration_examples")
    table = {name: tensor.numpy() for name, tensor in load_file(path / "predictions.safetensors").items()}
    for k in range(4):
        again = Promise(coverage=0.7, confidence=None, threshold=threshold[k], examples=int(fitted[k]))
        sizes = again.sets(table["probs"][table["client"] == k]).sum(axis=1)
        assert sizes.mean() == told(path, "set_size")[k]
