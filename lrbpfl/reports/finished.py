"""The files of a finished run, read by somebody who trusts none of them: a damaged one is refused by its name."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lrbpfl import documents
from lrbpfl.core import gates as gating
from lrbpfl.errors import BadInput, plain, shown
from lrbpfl.experiments.results import read_class_names, read_client_names
from lrbpfl.experiments.runner import read_summary
from lrbpfl.experiments.store import Run, read_tables

WORDS = {"evaluated": str, "temper": str, "new": dict}  # what a summary holds beside numbers
COLUMNS = ("probs", "total", "aleatoric")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Whatever goes wrong in here is told of this file."""
    try:
        yield
    except BadInput as error:
        told = str(error)
        raise BadInput(told if str(file) in told else f"{plain(file, 300)} cannot be used: {told}") from None
    except Exception as error:  # damage shows as anything: as another type, another shape, a key that is not there
        reason = f"{type(error).__name__}: {plain(error, 200)}"
        raise BadInput(f"{plain(file, 300)} is damaged, or was not written by lrbpfl: {reason}") from None


def tables(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of config.toml, as far as a report looks at them."""
    with reading(path / "config.toml"):
        found = read_tables(path)
        for name, section in found.items():
            _demand(isinstance(section, dict), f"{shown(name)} is no section")
        dataset, federation = found.get("data", {}).get("dataset", ""), found.get("federation", {})
        _demand(isinstance(dataset, str), "data.dataset is no text")
        for key in ("seed", "rounds"):
            _demand(type(federation.get(key, 0)) is int, f"federation.{key} is no whole number")
    return found


def summary(path: Path) -> tuple[str, dict[str, Any]]:
    """The algorithm and its scores, those of new clients under `new`."""
    with reading(path / "summary.json"):
        found = read_summary(path)
        _demand(isinstance(found, dict) and len(found) == 1, "it must hold one algorithm and its scores")
        ((name, scores),) = found.items()
        _check_scores(scores)
        for of_new in scores.get("new", {}).values():
            _check_scores(of_new)
    return name, scores


def _check_scores(scores: Any) -> None:
    _demand(isinstance(scores, dict), "scores must be an object")
    for key, value in scores.items():
        fine = isinstance(value, WORDS[key]) if key in WORDS else isinstance(value, float) or _is_number(value or 0)
        _demand(fine, f"{shown(key)} is {shown(value)}")


def record(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    with reading(path / "metrics.jsonl"):
        lines = Run(path).read_record()
        for number, line in enumerate(lines, start=1):
            _demand(isinstance(line, dict) and _is_line(line), f"line {number} is {shown(line)}")
    return lines


def _is_line(line: Mapping[str, Any]) -> bool:
    """About one round, and in it one client or all: a metric with its value, or an event with its reason."""
    if type(line.get("round")) is not int or type(line.get("client", 0)) is not int:
        return False
    alpha = line.get("new_alpha", "sites")
    if alpha != "sites" and not _is_number(alpha):
        return False
    if "event" in line:
        return isinstance(line["event"], str) and isinstance(line.get("reason"), str)
    return isinstance(line.get("metric"), str) and (line.get("value") is None or _is_number(line["value"]))


def names(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """The names of clients and of classes, by their numbers."""
    found = []
    for name, read in (("clients.json", read_client_names), ("classes.json", read_class_names)):
        with reading(path / name):
            found.append(read(path))
            _demand(all(isinstance(own, str) for own in found[-1].values()), "it must hold a list of names")
    return found[0], found[1]


def predictions(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The columns of predictions.safetensors; empty if the run kept none."""
    file = path / "predictions.safetensors"
    if not file.is_file():
        return {}
    with reading(file):
        kept = {name: tensor.numpy() for name, tensor in _columns(file).items()}
        client, y, probs = kept["client"], kept["y"], kept["probs"]
        shapes = {name: column.shape for name, column in kept.items() if name != "probs"}
        fine = probs.ndim == 2 and probs.size > 0 and set(shapes.values()) == {(len(probs),)}
        _demand(fine, f"its columns have the shapes {shown({**shapes, 'probs': probs.shape}, 200)}")
        _demand(client.dtype.kind == "i" and y.dtype.kind == "i", "clients and labels are no whole numbers")
        _demand(client.min() >= 0 and y.min() >= 0 and y.max() < probs.shape[1], "a client or a label is out of range")
        _demand(all(np.isfinite(kept[name]).all() for name in COLUMNS), "it holds numbers that are not finite")
        _demand(probs.min() >= 0 and probs.max() <= 1.001, "it holds probabilities out of range")
    return kept


def _columns(file: Path) -> dict[str, Tensor]:
    """Checked by their checksum, where the run is not older than that."""
    with safe_open(file, framework="pt") as opened:
        signed = "lrbpfl" in (opened.metadata() or {})
    if signed:
        return documents.read(file, "predictions").tensors
    columns: dict[str, Tensor] = load_file(file)
    return columns


def ranks(path: Path) -> dict[int, dict[str, tuple[int, int]]]:
    """Of each client's own model, by number: rank and largest possible rank of each layer that carries a mask."""
    found = {}
    for folder in sorted((path / "clients").glob("[0-9]*")):
        with reading(folder / "personal.safetensors"):
            found[int(folder.name)] = _ranks(folder / "personal.safetensors")
    return found


def _ranks(file: Path) -> dict[str, tuple[int, int]]:
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as tensors:
        gammas = {key: tensors.get_tensor(key) for key in list(tensors.keys()) if key.startswith("own/gates/")}
    return {key.removeprefix("own/gates/"): (gating.rank(gamma), len(gamma)) for key, gamma in gammas.items()}


def text(file: Path) -> str:
    """A file as it stands."""
    with reading(file):
        return file.read_text(encoding="utf-8")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _demand(fine: bool, fault: str) -> None:
    if not fine:
        raise ValueError(fault)
