"""Who is best, from runs as they lie on a disk."""

from pathlib import Path
from typing import Any

import pytest

from lrbpfl.reports.collect import Result, collect
from lrbpfl.reports.winners import PAIRED, over_clients
from tests.reports.conftest import write_run


def rows(paths: dict[str, Path]) -> dict[str, list[Result]]:
    return {name: collect([path]) for name, path in paths.items()}


def test_the_better_one_wins_every_mean_and_a_copy_ties(tmp_path: Path) -> None:
    skills = {"good": 6.0, "copy": 6.0, "bad": 1.0}
    runs = rows({name: write_run(tmp_path / name, clients=12, skill=skill) for name, skill in skills.items()})
    for key in ("accuracy", "nll", "brier"):
        assert over_clients(runs, key) == {"good", "copy"}
    assert over_clients({name: runs[name] for name in ("good", "copy")}, "nll") == set()
    assert over_clients(runs, "ece_worst") == set()


def test_a_pooled_error_needs_predictions_of_eight_clients(tmp_path: Path) -> None:
    """A skill of 20 is right and sure of it; one of 0 is as sure, and wrong."""
    for clients, found in ((12, {"good"}), (7, set())):
        skills = {"good": 40.0, "bad": 0.0}
        runs = rows({n: write_run(tmp_path / f"{n}{clients}", clients=clients, skill=s) for n, s in skills.items()})
        assert over_clients(runs, "ece_pooled") == found
    blind = write_run(tmp_path / "blind", clients=12, skill=0.0)
    (blind / "predictions.safetensors").unlink()
    assert over_clients(rows({"good": tmp_path / "good12", "blind": blind}), "ece_pooled") == set()
    assert over_clients(rows({"good": tmp_path / "good12", "blind": blind}), "nll") == {"good"}


@pytest.mark.parametrize("other", [{"clients": 11}, {"examples": 61}, {"federation": {"seed": 1}}])
def test_other_clients_examples_or_seeds_are_no_pairs(tmp_path: Path, other: dict[str, Any]) -> None:
    good = write_run(tmp_path / "good", clients=12, skill=6.0)
    bad = write_run(tmp_path / "bad", **{"clients": 12, "skill": 1.0, **other})
    assert all(over_clients(rows({"good": good, "bad": bad}), key) == set() for key in PAIRED)


def test_training_parts_may_differ_but_not_the_data_that_are_judged(tmp_path: Path) -> None:
    """FedBE moves training inputs to the server, and is judged on the test data of all."""
    runs = rows({name: write_run(tmp_path / name, clients=12, skill=s) for name, s in (("good", 6.0), ("bad", 1.0))})
    for key, found in (("public_fraction", {"good"}), ("calibration_fraction", {"good"}), ("alpha", set())):
        (bad,) = runs["bad"]
        other = bad._replace(tables={**bad.tables, "data": {**bad.tables["data"], key: 0.04}})
        (good,) = runs["good"]
        mine = good._replace(tables={**good.tables, "data": {**good.tables["data"], key: 0.0}})
        assert over_clients({"good": [mine], "bad": [other]}, "nll") == found
