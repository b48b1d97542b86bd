"""Trees of tensors: names, round trips, means, sizes and faults."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrbpfl import trees
from lrbpfl.rng import generator


class Pair(NamedTuple):
    Q: Any
    R: Any


class Single(NamedTuple):
    mean: Any


def example() -> Any:
    """One of everything: NamedTuple, tuple, dict, None, an empty dict, a scalar tensor, three dtypes."""
    return Pair(
        Q={"fc1.weight": Single(mean=torch.arange(6.0).reshape(2, 3)), "none": None, "empty": {}},
        R=(torch.tensor(3), (torch.zeros(4, dtype=torch.float64), None)),
    )


def extend(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text("abc.", min_size=1, max_size=4) | st.integers(0, 9).map(lambda i: f"layer{i}")
    return (
        st.dictionaries(keys, children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.builds(Pair, children, children)
        | st.builds(Single, children)
    )


TENSORS = st.lists(st.floats(-1e3, 1e3, width=32), max_size=4).map(torch.tensor)
TREES = st.recursive(TENSORS | st.none(), extend, max_leaves=8)


def same_structure(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_structure(a[key], b[key]) for key in a)
    return not isinstance(a, tuple) or (len(a) == len(b) and all(map(same_structure, a, b)))


def test_names_spell_the_path() -> None:
    assert [name for name, _ in trees.named_leaves(example())] == ["Q/fc1.weight/mean", "R/0", "R/1/0"]


def test_leaves_come_in_the_order_of_their_names() -> None:
    tree = example()
    assert all(a is b for a, (_, b) in zip(trees.leaves(tree), trees.named_leaves(tree), strict=True))


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_rebuild_undoes_named_leaves(tree: Any) -> None:
    again = trees.rebuild(tree, dict(trees.named_leaves(tree)))
    assert same_structure(again, tree)
    assert all(a is b for a, b in zip(trees.leaves(again), trees.leaves(tree), strict=True))


def test_rebuild_takes_the_named_tensors_not_the_templates() -> None:
    named = {name: torch.ones_like(leaf) for name, leaf in trees.named_leaves(example())}
    again = trees.rebuild(example(), named)
    assert again.Q["fc1.weight"].mean is named["Q/fc1.weight/mean"]
    assert again.R[1][0] is named["R/1/0"]
    assert again.Q["none"] is None and again.Q["empty"] == {}


def test_states_by_number_keep_their_names_apart() -> None:
    states = {0: {"w": torch.zeros(1)}, 1: {"w": torch.ones(1)}}
    named = dict(trees.named_leaves(states))
    assert list(named) == ["0/w", "1/w"]
    assert trees.equal(trees.rebuild(states, named), states)


def test_rebuild_misses_what_is_missing() -> None:
    with pytest.raises(KeyError):
        trees.rebuild(example(), {})


@settings(deadline=None, max_examples=50)
@given(TREES)
def test_map_keeps_the_structure_and_meets_every_leaf(tree: Any) -> None:
    doubled = trees.tree_map(lambda a, b: a + b, tree, tree)
    assert same_structure(doubled, tree)
    for twice, once in zip(trees.leaves(doubled), trees.leaves(tree), strict=True):
        assert torch.equal(twice, 2 * once)


def test_map_refuses_trees_of_other_lengths() -> None:
    with pytest.raises(ValueError):
        trees.tree_map(torch.add, (torch.ones(1),), (torch.ones(1), torch.ones(1)))


def forest(n: int) -> list[tuple[Any, float]]:
    rng = generator(0, "forest")

    def tree() -> Any:
        return Pair(Q={"a": torch.randn(3, 2, generator=rng)}, R=(torch.randn((), generator=rng), None))

    return [(tree(), float(torch.randint(1, 100, (), generator=rng))) for _ in range(n)]


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(dict(trees.named_leaves(a)), dict(trees.named_leaves(b)))


@pytest.mark.parametrize("n", [1, 2, 7])
def test_mean_matches_numpy(n: int) -> None:
    weighted = forest(n)
    got = trees.mean(weighted)
    weights = [weight for _, weight in weighted]
    for name, leaf in trees.named_leaves(got):
        stacked = np.stack([dict(trees.named_leaves(tree))[name].numpy() for tree, _ in weighted])
        np.testing.assert_allclose(leaf.numpy(), np.average(stacked, axis=0, weights=weights), rtol=1e-5, atol=1e-6)
    assert same_structure(got, weighted[0][0])


def test_mean_does_not_depend_on_the_order() -> None:
    weighted = forest(6)
    for shift in range(1, 6):
        close(trees.mean(weighted[shift:] + weighted[:shift]), trees.mean(weighted))


def test_mean_does_not_depend_on_the_scale_of_the_weights() -> None:
    weighted = forest(6)
    close(trees.mean((tree, 0.37 * weight) for tree, weight in weighted), trees.mean(weighted))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32).filter(bool), min_size=1, max_size=5),
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9),
)
def test_equal_trees_average_to_themselves(values: list[float], weights: list[float]) -> None:
    tree = {"w": torch.tensor(values)}
    assert trees.equal(trees.mean((trees.tree_map(torch.clone, tree), weight) for weight in weights), tree)


def test_mean_leaves_its_trees_alone() -> None:
    weighted = forest(3)
    before = [trees.tree_map(torch.clone, tree) for tree, _ in weighted]
    trees.mean(weighted)
    assert all(trees.equal(tree, copy) for (tree, _), copy in zip(weighted, before, strict=True))


def test_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no trees"):
        trees.mean([])


def test_sizes_by_hand() -> None:
    assert trees.count(example()) == 6 + 1 + 4
    assert trees.nbytes(example()) == 6 * 4 + 1 * 8 + 4 * 8
    assert trees.count(None) == trees.nbytes({}) == 0


NAN, OTHER_NAN = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.tensor([1.0, math.nextafter(1.0, 2.0)]), True),  # the same float32
        (torch.ones(2), torch.ones(2) + torch.tensor([0.0, 2.0**-23]), False),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (NAN, NAN.clone(), True),
        (NAN, OTHER_NAN, False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.zeros(1), torch.zeros(1, dtype=torch.int32), False),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous(), True),
        (torch.zeros(0), torch.zeros(0), True),
    ],
)
def test_equal_means_equal_bits(a: Tensor, b: Tensor, same: bool) -> None:
    assert trees.equal({"w": a}, {"w": b}) is same


def test_equal_compares_names() -> None:
    assert not trees.equal({"a": torch.ones(1)}, {"b": torch.ones(1)})
    assert not trees.equal({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    assert trees.equal(example(), example())


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"a": torch.ones(2)}, ["['a']", "['a', 'b/0']"]),
        ({"a": torch.ones(2), "b": (torch.ones(2),), "c": torch.ones(1)}, ["'c'"]),
        ({"a": torch.ones(2), "b": (torch.ones(2, 1),)}, ["b/0", "(2, 1)", "(2,)"]),
        ({"a": torch.ones(2).double(), "b": (torch.ones(2),)}, ["a has", "torch.float64", "torch.float32"]),
        ({"a": torch.ones(2), "b": (torch.tensor([1, math.nan]),)}, ["b/0", "not finite"]),
        ({"a": torch.tensor([-math.inf, 1]), "b": (torch.ones(2),)}, ["a holds", "not finite"]),
    ],
)
def test_fault_says_what_is_wrong(tree: Any, says: list[str]) -> None:
    sentence = trees.fault(tree, {"a": torch.ones(2), "b": (torch.ones(2),)})
    assert sentence is not None and all(part in sentence for part in says)


def test_no_fault_in_a_sound_tree() -> None:
    assert trees.fault(example(), trees.tree_map(torch.zeros_like, example())) is None


def test_numbers_are_judged_one_by_one_whatever_their_sum() -> None:
    large, opposite, none = torch.full((2,), 3e38), torch.tensor([math.inf, -math.inf]), torch.tensor([math.nan, 1])
    assert trees.fault(large, large) is None
    assert trees.fault(opposite, large) is not None
    assert trees.fault(opposite, large, infinite=True) is None
    assert trees.fault(none, large, infinite=True) is not None


def test_fault_sees_another_nesting() -> None:
    x = torch.ones(2)
    assert trees.fault((x,), {"0": x}) is not None
    assert trees.fault({"0": x}, {"0": x}) is None


def test_empty_tensors_are_equal_whatever_their_strides() -> None:
    strange = torch.ones(1).expand(4)[:0]
    assert trees.equal(strange, torch.ones(0))


class Inner(NamedTuple):
    mean: Tensor
    rho: Tensor | None


class Outer(NamedTuple):
    W: dict[str, Tensor]
    masks: dict[str, Inner]
    ballot: Inner | None
    nothing: None
    step: Tensor


def test_typed_is_the_inverse_of_naming() -> None:
    """From annotations alone, whatever is None or empty; layers' names may hold slashes."""
    inner = Inner(torch.ones(2), None)
    full = Outer({"a/b": torch.zeros(1), "c": torch.ones(3)}, {"x": inner, "y": inner}, inner, None, torch.tensor(3))
    for tree in (full, full._replace(ballot=None), full._replace(W={}, masks={})):
        back = trees.typed(Outer, dict(trees.named_leaves(tree)))
        assert type(back) is Outer and trees.equal(back, tree)
        assert trees.fault(back, tree) is None
    assert trees.typed(None, {}) is None
    assert trees.typed(Tensor, {"": full.step}) is full.step


def test_typed_refuses_what_is_missing_left_over_or_of_no_type() -> None:
    inner = {"mean": torch.ones(2), "rho": torch.ones(2)}
    with pytest.raises(KeyError):
        trees.typed(Inner, {"rho": torch.ones(2)})
    for kind, named in ((Inner, {**inner, "more": torch.ones(1)}), (Inner, {**inner, "mean/more": torch.ones(1)})):
        with pytest.raises(ValueError, match="more"):
            trees.typed(kind, named)
    with pytest.raises(ValueError, match="nothing of that name"):
        trees.typed(None, {"mean": torch.ones(1)})
    with pytest.raises(ValueError, match="not a type that names its leaves"):
        trees.typed(int, {"": torch.ones(1)})
