"""From what each client has to one dataset: the last stop of every reader, and the first that sees all clients."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lrbpfl.data.datasets import Dataset, check_dataset
from lrbpfl.data.labels import Label, classes_of, numbers_of
from lrbpfl.data.order import natural_key
from lrbpfl.errors import BadInput

Integers = Literal["numbers", "tokens"]
SHOWN = 5  # classes in a sentence


class Part(NamedTuple):
    """One client's examples, as a reader found them."""

    name: str
    x: npt.NDArray[Any]  # (n, *input), numbers of any type
    y: npt.NDArray[Any]  # (n,) integers or text


class Form(NamedTuple):
    """What the inputs of all clients look like: the first one's."""

    client: str
    shape: tuple[int, ...]
    dtype: Any


def assemble(
    name: str,
    parts: Sequence[Part],
    *,
    integers: Integers = "numbers",
    class_names: tuple[str, ...] | None = None,
    feature_names: tuple[str, ...] | None = None,
) -> Dataset:
    """The dataset of these clients, in the natural order of their names.

    The labels of all clients together are the classes; with ``class_names``, labels are places among those.
    """
    if not parts:
        raise BadInput(f"{name!r} has no clients: give at least one, with its examples")
    parts = sorted(parts, key=lambda part: natural_key(part.name))
    _check_sizes(parts)
    inputs = [_inputs(part, integers, feature_names) for part in parts]
    form = Form(parts[0].name, inputs[0].shape[1:], inputs[0].dtype)
    for part, x in zip(parts, inputs, strict=True):
        _check_alike(part, x, form)
    labels = {part.name: part.y for part in parts}
    classes: tuple[Label, ...] = classes_of(labels) if class_names is None else tuple(range(len(class_names)))
    if class_names is not None:
        _check_numbers(parts, len(class_names))
    dataset = Dataset(
        name=name,
        x=torch.from_numpy(np.concatenate(inputs)),
        y=torch.from_numpy(numbers_of(labels.values(), classes)),
        num_classes=len(classes),
        owner=np.repeat(np.arange(len(parts)), [len(part.y) for part in parts]),
        client_names=tuple(part.name for part in parts),
        class_names=class_names or _names(classes),
        classes=classes,
        feature_names=feature_names,
    )
    check_dataset(dataset)
    return dataset


class Known(NamedTuple):
    """What is known of all clients before any is loaded, but for the form, which the first one has."""

    name: str  # of the dataset
    classes: tuple[Label, ...]
    class_names: tuple[str, ...] | None = None  # with them, labels are places among these
    integers: Integers = "numbers"
    form: Form | None = None


def assemble_one(part: Part, known: Known) -> Dataset:
    """The dataset of one client of many, checked as `assemble` checks them all."""
    _check_sizes([part])
    x = np.require(_inputs(part, known.integers, None), requirements=["C", "A", "W"])  # as torch wants it
    _check_alike(part, x, known.form or Form(part.name, x.shape[1:], x.dtype))
    if known.class_names is not None:
        _check_numbers([part], len(known.class_names))
    check_known(part.name, part.y, known.classes)
    dataset = Dataset(
        name=known.name,
        x=torch.from_numpy(x),
        y=torch.from_numpy(numbers_of([part.y], known.classes)),
        num_classes=len(known.classes),
        owner=np.zeros(len(x), np.int64),
        client_names=(part.name,),
        class_names=known.class_names or _names(known.classes),
        classes=known.classes,
    )
    check_dataset(dataset)
    return dataset


def check_known(name: str, y: npt.NDArray[Any], classes: tuple[Label, ...]) -> None:
    """Refuse a label of a client's that is none of the classes."""
    if set(np.unique(y).tolist()) <= set(classes):
        return
    row, value = next((row, value) for row, value in enumerate(y.tolist()) if value not in classes)
    some = ", ".join(map(repr, classes[:SHOWN])) + (", ..." if len(classes) > SHOWN else "")
    raise BadInput(f"row {row} of client {name!r} has the label {value!r}, and the classes are {some}")


def _names(classes: tuple[Label, ...]) -> tuple[str, ...] | None:
    """The classes as text, unless they are just 0, ..., C - 1, which need no names."""
    return None if classes == tuple(range(len(classes))) else tuple(map(str, classes))


def _check_sizes(parts: Sequence[Part]) -> None:
    """Refuse clients without a name of their own, and examples without labels or too few to be split."""
    for before, part in zip((None, *parts), parts, strict=False):
        if before and before.name == part.name:
            raise BadInput(f"two clients are called {part.name!r}: every client needs a name of its own")
        if part.x.ndim < 2 or len(part.x) != len(part.y):
            shapes = f"x of shape {part.x.shape} and y of shape {part.y.shape}"
            raise BadInput(f"client {part.name!r} has {shapes}, and needs (n, *input) and (n,)")
        if not part.x.size:
            raise BadInput(f"client {part.name!r} has x of shape {part.x.shape}, which is empty: it needs examples")
        if len(part.y) < 2:
            what = f"client {part.name!r} has one example only, which cannot be split"
            raise BadInput(f"{what}: it needs one for training and one for testing")


def _inputs(part: Part, integers: Integers, names: tuple[str, ...] | None) -> npt.NDArray[Any]:
    """A client's inputs in a type that models take: uint8 images, int64 tokens, or float32."""
    x, kind = part.x, part.x.dtype.kind
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return x
    if kind in "iu" and integers == "tokens":
        return x.astype(np.int64, copy=False)
    if kind not in "biuf":
        raise BadInput(f"client {part.name!r} has inputs of type {x.dtype}, and inputs must be numbers")
    with np.errstate(over="ignore"):  # what does not fit becomes infinity, and is refused by name
        small = x.astype(np.float32, copy=False)
    if not np.isfinite(small).all():
        row, *place = np.argwhere(~np.isfinite(small))[0].tolist()
        cell, where = x[(row, *place)].item(), f"row {row} of client {part.name!r}, {feature_name(place, names)}"
        if np.isfinite(cell):
            raise BadInput(f"{where}, holds {cell:g}, which does not fit into float32: rescale it")
        raise BadInput(f"{where}, holds {cell}, and inputs must be finite numbers")
    return small


def feature_name(place: Sequence[int], names: tuple[str, ...] | None) -> str:
    """What a feature is called in a sentence: the column's name where there are columns, else its place."""
    if names is not None and len(place) == 1:
        return f"column {names[place[0]]!r}"
    return f"feature {place[0] if len(place) == 1 else tuple(place)}"


def _check_alike(part: Part, x: npt.NDArray[Any], form: Form) -> None:
    """Refuse inputs that differ in shape or kind from the first client's."""
    if (x.shape[1:], x.dtype) != form[1:]:
        found, expected = f"{x.shape[1:]} {x.dtype}", f"{form.shape} {form.dtype}"
        what = f"client {part.name!r} has inputs {found} where client {form.client!r} has {expected}"
        raise BadInput(f"{what}: all must be alike")


def _check_numbers(parts: Sequence[Part], num_classes: int) -> None:
    """Refuse labels that are no place among classes that have names."""
    for part in parts:
        wrong = np.array([True]) if part.y.dtype.kind == "U" else (part.y < 0) | (part.y >= num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            what = f"row {row} of client {part.name!r} has the label {part.y[row].item()!r}"
            raise BadInput(f"{what}, and labels go from 0 to {num_classes - 1}, the places of the classes' names")
