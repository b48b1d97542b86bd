"""The commands about one client's model, as somebody with a table would use them."""

import csv
import io
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lrbpfl as package
from tests.cli.conftest import Lrbpfl
from tests.personal.conftest import QUICK, network, site

COLUMNS = ("age", "weight", "pulse", "fever")
Rows = list[dict[str, Any]]


def rows_of(name: str, n: int = 30) -> Rows:
    x, y = site(name, n)
    words = {3: "cold", 7: "flu", 11: "none"}
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in x.tolist()]
    return [{**row, "label": words[label]} for row, label in zip(rows, y.tolist(), strict=True)]


def write(path: Path, rows: Rows, columns: tuple[str, ...] | None = None) -> Path:
    columns = columns or tuple(rows[0])
    if path.suffix == ".json":
        path.write_text(json.dumps([{name: row[name] for name in columns} for row in rows]))
    elif path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist(
            [{name: row[name] for name in columns} for row in rows]
        )
        parquet.write_table(table, path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals in one table; the network is one that the package makes by name."""
    from lrbpfl.models import mlp

    path = tmp_path_factory.mktemp("hospitals")
    rows = [{**row, "client": name} for name in ("1", "2", "St. Mary's") for row in rows_of(name, 60)]
    table = write(path / "all.csv", rows)
    torch.manual_seed(0)
    federation = package.Federation(mlp(3, (4,)), table, QUICK, calibration=0.3, workers=1, quiet=True)
    return federation.fit(2, directory=path / "run").path


def test_a_newcomer_joins_and_predicts(lrbpfl: Lrbpfl, run: Path, tmp_path: Path) -> None:
    data, out = write(tmp_path / "new.csv", rows_of("new", 90)), tmp_path / "new.safetensors"
    said = lrbpfl("onboard", run, "--data", data, "--out", out, "--name", "west")
    assert said.code == 0, said.err
    assert "west: " in said.out and "from 72 examples; nothing was sent." in said.out
    assert "On 18 examples that it did not train on: accuracy" in said.out
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    said = lrbpfl("predict", out, "--input", data, "--coverage", 0.9)
    assert said.code == 0, said.err
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert list(rows[0]) == ["label", "total", "aleatoric", "epistemic", "set", "p[cold]", "p[flu]", "p[none]"]
    right = [row["label"] == own["label"] for row, own in zip(rows, rows_of("new", 90), strict=True)]
    assert sum(right) / 90 > 0.6
    assert all(row["label"] == row["set"].split(" | ")[0] for row in rows)
    again = lrbpfl("onboard", run, "--data", data, "--out", out)
    assert again.code == 2 and "exists already" in again.err


def test_few_examples_are_told_of(lrbpfl: Lrbpfl, run: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "new.json", rows_of("new", 4))
    said = lrbpfl("onboard", run, "--data", data, "--out", tmp_path / "new.safetensors", "--whole")
    assert said.code == 0 and "4 examples are too few to hold any out" in said.out
    assert not list(tmp_path.glob("W-*"))
    said = lrbpfl("predict", tmp_path / "new.safetensors", "--input", data, "--coverage", 0.9)
    assert said.code == 2 and "needs 9 calibration examples" in said.err and not said.out


def test_columns_are_found_by_name_in_every_format(lrbpfl: Lrbpfl, run: Path, tmp_path: Path) -> None:
    """In another order, with or without labels and others' columns: the same predictions."""
    rows = [{**row, "room": "7b"} for row in rows_of("later", 12)]
    shuffled = ("room", "fever", "pulse", "label", "weight", "age")
    inputs = [write(tmp_path / "a.csv", rows, COLUMNS), write(tmp_path / "b.csv", rows, shuffled)]
    inputs += [
        write(tmp_path / "c.json", rows, shuffled),
        write(tmp_path / "d.parquet", rows, shuffled[:3] + shuffled[4:]),
    ]
    np.savez(tmp_path / "e.npz", x=[[row[name] for name in COLUMNS] for row in rows])
    inputs.append(tmp_path / "e.npz")
    found = [lrbpfl("predict", run, "--client", "St. Mary's", "-i", path, "-f", "json") for path in inputs]
    assert [said.code for said in found] == [0] * 5, found
    assert len({said.out for said in found}) == 1
    table = [list(row.values()) for row in json.loads(found[0].out)]
    for kind in ("csv", "parquet", "json"):
        out = tmp_path / f"out.{kind}"
        assert lrbpfl("predict", run, "--client", "St. Mary's", "-i", inputs[0], "-f", kind, "-o", out).code == 0
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [list(row.values()) for row in json.loads((tmp_path / "out.json").read_text())] == table
    with (tmp_path / "out.csv").open() as file:
        written = [[row[0], *map(float, row[1:])] for row in list(csv.reader(file))[1:]]
    assert written == table
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out.parquet").to_pylist()
    assert [list(row.values()) for row in parquet] == table


def test_what_cannot_be_predicted_is_told(lrbpfl: Lrbpfl, run: Path, tmp_path: Path) -> None:
    rows = rows_of("later", 5)
    good, lacking = write(tmp_path / "good.csv", rows), write(tmp_path / "lacking.csv", rows, COLUMNS[:3])
    (tmp_path / "broken.json").write_text("[{")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "uneven.json").write_text('[{"age": 1}, {"weight": 1}]')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    one = ("--client", 1)
    for call, sentence in (
        ((run, *one, "-i", lacking), "lacking.csv has no column 'fever', which the model was trained on"),
        ((run, *one, "-i", tmp_path / "none.csv"), "none.csv cannot be read: No such file"),
        ((run, *one, "-i", tmp_path / "broken.json"), "broken.json cannot be read as JSON"),
        ((run, *one, "-i", tmp_path / "list.json"), "list.json must hold a list of objects"),
        ((run, *one, "-i", tmp_path / "uneven.json"), "all must have the same keys"),
        ((run, *one, "-i", tmp_path / "picture.png"), "picture.png cannot be read as a .csv"),
        ((run, *one, "-i", good, "-f", "xml"), "give one of csv, json, parquet"),
        ((run, *one, "-i", good, "-f", "parquet"), "name a file with --out"),
        ((run, *one, "-i", good, "-o", good / "below"), "cannot be written"),
        ((run, "-i", good), "name one; its clients: 1, 2, St. Mary's"),
        ((run, "--client", "3", "-i", good), "has no client '3'; its clients: 1, 2, St. Mary's"),
        ((run, *one, "-i", good, "--model", "nowhere:make"), "the module of model 'nowhere:make' cannot be imported"),
        ((run, *one, "-i", good, "--coverage", 2), "coverage"),
    ):
        said = lrbpfl("predict", *call)
        assert (said.code, said.out) == (2, ""), call
        assert sentence in " ".join(said.err.split()), said.err


