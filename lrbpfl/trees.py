"""Nested states: NamedTuples, tuples and dicts (or None) with tensors as leaves. Walk, average, measure, name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

# A tree cannot be spelled as a recursive type over arbitrary NamedTuples; `Tree` says what is meant.
Tree = Any


def tree_map(f: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply f to every leaf (and to the leaves at the same places of the others); the structure stays."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: tree_map(f, child, *(other[key] for other in others)) for key, child in tree.items()}
    if isinstance(tree, tuple):
        children = [tree_map(f, *parts) for parts in zip(tree, *others, strict=True)]
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return f(tree, *others)


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, e.g. ``("mask/conv1/Q/mean", tensor)``."""
    if tree is None:
        return
    if isinstance(tree, dict):
        children: Iterable[tuple[str, Any]] = tree.items()
    elif isinstance(tree, tuple):
        children = zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True)
    else:
        yield prefix, tree
        return
    for name, child in children:
        yield from named_leaves(child, f"{prefix}/{name}" if prefix else str(name))


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in the tree's own order."""
    return [leaf for _, leaf in named_leaves(tree)]


def rebuild(template: Tree, named: dict[str, Tensor], prefix: str = "") -> Tree:
    """The inverse of `named_leaves`: a tree of the template's structure with the named tensors as leaves."""
    if template is None:
        return None
    join = f"{prefix}/" if prefix else ""
    if isinstance(template, dict):
        return {key: rebuild(child, named, f"{join}{key}") for key, child in template.items()}
    if isinstance(template, tuple):
        names = getattr(template, "_fields", map(str, range(len(template))))
        children = [rebuild(child, named, f"{join}{name}") for name, child in zip(names, template, strict=True)]
        return type(template)(*children) if hasattr(template, "_fields") else tuple(children)
    return named[prefix]


def mean(weighted: Iterable[tuple[Tree, float]]) -> Tree:
    """The weighted mean of trees, sum_k n_k w_k / sum_k n_k, one tree in memory at a time.

    A running mean, m <- m + (n / sum n) (w - m): equal trees average to themselves, bit for bit.
    """
    average, total = None, 0.0
    for tree, weight in weighted:
        total += weight
        if average is None:
            average = tree
        else:
            share = weight / total
            average = tree_map(lambda m, w, share=share: m + share * (w - m), average, tree)
    if average is None:
        raise ValueError("the mean of no trees")
    return average


def count(tree: Tree) -> int:
    """How many numbers the tree holds."""
    return sum(leaf.numel() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    """How many bytes the tree's tensors take, as they would be sent."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def equal(a: Tree, b: Tree) -> bool:
    """Same names, shapes, dtypes and bits (NaN equals NaN of the same bits)."""
    named_a, named_b = dict(named_leaves(a)), dict(named_leaves(b))
    return named_a.keys() == named_b.keys() and all(_same_bits(named_a[name], named_b[name]) for name in named_a)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def raw(leaf: Tensor) -> bytes:
    """A tensor's numbers as they lie in memory, row by row."""
    return leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def fault(tree: Tree, template: Tree, *, infinite: bool = False) -> str | None:
    """What keeps `tree` from standing in the template's place (names, shapes, dtypes, non-finite numbers), or None.

    Where numbers may be `infinite`, they are still to be numbers.
    """
    got, expected = dict(named_leaves(tree)), dict(named_leaves(template))
    if got.keys() != expected.keys():
        return f"its tensors are named {sorted(got)}, not {sorted(expected)}"
    if tree_map(lambda leaf: 0, tree) != tree_map(lambda leaf: 0, template):
        return "its tensors are nested in another way"
    for name, leaf in got.items():
        model = expected[name]
        if leaf.shape != model.shape:
            return f"{name} has shape {tuple(leaf.shape)}, not {tuple(model.shape)}"
        if leaf.dtype != model.dtype:
            return f"{name} has dtype {leaf.dtype}, not {model.dtype}"
        if leaf.is_floating_point() and not _numbers(leaf, infinite):
            return f"{name} holds numbers that are not finite"
    return None


def _numbers(leaf: Tensor, infinite: bool) -> bool:
    """Whether all are numbers, finite ones unless they may be infinite."""
    if bool(leaf.sum().isfinite()):  # then all are finite; one pass over memory instead of five
        return True
    return bool((~leaf.isnan() if infinite else leaf.isfinite()).all())


def typed(kind: Any, named: Mapping[str, Tensor]) -> Tree:
    """The tree of this type from its named leaves: `rebuild` where there is no template, only annotations.

    A type is a NamedTuple, a dict, a tensor, None, or one of these or None. Raises KeyError where a leaf is missing,
    and ValueError where one is left over or the type is none of these.
    """
    if get_origin(kind) in (Union, UnionType):
        (some,) = (part for part in get_args(kind) if part is not type(None))
        return typed(some, named) if named else None
    if kind is None or kind is type(None):
        _no_others(named, set())
        return None
    if kind is Tensor:
        _no_others(named, {""})
        return named[""]
    if get_origin(kind) is dict:
        value = get_args(kind)[1]
        if value is Tensor:  # a name may hold a slash
            return dict(named)
        return {head: typed(value, _under(named, head)) for head in dict.fromkeys(n.partition("/")[0] for n in named)}
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        _no_others({name.partition("/")[0]: leaf for name, leaf in named.items()}, set(kind._fields))
        return kind(**{field: typed(hints[field], _under(named, field)) for field in kind._fields})
    raise ValueError(f"{kind} is not a type that names its leaves")


def _under(named: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """The leaves below a name, by what follows it."""
    return {
        name.removeprefix(head).removeprefix("/"): leaf
        for name, leaf in named.items()
        if name == head or name.startswith(f"{head}/")
    }


def _no_others(named: Mapping[str, Tensor], expected: set[str]) -> None:
    if left := sorted(named.keys() - expected):
        raise ValueError(f"nothing of that name is expected: {', '.join(left)}")
