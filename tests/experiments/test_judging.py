"""Clients are judged one at a time, and as many as asked for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lrbpfl import documents
from lrbpfl.experiments import judging
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.experiments.spool import Table, Waiting
from lrbpfl.experiments.store import Run
from tests.experiments.conftest import Configure, assert_same, contents, run
from tests.experiments.reaper import Cut
from tests.experiments.test_resume import cut_after


def judged(path: Path, t: int) -> set[int]:
    lines = [line for line in Run(path).read_record() if line["round"] == t and line.get("metric") == "accuracy"]
    return {line["client"] for line in lines if "client" in line}


def test_so_many_are_judged_as_asked_for_and_always_the_same(configure: Configure, tmp_path: Path) -> None:
    config = configure(federation={"judged": 1, "judged_last": 3, "evaluate_every": 1})
    (scores,) = run(config, tmp_path / "run").values()
    some = [judged(tmp_path / "run", t) for t in (1, 2, 3)]
    assert len(some[0]) == 1 and some[0] == some[1] == some[2]
    last = judged(tmp_path / "run", 4)
    assert len(last) == 3 and some[0] < last and scores["clients"] == 3
    files = {int(path.parent.name) for path in (tmp_path / "run" / "clients").glob("*/personal.safetensors")}
    assert files == last == set(load_file(tmp_path / "run" / "predictions.safetensors")["client"].tolist())


def test_new_clients_are_judged_beside_a_sample(configure: Configure, tmp_path: Path) -> None:
    config = configure(data={"new_sites": ["dora"]}, federation={"judged_last": 1})
    (scores,) = run(config, tmp_path / "run").values()
    assert scores["clients"] == 1 and scores["new"]["sites"]["clients"] == 1
    assert max(judged(tmp_path / "run", 4)) == 3


@pytest.mark.parametrize("temper", ["no", "client", "all"])
def test_a_record_written_in_small_pieces_is_the_same(
    temper: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(federation={"temper": temper}, data={"calibration_fraction": 0.3})
    run(config, tmp_path / "whole")
    monkeypatch.setattr(judging, "BUFFER", 3)
    with pytest.raises(Cut):
        start(config, tmp_path / "run", build_setup(config), cut_after(2))
    resume(tmp_path / "run", Progress())
    assert_same(tmp_path / "run", contents(tmp_path / "whole"))


def test_rows_become_one_file_of_the_usual_kind(tmp_path: Path) -> None:
    table = Table(tmp_path / "table.safetensors", "rows")
    parts = [{"k": torch.full((n,), n), "p": torch.rand(n, 3), "a": torch.rand(n).double()} for n in (2, 1, 4)]
    for part in parts:
        table.add(part)
    table.finish()
    found = documents.read(tmp_path / "table.safetensors", "rows").tensors
    assert all(torch.equal(found[name], torch.cat([part[name] for part in parts])) for name in ("k", "p", "a"))
    assert [path.name for path in tmp_path.iterdir()] == ["table.safetensors"]
    Table(tmp_path / "nobody.safetensors", "rows").finish()
    assert not (tmp_path / "nobody.safetensors").exists()


def test_nothing_waits_after_all_have_come(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path / "waiting")
    assert list(waiting) == [] and not (tmp_path / "waiting").exists()
