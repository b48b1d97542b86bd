"""The seams of the package: who may import whom, checked in the syntax of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lrbpfl

ROOT = Path(next(iter(lrbpfl.__path__)))
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

BASE = {"trees", "rng", "errors", "disk", "journal", "documents", "states", "plugins"}
LEAVES = {"data", "metrics", "models"}
LEARNING = {"core", "algorithms", "engines"}
MAY_IMPORT: dict[str, set[str]] = {
    "trees": set(),
    "rng": set(),
    "errors": set(),
    "disk": {"errors"},
    "journal": {"disk", "errors"},
    "documents": {"disk", "errors", "trees"},
    "states": {"disk", "documents", "errors", "journal", "trees"},
    "plugins": {"errors"},
    "data": {"errors", "rng", "disk"},
    "metrics": {"errors", "rng"},
    "models": {"errors", "plugins", "rng"},
    "core": BASE,
    "algorithms": BASE | {"core"},
    "engines": BASE | {"core", "algorithms", "metrics"},
    "testing": BASE | LEARNING | {"metrics"},
    "personal": BASE | LEAVES | LEARNING,
    "serving": BASE | LEARNING | {"metrics", "personal"},
    "experiments": BASE | LEAVES | LEARNING | {"personal"},
    "sites": BASE | LEAVES | LEARNING | {"experiments"},
    "studies": BASE | LEAVES | LEARNING | {"personal", "serving", "experiments"},
    "reports": BASE | LEAVES | LEARNING | {"personal", "experiments", "studies"},
    "cli": BASE | LEAVES | LEARNING | {"personal", "serving", "experiments", "studies", "reports", "sites"},
    "federation": BASE | LEAVES | LEARNING | {"personal", "experiments", "reports", "cli"},
    "__main__": {"cli"},
}


def layer(file: str) -> str:
    """The layer a file belongs to: its folder, or its own name at the top."""
    return file.split("/")[0].removesuffix(".py")


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module a file of this package imports, wherever in the file it does, in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported(file: str) -> set[str]:
    package = ".".join(("lrbpfl", *file.split("/")[:-1]))
    return set(imports(ast.parse(FILES[file].read_text()), package))


def used_layers(file: str) -> set[str]:
    modules = (module.split(".") for module in imported(file))
    return {parts[1] if len(parts) > 1 else "__init__" for parts in modules if parts[0] == "lrbpfl"}


def test_imports_are_seen() -> None:
    """The check itself: plain, from, aliased, relative and hidden imports."""
    text = """
import lrbpfl.core.masks as m
from lrbpfl import trees
from lrbpfl.core import gates
from . import protocol
from ..engines import serial
def f():
    from lrbpfl.data import load
"""
    assert set(imports(ast.parse(text), "lrbpfl.algorithms")) == {
        "lrbpfl.core.masks",
        "lrbpfl.trees",
        "lrbpfl.core.gates",
        "lrbpfl.algorithms.protocol",
        "lrbpfl.engines.serial",
        "lrbpfl.data.load",
    }


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_point_one_way(file: str) -> None:
    own = layer(file)
    assert own in MAY_IMPORT, f"{own} has no place among the layers"
    wrong = used_layers(file) - MAY_IMPORT[own] - {own}
    assert not wrong, f"lrbpfl/{file} imports {sorted(wrong)}; {own} may import {sorted(MAY_IMPORT[own])}"


@pytest.mark.parametrize("file", [file for file in FILES if layer(file) == "engines"])
def test_no_engine_knows_an_algorithm_by_name(file: str) -> None:
    of_algorithms = {module for module in imported(file) if module.startswith("lrbpfl.algorithms")}
    assert all(module.startswith("lrbpfl.algorithms.protocol.") for module in of_algorithms), of_algorithms


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("sites/flare/")])
def test_nvflare_has_one_place(file: str) -> None:
    assert "nvflare" not in {module.split(".")[0] for module in imported(file)}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names of everything the code defines, takes, reads or imports; no docstrings, no messages."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


@pytest.mark.parametrize("file", [file for file in FILES if layer(file) == "core"])
def test_core_has_no_federated_word(file: str) -> None:
    names = set(identifiers(ast.parse(FILES[file].read_text())))
    federated = {name for name in names if any(word in name.lower() for word in ("client", "server", "federat"))}
    assert not federated


@pytest.mark.parametrize("file", list(FILES))
def test_files_stay_short(file: str) -> None:
    assert len(FILES[file].read_text().splitlines()) <= 300


def unpickles(tree: ast.AST) -> Iterator[str]:
    """Ways to run code that hides in a file: pickle and its relatives, torch.load, arrays of objects."""
    for module in imports(tree, ""):
        if module.split(".")[0] in {
            "pickle",
            "cPickle",
            "_pickle",
            "cloudpickle",
            "dill",
            "joblib",
            "shelve",
            "marshal",
        }:
            yield module
        if module in {"torch.load", "torch.save", "torch.serialization", "pandas.read_pickle"}:
            yield module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"torch.load", "torch.save", "torch.serialization"}:
                yield name
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "np.load('x', allow_pickle=True)",
    ],
)
def test_pickles_are_seen(text: str) -> None:
    assert list(unpickles(ast.parse(text)))


# What a parent and its own workers tell each other goes through a pipe, and so by pickle, as in multiprocessing itself.
BETWEEN_OWN_PROCESSES = {"engines/launch.py": ["cloudpickle"]}


@pytest.mark.parametrize("file", list(FILES))
def test_nothing_is_pickled(file: str) -> None:
    assert list(unpickles(ast.parse(FILES[file].read_text()))) == BETWEEN_OWN_PROCESSES.get(file, [])


def test_what_is_pickled_between_processes_never_meets_a_file() -> None:
    for file in BETWEEN_OWN_PROCESSES:
        names = set(identifiers(ast.parse(FILES[file].read_text())))
        assert not names & {"open", "load", "dump", "Path", "read_bytes", "write_bytes", "BytesIO", "save"}
