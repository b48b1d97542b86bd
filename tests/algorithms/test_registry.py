"""The registry is complete, and what it lists is what an algorithm has to be."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

import lrbpfl.algorithms
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.protocol import Algorithm

METHODS = [name for name, value in vars(Algorithm).items() if inspect.isfunction(value) and not name.startswith("_")]
HELPERS = {"__init__", "protocol", "plain", "average", "ballots", "evidence", "masked_client"}
everyone = pytest.mark.parametrize("name", ALGORITHMS)


def test_every_file_of_the_folder_is_listed() -> None:
    folder = Path(next(iter(lrbpfl.algorithms.__path__)))
    files = {path.stem for path in folder.glob("*.py")} - HELPERS
    assert files == {cls.__module__.rpartition(".")[2] for cls in ALGORITHMS.values()}
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)


def test_the_protocol_has_seven_functions() -> None:
    assert len(METHODS) == 7


@everyone
def test_names_are_those_of_a_command_line(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert ALGORITHMS[name].__module__.endswith(f".{name.replace('-', '_')}")


@everyone
def test_signatures_are_the_protocols(name: str) -> None:
    for method in METHODS:
        expected = list(inspect.signature(getattr(Algorithm, method)).parameters)
        assert list(inspect.signature(getattr(ALGORITHMS[name], method)).parameters) == expected


@everyone
def test_an_algorithm_is_frozen_fields_with_defaults(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    fields = dataclasses.fields(algorithm)
    assert fields and dataclasses.replace(algorithm) == algorithm
    assert vars(algorithm).keys() == {field.name for field in fields}
    for field in fields:
        assert isinstance(getattr(algorithm, field.name), bool | int | float | str)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, getattr(algorithm, field.name))


@everyone
def test_wrong_and_unknown_fields_are_refused(name: str) -> None:
    cls = ALGORITHMS[name]
    for field in dataclasses.fields(cls):
        for nonsense in ("nonsense", None, float("nan")):
            with pytest.raises(ValueError, match=field.name):
                cls(**{field.name: nonsense})
    with pytest.raises(ValueError, match="no_such_field"):
        cls(**{"no_such_field": 1})


@everyone
def test_every_field_is_described_where_it_stands(name: str) -> None:
    source = inspect.getsource(ALGORITHMS[name])
    for field in dataclasses.fields(ALGORITHMS[name]):
        assert re.search(rf"^    {field.name}: .+=.+  # \S", source, re.MULTILINE), field.name


@everyone
def test_every_preset_constructs(name: str) -> None:
    cls = ALGORITHMS[name]
    for fields in getattr(cls, "PRESETS", {}).values():
        algorithm = cls(**fields)
        for field, value in fields.items():
            assert getattr(algorithm, field) == value != getattr(cls(), field), f"{field} is the default already"


@everyone
def test_the_file_opens_with_its_paper(name: str) -> None:
    opening = sys.modules[ALGORITHMS[name].__module__].__doc__
    assert opening is not None
    assert re.search(r"\b(19|20)\d\d\b", opening), "which paper, of which year?"
    assert re.search(r"\b(Algorithm|Eq\.|Section) ", opening), "which box or section does the file follow?"