def test_labels_that_nobody_knows_are_told(lrbpfl: Lrbpfl, run: Path, tmp_path: Path) -> None:
    rows = rows_of("new", 20)
    rows[4]["label"] = "gout"
    data = write(tmp_path / "new.csv", rows)
    said = lrbpfl("onboard", run, "--data", data, "--out", tmp_path / "m.safetensors")
    assert said.code == 2 and "the label 'gout', which the federation does not know; its classes: cold, flu, none" in (
        " ".join(said.err.split())
    )
    said = lrbpfl("onboard", run, "--data", data, "--out", tmp_path / "m.safetensors", "--label", "diagnosis")
    assert said.code == 2 and "'diagnosis'" in said.err
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_model_of_ones_own_is_named(lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = {"a": site("a"), "b": site("b")}
    with package.Federation(network(), clients, "fedavg", workers=1, quiet=True) as federation:
        federation.fit(1).personal("a").save(tmp_path / "a.safetensors")
    np.savez(tmp_path / "x.npz", x=site("x")[0])
    said = lrbpfl("predict", "a.safetensors", "-i", "x.npz")
    assert said.code == 2 and "--model" in said.err
    (tmp_path / "ours.py").write_text("from tests.personal.conftest import network\n")
    said = lrbpfl("predict", "a.safetensors", "-i", "x.npz", "--model", "ours:network")
    assert said.code == 0 and len(said.out.splitlines()) == 41
