"""What an algorithm looks like before anything runs: its fields, its functions, the type of its personal model."""

import dataclasses
import inspect
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from lrbpfl.algorithms import METHODS
from lrbpfl.algorithms.protocol import Algorithm


def expect(kept: bool, sentence: str) -> None:
    """A promise is kept, or the sentence says which one is not."""
    if not kept:
        raise AssertionError(sentence)


def frozen_fields(algorithm: Algorithm) -> None:
    """Hyper-parameters are plain fields of a frozen dataclass: a run's configuration is written and read with them."""
    cls = type(algorithm)
    expect(dataclasses.is_dataclass(cls), f"{cls.__name__} is no dataclass: its hyper-parameters must be fields of one")
    params: Any = getattr(cls, "__dataclass_params__", None)
    expect(bool(params.frozen), f"{cls.__name__} is not frozen: a dataclass(frozen=True) keeps nothing between calls")
    fields = [field.name for field in dataclasses.fields(algorithm)]
    for field in fields:
        value = getattr(algorithm, field)
        plain = isinstance(value, bool | int | float | str)
        expect(plain, f"{cls.__name__}.{field} is {value!r}: a field is a bool, an int, a float or a str")
    more = sorted(set(getattr(algorithm, "__dict__", {})) - set(fields))
    expect(not more, f"{cls.__name__} holds {', '.join(more)} beside its fields: an algorithm keeps nothing")
    expect(dataclasses.replace(algorithm) == algorithm, f"{cls.__name__} made again from its own fields is not equal")


def signatures(algorithm: Algorithm) -> None:
    """The seven functions take what engines give them, by these names."""
    for method in METHODS:
        function = getattr(type(algorithm), method, None)
        expect(callable(function), f"{type(algorithm).__name__} lacks {method}")
        found = list(inspect.signature(getattr(type(algorithm), method)).parameters)
        expected = list(inspect.signature(getattr(Algorithm, method)).parameters)
        expect(found == expected, f"{type(algorithm).__name__}.{method} takes {found}, not {expected}")


def personal_type(algorithm: Algorithm) -> None:
    """The annotation of `personalise` says what a personal model is made of: it will be saved to a file, and read."""
    who = f"{type(algorithm).__name__}.personalise"
    try:
        hint = get_type_hints(type(algorithm).personalise).get("return", Any)
    except Exception as error:
        raise AssertionError(f"{who} has annotations that cannot be read: {type(error).__name__}: {error}") from error
    allowed = "a NamedTuple, a dict[str, ...] or a Tensor, of tensors all the way down"
    shown = getattr(hint, "__name__", hint)
    expect(hint is not type(None) and nameable(hint), f"{who} is annotated to return {shown}: it must be {allowed}")


def nameable(hint: Any) -> bool:
    """Whether a type says that all leaves are tensors with names."""
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return all(map(nameable, get_type_hints(hint).values()))
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return key is str and nameable(value)
    if get_origin(hint) in (tuple, Union, types.UnionType):
        return all(map(nameable, get_args(hint)))
    return hint in (type(None), Ellipsis) or (isinstance(hint, type) and issubclass(hint, Tensor))


FORM = (frozen_fields, signatures, personal_type)
