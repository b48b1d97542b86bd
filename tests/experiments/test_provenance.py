"""A run goes on with the data, versions and device it was begun with, or says that it does not."""

import re
from pathlib import Path

import numpy as np
import pytest

from lrbpfl.data import load
from lrbpfl.errors import BadInput
from lrbpfl.experiments import provenance
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import parse
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.studies.cells import run_cells
from tests.experiments.conftest import Configure
from tests.experiments.reaper import Cut
from tests.experiments.test_resume import cut_after


def clients(folder: Path, scale: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    for k, name in enumerate(("a", "b")):
        x = np.arange(40.0).reshape(10, 4) * scale + k
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=np.arange(10) % 2)
    return folder


def test_every_number_name_and_owner_counts(tmp_path: Path) -> None:
    one = load(str(clients(tmp_path / "one")))
    assert provenance.digest(one) == provenance.digest(load(str(clients(tmp_path / "elsewhere"))))
    assert provenance.digest(one) != provenance.digest(load(str(clients(tmp_path / "two", 1.0001))))
    x = one.x.clone()
    x[3, 2] += 1e-6
    assert one.owner is not None and one.client_names is not None
    others = [one._replace(x=x), one._replace(y=one.y.flip(0)), one._replace(owner=one.owner[::-1].copy())]
    others.append(one._replace(client_names=("x", *one.client_names[1:])))
    assert provenance.digest(one) not in map(provenance.digest, others)


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    config = parse(
        {
            "data": {"dataset": str(clients(tmp_path / "data"))},
            "federation": {"rounds": 3, "cohort": 1},
            "engine": {"kind": "serial"},
            "algorithm": {"name": "fedavg"},
        }
    )
    with pytest.raises(Cut):
        start(config, tmp_path / "run", build_setup(config), cut_after(0))
    clients(tmp_path / "data", 2.0)
    with pytest.raises(BadInput, match="run was begun with other data than are there now"):
        resume(tmp_path / "run", Progress(), any_version=True)
    clients(tmp_path / "data")
    resume(tmp_path / "run", Progress())


@pytest.mark.parametrize(("what", "other"), [("torch", "1.0"), ("lrbpfl", "0.0.1"), ("device", "cuda")])
def test_other_versions_are_told_and_need_a_flag(what: str, other: str, configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(Cut):
        start(configure(), path, build_setup(configure()), cut_after(1))
    text = (path / "config.toml").read_text()
    head, versions = text.split("[versions]")
    versions = re.sub(f"^{what} = .*", f'{what} = "{other}"', versions, flags=re.M)
    (path / "config.toml").write_text(f"{head}[versions]{versions}")
    with pytest.raises(BadInput, match=rf"run was begun with {what} {re.escape(other)} \(now .*--any-version"):
        resume(path, Progress())
    told: list[str] = []
    resume(path, Progress(tell=told.append), any_version=True)
    assert len(told) == 1 and f"begun with {what} {other}" in told[0]


def test_a_finished_cell_of_other_versions_is_not_taken_for_this_one(configure: Configure, tmp_path: Path) -> None:
    cells = {"one": configure()}
    ((_, cell),) = run_cells(tmp_path, cells, lambda label, config: Progress())
    assert cell.failure is None
    file = cell.path / "config.toml"
    file.write_text(re.sub(r"(?m)^torch = .*", 'torch = "1.0"', file.read_text()))
    ((_, other),) = run_cells(tmp_path, cells, lambda label, config: Progress())
    assert "was begun with torch 1.0" in (other.failure or "")
    ((_, allowed),) = run_cells(tmp_path, cells, lambda label, config: Progress(), any_version=True)
    assert allowed == cell
