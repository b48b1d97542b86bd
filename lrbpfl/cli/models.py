"""The commands about one client's model: onboard, predict."""

import csv
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from rich.console import Console
from rich.markup import escape

from lrbpfl import documents
from lrbpfl.cli.own import network_of
from lrbpfl.data import npz
from lrbpfl.data.table_files import SUFFIXES, read_table
from lrbpfl.data.tables import CLIENT, LABEL, Table, features_of, labels_of
from lrbpfl.disk import usable, write_file
from lrbpfl.errors import BadInput, plain
from lrbpfl.personal.description import features_in
from lrbpfl.personal.model import PersonalModel, Prediction, load
from lrbpfl.personal.onboarding import FEWEST, find_shared, onboard

TABLES = (*SUFFIXES, ".json")
FORMATS = ("csv", "json", "parquet")


def join(
    run: Path,
    data: Path,
    out: Path,
    name: str,
    *,
    label: str | None,
    hold_out: float | None,
    factory: str | None,
    whole: bool,
) -> None:
    """Make a new client's model from a finished run and its own data; nothing leaves this machine."""
    for path in (run, data, out):
        usable(path)
    if out.exists():
        raise BadInput(f"{out} exists already: name another file with --out")
    x, y = _labelled(data, label, _features_at(run))
    began = time.perf_counter()
    with Console(stderr=True).status(f"{escape(plain(name, 60))} fits its own part to {len(y)} examples"):
        made = onboard(run, x, y, model=network_of(factory), name=name, hold_out=hold_out)
        made.save(out, whole=whole)
    seconds = time.perf_counter() - began
    print(f"{name}: {out}, made in {seconds:.1f} s from {made.about['examples']} examples; nothing was sent.")
    print(_judgement(made, len(y)))


def predict(
    file: Path,
    data: Path,
    client: str | None,
    *,
    kind: str,
    out: Path | None,
    coverage: float | None,
    confidence: float | None,
    factory: str | None,
) -> None:
    """What a client's model says of a file of inputs, one row each."""
    if kind not in FORMATS:
        raise BadInput(f"--format {plain(kind, 80)}: give one of {', '.join(FORMATS)}")
    if kind == "parquet" and out is None:
        raise BadInput("--format parquet is not text: name a file with --out")
    model = load(file, client=client, model=network_of(factory))
    given = _inputs(usable(data), model.features)
    said = model.predict(given) if coverage is None else model.predict(given, coverage=coverage, confidence=confidence)
    rows = _rows(said, sets=coverage is not None)
    text = _WRITERS[kind](rows)
    if out is None:
        sys.stdout.write(text.decode())
        return
    try:
        write_file(out, text, private=True)
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {error.strerror}") from None


def _judgement(made: PersonalModel, given: int) -> str:
    """How good a new model is, or why nobody knows."""
    scores, judged = made.about["scores"], made.about["judged"]
    if not scores:
        few = f"{given} examples are too few to hold any out: " if given < FEWEST else "nothing was held out: "
        return f"{few}nothing is known of how good this model is."
    return (
        f"On {judged['examples']} examples that it did not train on: accuracy {scores['accuracy']:.1%}, "
        f"NLL {scores['nll']:.3f}, ECE {scores['ece']:.3f} (floor {scores['ece_floor']:.3f}: what a perfectly "
        "calibrated model would score on so few)."
    )


def _features_at(run: Path) -> tuple[str, ...] | None:
    return features_in(documents.read(find_shared(run), "shared").about)


def _labelled(path: Path, label: str | None, features: tuple[str, ...] | None) -> tuple[Any, Any]:
    if path.suffix.lower() in TABLES:
        table = _table(path, {label or LABEL, CLIENT})
        return features_of(table, features, {label or LABEL, CLIENT}), labels_of(table, label)
    arrays = _arrays(path)
    if not {"x", "y"} <= arrays.keys():
        raise BadInput(f"{path} has the arrays {', '.join(arrays) or 'none'}, and needs x and y")
    return arrays["x"], arrays["y"]


def _inputs(path: Path, features: tuple[str, ...] | None) -> Any:
    if path.suffix.lower() in TABLES:
        return features_of(_table(path, {LABEL, CLIENT}), features, {LABEL, CLIENT})
    arrays = _arrays(path)
    if "x" in arrays:
        return arrays["x"]
    return arrays  # named inputs of a model that takes several


def _table(path: Path, text: set[str]) -> Table:
    """A table from its file; of JSON, a list of objects with the same keys, one for each row."""
    if path.suffix.lower() != ".json":
        return read_table(path, text)
    try:
        rows = json.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and row for row in rows):
        raise BadInput(f"{path} must hold a list of objects, one for each row, at least one")
    for number, row in enumerate(rows):
        if odd := sorted(row.keys() ^ rows[0].keys()):
            raise BadInput(f"{path}: {odd[0]!r} is in one of row 0 and row {number} only: all must have the same keys")
    return Table(path.name, {name: _cells([row[name] for row in rows]) for name in rows[0]})


def _cells(values: list[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """As they are: NumPy would turn 1 beside "x" into text."""
    cells = np.empty(len(values), object)
    cells[:] = values
    return cells


def _arrays(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    if not is_zipfile(path):
        raise BadInput(f"{path} cannot be read as a .csv, .json, .parquet or .npz file of plain arrays")
    npz.check_memory(npz.claims(path).values(), str(path))
    return npz.arrays(path)


def _rows(said: Prediction, *, sets: bool) -> list[dict[str, Any]]:
    """One row for each input: label, uncertainties, the probability of each class, and the set if it was asked for."""
    rows = []
    held = said.set if sets else None
    for i, label in enumerate(said.label.tolist()):
        row = {"label": label, "total": said.total[i], "aleatoric": said.aleatoric[i], "epistemic": said.epistemic[i]}
        if held is not None:
            row["set"] = list(held[i])
        row |= {f"p[{name}]": p for name, p in zip(said.classes, said.probability[i].tolist(), strict=True)}
        rows.append({key: float(value) if isinstance(value, np.floating) else value for key, value in row.items()})
    return rows


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**row, "set": " | ".join(map(str, row["set"]))} if "set" in row else row)
    return text.getvalue().encode()


def _json(rows: list[dict[str, Any]]) -> bytes:
    return (json.dumps(rows, indent=1) + "\n").encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadInput("--format parquet needs pyarrow: pip install 'lrbpfl[parquet]'") from None
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


_WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {"csv": _csv, "json": _json, "parquet": _parquet}
