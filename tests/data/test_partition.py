"""Every index once, nothing lost, an end for every input; and refusals that name the value."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrbpfl.data import PARTITIONS, by_labels, by_size, dirichlet, hold_out, natural
from lrbpfl.data.partition import Indices
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def even(num_classes: int, each: int) -> Indices:
    """Labels with the same number of examples of each class, in no order."""
    return numpy_generator(0, "labels").permutation(np.repeat(np.arange(num_classes), each))


def assert_partition(parts: list[Indices], n: int, clients: int) -> None:
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert (np.sort(np.concatenate(parts)) == np.arange(n)).all()


def same(a: list[Indices], b: list[Indices]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@quick
@given(data=st.data(), balanced=st.booleans(), seed=seeds)
def test_labels_whatever_the_sizes(data: st.DataObject, balanced: bool, seed: int) -> None:
    num_classes = data.draw(st.integers(1, 12))
    labels = data.draw(st.integers(1, num_classes))
    clients = data.draw(st.integers(-(-num_classes // labels), 30))
    holders = -(-clients * labels // num_classes)
    counts = data.draw(st.lists(st.integers(holders, holders + 40), min_size=num_classes, max_size=num_classes))
    y = np.repeat(np.arange(num_classes), counts)
    wanted: dict[str, Any] = {"num_classes": num_classes, "clients": clients, "labels_per_client": labels}
    parts = by_labels(y, **wanted, balanced=balanced, rng=numpy_generator(seed))
    assert_partition(parts, len(y), clients)
    assert {len(np.unique(y[part])) for part in parts} == {labels}
    table = np.array([np.bincount(y[part], minlength=num_classes) for part in parts])  # (clients, classes)
    assert np.ptp((table > 0).sum(0)) <= 1
    if balanced:
        assert all(np.ptp(column[column > 0]) <= 1 for column in table.T)
    assert same(parts, by_labels(y, **wanted, balanced=balanced, rng=numpy_generator(seed)))


@pytest.mark.parametrize(
    ("num_classes", "labels", "clients"), [(10, 2, 50), (10, 2, 20), (10, 5, 50), (100, 5, 50), (100, 5, 20)]
)
@pytest.mark.parametrize("balanced", [True, False])
def test_labels_of_the_paper_leave_no_class_unused(num_classes: int, labels: int, clients: int, balanced: bool) -> None:
    y = even(num_classes, 600)
    for seed in range(5):
        rng = numpy_generator(seed)
        parts = by_labels(
            y, num_classes=num_classes, clients=clients, labels_per_client=labels, balanced=balanced, rng=rng
        )
        assert_partition(parts, len(y), clients)
        assert {len(np.unique(y[part])) for part in parts} == {labels}
        assert len(np.unique(np.concatenate([y[part] for part in parts]))) == num_classes


def test_labels_pair_up_in_every_way() -> None:
    """A deal without the exchanges would pair a class with the same one or two others throughout."""
    y, pairs = even(10, 60), set()
    for seed in range(10):
        parts = by_labels(y, num_classes=10, clients=50, labels_per_client=2, rng=numpy_generator(seed))
        pairs |= {tuple(np.unique(y[part])) for part in parts}
    assert len(pairs) == 45


def test_labels_ignore_classes_without_examples() -> None:
    y = np.array([0, 0, 3, 3, 9, 9])
    parts = by_labels(y, num_classes=10, clients=3, labels_per_client=2, rng=numpy_generator(0))
    assert_partition(parts, 6, 3)
    assert {len(np.unique(y[part])) for part in parts} == {2}


def test_labels_give_the_odd_slots_to_classes_with_room() -> None:
    y = np.repeat(np.arange(3), [2, 3, 3])
    for seed in range(10):
        parts = by_labels(y, num_classes=3, clients=4, labels_per_client=2, balanced=False, rng=numpy_generator(seed))
        assert [len(part) for part in parts] == [2, 2, 2, 2]


def test_balanced_shares_give_equal_clients_and_unbalanced_do_not() -> None:
    wanted: dict[str, Any] = {"num_classes": 10, "clients": 50, "labels_per_client": 2}
    y = even(10, 600)
    assert {len(part) for part in by_labels(y, **wanted, rng=numpy_generator(0))} == {120}
    assert np.std([len(part) for part in by_labels(y, **wanted, balanced=False, rng=numpy_generator(0))]) > 20


@quick
@given(
    alpha=st.floats(-3, 6).map(lambda power: 10.0**power),
    clients=st.integers(1, 40),
    least=st.integers(1, 6),
    num_classes=st.integers(1, 10),
    spare=st.integers(0, 300),
    seed=seeds,
)
def test_dirichlet_ends_for_every_alpha(
    alpha: float, clients: int, least: int, num_classes: int, spare: int, seed: int
) -> None:
    y = numpy_generator(seed, "y").integers(num_classes, size=clients * least + spare)
    wanted: dict[str, Any] = {"num_classes": num_classes, "clients": clients, "alpha": alpha, "min_examples": least}
    parts = dirichlet(y, **wanted, rng=numpy_generator(seed))
    assert_partition(parts, len(y), clients)
    assert min(map(len, parts)) >= least
    assert same(parts, dirichlet(y, **wanted, rng=numpy_generator(seed)))


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1e6, 1.7e308])
def test_dirichlet_survives_extreme_alpha(alpha: float) -> None:
    y = even(10, 100)
    assert_partition(dirichlet(y, num_classes=10, clients=50, alpha=alpha, rng=numpy_generator(0)), 1000, 50)


def test_dirichlet_follows_alpha() -> None:
    """The share of a class at one client has the variance of its Beta(alpha, (K - 1) alpha) marginal."""
    y, clients = even(100, 400), 10
    for alpha in (0.1, 1.0, 10.0):
        parts = dirichlet(y, num_classes=100, clients=clients, alpha=alpha, min_examples=1, rng=numpy_generator(1))
        shares = np.array([np.bincount(y[part], minlength=100) for part in parts]) / 400
        variance = 0.1 * 0.9 / (clients * alpha + 1)
        assert np.var(shares) == pytest.approx(variance, rel=0.2)


def test_dirichlet_rounding_favours_no_client() -> None:
    y = even(200, 5)  # far fewer examples of a class than clients
    parts = dirichlet(y, num_classes=200, clients=50, alpha=1e6, min_examples=1, rng=numpy_generator(0))
    assert max(map(len, parts)) < 45  # 20 in the mean; 100 if every class fell to the same clients


def test_topping_up_moves_only_what_is_needed() -> None:
    y = np.zeros(100, np.int64)
    parts = dirichlet(y, num_classes=1, clients=5, alpha=1e-6, min_examples=3, rng=numpy_generator(0))
    assert sorted(map(len, parts)) == [3, 3, 3, 3, 88]


@quick
@given(
    skew=st.floats(0, 1e308), clients=st.integers(1, 40), least=st.integers(1, 5), spare=st.integers(0, 99), seed=seeds
)
def test_size(skew: float, clients: int, least: int, spare: int, seed: int) -> None:
    y = np.zeros(clients * least + spare, np.int64)
    parts = by_size(y, clients=clients, skew=skew, min_examples=least, rng=numpy_generator(seed))
    assert_partition(parts, len(y), clients)
    assert min(map(len, parts)) >= least
    assert same(parts, by_size(y, clients=clients, skew=skew, min_examples=least, rng=numpy_generator(seed)))


def test_skew_zero_is_equal_sizes_and_more_is_more() -> None:
    y = even(10, 101)
    spread = []
    for skew in (0.0, 0.5, 2.0):
        sizes = [len(part) for part in by_size(y, clients=20, skew=skew, rng=numpy_generator(3))]
        spread.append(np.ptp(sizes))
    assert spread[0] <= 1 < spread[1] < spread[2]


@quick
@given(owner=st.lists(st.integers(0, 5), min_size=1))
def test_natural(owner: list[int]) -> None:
    numbers = np.unique(owner, return_inverse=True)[1]
    parts = natural(numbers)
    assert_partition(parts, len(owner), len(set(owner)))
    assert all((numbers[part] == client).all() for client, part in enumerate(parts))


def test_registry_names_every_partition() -> None:
    assert {"labels": by_labels, "dirichlet": dirichlet, "size": by_size, "natural": natural} == PARTITIONS


Y = even(10, 6)
LABELS: dict[str, Any] = {"y": Y, "num_classes": 10, "clients": 10, "labels_per_client": 2}
DIRICHLET: dict[str, Any] = {"y": Y, "num_classes": 10, "clients": 10, "alpha": 1.0}
SIZE: dict[str, Any] = {"y": Y, "clients": 10, "skew": 1.0}


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (by_labels, LABELS | {"clients": 0}, "clients is 0"),
        (by_labels, LABELS | {"clients": -3}, "clients is -3"),
        (by_labels, LABELS | {"clients": 2.5}, "clients is 2.5"),
        (by_labels, LABELS | {"clients": True}, "clients is True"),
        (by_labels, LABELS | {"labels_per_client": 0}, "labels_per_client is 0"),
        (by_labels, LABELS | {"labels_per_client": 11}, "labels_per_client is 11.*10 classes"),
        (by_labels, LABELS | {"clients": 4}, "4 clients x 2 labels cover at most 8 of the 10 classes"),
        (by_labels, LABELS | {"clients": 31}, "has 6 examples, and 7 of the 31 clients"),
        (by_labels, LABELS | {"clients": 50}, "has 6 examples, and 10 of the 50 clients"),
        (by_labels, LABELS | {"num_classes": 0}, "num_classes is 0"),
        (by_labels, LABELS | {"num_classes": 9}, "labels go from 0 to 9"),
        (by_labels, LABELS | {"y": Y - 1}, "labels go from -1"),
        (by_labels, LABELS | {"y": Y / 2}, "y is float64"),
        (by_labels, LABELS | {"y": Y[:0]}, r"shape \(0,\)"),
        (by_labels, LABELS | {"y": Y.reshape(2, -1)}, r"shape \(2, 30\)"),
        (dirichlet, DIRICHLET | {"alpha": 0.0}, "alpha is 0"),
        (dirichlet, DIRICHLET | {"alpha": -1.0}, "alpha is -1"),
        (dirichlet, DIRICHLET | {"alpha": float("nan")}, "alpha is nan"),
        (dirichlet, DIRICHLET | {"alpha": float("inf")}, "alpha is inf"),
        (dirichlet, DIRICHLET | {"clients": 0}, "clients is 0"),
        (dirichlet, DIRICHLET | {"min_examples": 0}, "min_examples is 0"),
        (dirichlet, DIRICHLET | {"clients": 31}, "31 clients x 2 min_examples need 62 examples of 60"),
        (dirichlet, DIRICHLET | {"num_classes": 3}, "labels go from 0 to 9"),
        (by_size, SIZE | {"skew": -0.1}, "skew is -0.1"),
        (by_size, SIZE | {"skew": float("nan")}, "skew is nan"),
        (by_size, SIZE | {"clients": 61, "min_examples": 1}, "61 clients"),
        (by_size, SIZE | {"clients": 0}, "clients is 0"),
    ],
)
def test_refusals_name_the_value(function: Callable[..., Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        function(**arguments, rng=numpy_generator(0))


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        ([0, 2, 2], "client 1 owns no example"),
        ([1, 1], "client 0 owns no example"),
        ([-1, 0], "owner holds -1"),
        ([0.0, 1.0], "owner is float64"),
        ([[0, 1]], r"shape \(1, 2\)"),
    ],
)
def test_natural_refuses(owner: list[Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        natural(np.array(owner))


@quick
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any), fraction=st.floats(0.01, 0.99), seed=seeds
)
def test_of_every_class_the_same_fraction_is_held_out_but_never_all(
    counts: list[int], fraction: float, seed: int
) -> None:
    y = numpy_generator(0).permutation(np.repeat(np.arange(len(counts)), counts))
    kept, held = hold_out(y, fraction=fraction, rng=numpy_generator(seed))
    assert_partition([kept, held], len(y), 2)
    expected = [min(round(fraction * n), n - 1) if n else 0 for n in counts]
    assert np.bincount(y[held], minlength=len(counts)).tolist() == expected
    assert same([kept, held], list(hold_out(y, fraction=fraction, rng=numpy_generator(seed))))


def test_the_seed_decides_what_is_held_out() -> None:
    y = even(3, 40)
    some, others = (hold_out(y, fraction=0.5, rng=numpy_generator(seed))[1] for seed in (1, 2))
    assert not np.array_equal(some, others)
