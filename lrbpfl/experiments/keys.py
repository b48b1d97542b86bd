"""Every key of a configuration, with what it takes and means: read from the fields and the comments beside them."""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.experiments.config import SECTIONS, unknown

SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
REQUIRED = "must be given"
NOTHING: Mapping[str, type[BaseModel]] = {}
WORDS: dict[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text"}


class Key(NamedTuple):
    """One line of the list."""

    name: str  # section.key, or algorithm.NAME.key
    takes: str
    default: Any
    meaning: str


def find_keys(which: str | None = None, further: Mapping[str, type[BaseModel]] = NOTHING) -> list[Key]:
    """All keys, or those of one section, one algorithm, or one alone; `further` sections are those of others' files."""
    found = list(_keys(further))
    if which is None:
        return found
    chosen = [key for key in found if key.name == which or key.name.startswith(f"{which}.")]
    if not chosen:
        places = dict.fromkeys(key.name.rpartition(".")[0] for key in found)
        raise unknown("section or key", which, places if which.count(".") == 0 else [key.name for key in found])
    return chosen


def _keys(further: Mapping[str, type[BaseModel]]) -> Iterator[Key]:
    sections: dict[str, type[BaseModel]] = {**SECTIONS, **further}
    for section, model in sections.items():
        yield from _of_class(section, model, _defaults(model))
    names = ", ".join(ALGORITHMS)
    yield Key("algorithm.name", "text", "lr-bpfl", f"{names}; or name:preset, name+temper")
    for name, kind in ALGORITHMS.items():
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        yield from _of_class(f"algorithm.{name}", kind, defaults)


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    fields = model.model_fields.items()
    return {
        name: REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in fields
    }


def _of_class(place: str, kind: type[Any], defaults: dict[str, Any]) -> Iterator[Key]:
    hints, said = typing.get_type_hints(kind, include_extras=True), meanings(kind)
    for name, default in defaults.items():
        yield Key(f"{place}.{name}", _takes(hints[name]), default, said.get(name, ""))


def meanings(kind: type[Any]) -> dict[str, str]:
    """The comments of a class's fields: the lines right above one, and what stands behind it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = ast.parse(source).body
    found = {}
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in comments and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            own = range(first, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line] for line in own if line in comments)
    return found


def _takes(hint: Any) -> str:
    """What a type lets in, in a few words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = " and ".join(_bounds(inside[1:]))
        return f"{_takes(inside[0])} {bounds}".strip()
    if origin is Literal:
        return ", ".join(map(str, inside))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_takes(one) for one in inside if one is not type(None))
    if origin is tuple:
        return f"list ({_takes(inside[0])})"
    return WORDS.get(hint, str(hint))


def _bounds(marks: tuple[Any, ...]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, FieldInfo):
            yield from _bounds(tuple(mark.metadata))
        elif type(mark) in SIGNS:
            (value,) = dataclasses.astuple(mark)
            yield f"{SIGNS[type(mark)]} {value:g}"
