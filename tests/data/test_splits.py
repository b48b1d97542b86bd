"""A client's parts: their sizes, what they are made of, and what they depend on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrbpfl.data import Split, split
from lrbpfl.data.partition import Indices
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

quick = settings(deadline=None, max_examples=100)
seeds = st.integers(0, 2**32 - 1)
fractions = st.floats(0.01, 0.99)
many = st.lists(st.integers(0, 9), min_size=4, max_size=120)  # labels of one client


def counts(labels: Indices, part: Indices) -> Indices:
    return np.bincount(labels[part], minlength=10)


def assert_share(labels: Indices, part: Indices, whole: Indices) -> None:
    """Every class of the part has its share of the whole, to within one example."""
    expected = counts(labels, whole) * len(part) / len(whole)
    assert (abs(counts(labels, part) - expected) < 1).all()


@quick
@given(n=st.integers(4, 300), train=fractions, validation=fractions, seed=seeds)
def test_split(n: int, train: float, validation: float, seed: int) -> None:
    indices = 7 + 3 * np.arange(n)
    plain = split(indices, train_fraction=train, rng=numpy_generator(seed))
    assert (np.sort(np.concatenate(plain)) == indices).all()
    assert len(plain.train) == min(max(round(train * n), 1), n - 1)
    assert len(plain.validation) == len(plain.public) == len(plain.calibration) == 0
    assert len(plain.test) >= 1
    if len(plain.train) >= 2:
        parts = split(indices, train_fraction=train, validation_fraction=validation, rng=numpy_generator(seed))
        assert np.array_equal(parts.test, plain.test)
        assert np.array_equal(np.concatenate(parts[:2]), plain.train)
        assert min(len(parts.train), len(parts.validation)) >= 1
        assert abs(len(parts.validation) - validation * len(plain.train)) <= 1


@quick
@given(labels=many, train=fractions, validation=fractions, calibration=fractions, public=st.floats(0, 0.99), seed=seeds)
def test_class_by_class_the_parts_keep_their_sizes_and_have_their_shares(
    labels: list[int], train: float, validation: float, calibration: float, public: float, seed: int
) -> None:
    y, indices = np.array(labels), np.arange(len(labels))
    wanted: dict[str, Any] = {"calibration_fraction": calibration, "public_fraction": public}
    if round(train * len(y)) >= 2:
        wanted["validation_fraction"] = validation
    at_random = split(indices, train_fraction=train, **wanted, rng=numpy_generator(seed))
    parts = split(indices, train_fraction=train, labels=y, **wanted, rng=numpy_generator(seed))
    assert [len(part) for part in parts] == [len(part) for part in at_random]
    assert np.array_equal(np.sort(np.concatenate(parts)), indices)
    left = indices
    for part in (parts.test, parts.validation, parts.calibration, parts.public):
        assert_share(y, part, left)
        left = np.setdiff1d(left, part)
        assert_share(y, left, np.append(left, part))
    assert np.array_equal(np.sort(parts.train), left)
    again = split(indices, train_fraction=train, labels=y, **wanted, rng=numpy_generator(seed))
    assert all(map(np.array_equal, parts, again))


@pytest.mark.parametrize("labels", [None, np.arange(60) % 7])
def test_no_part_depends_on_a_later_fraction(labels: Indices | None) -> None:
    """Test, validation, calibration, public: in this order they are taken, and what is left trains."""
    parts = [
        split(
            np.arange(60),
            train_fraction=0.5,
            labels=labels,
            validation_fraction=0.25 * (number > 0),
            calibration_fraction=0.25 * (number > 1),
            public_fraction=0.25 * (number > 2),
            rng=numpy_generator(3),
        )
        for number in range(4)
    ]
    for number, field in enumerate(("test", "validation", "calibration")):
        assert all(np.array_equal(getattr(p, field), getattr(parts[number], field)) for p in parts[number:])
        assert len(getattr(parts[number], field))
    assert set(parts[3].public) | set(parts[3].train) == set(parts[2].train)


def test_an_even_client_is_split_evenly() -> None:
    """As many of each of eleven classes, wherever whole numbers allow it."""
    y = np.repeat(np.arange(11), 6)
    parts = split(np.arange(66), train_fraction=0.5, validation_fraction=1 / 3, labels=y, rng=numpy_generator(0))
    for part, each in ((parts.train, 2), (parts.validation, 1), (parts.test, 3)):
        assert np.bincount(y[part]).tolist() == 11 * [each]


def test_seven_examples_of_seven_classes_are_split_by_chance() -> None:
    """Nothing tells the classes apart, so each is as likely to be tested as any other."""
    y = np.array([0, 2, 3, 5, 8, 9, 10])
    tested = np.zeros(11)
    for seed in range(700):
        parts = split(np.arange(7), train_fraction=0.7, calibration_fraction=0.2, labels=y, rng=numpy_generator(seed))
        assert [len(part) for part in parts] == [4, 0, 2, 0, 1]
        tested[y[parts.test]] += 1
    assert tested[y].min() > 150 and tested[y].max() < 250  # 200 expected, 12 the standard deviation


def test_examples_of_a_class_are_drawn_by_chance() -> None:
    chosen = np.zeros(20)
    for seed in range(400):
        parts = split(np.arange(20), train_fraction=0.25, labels=np.arange(20) % 2, rng=numpy_generator(seed))
        chosen[parts.train] += 1
    assert chosen.min() > 65 and chosen.max() < 135  # 100 expected, 9 the standard deviation


def test_the_datas_own_split_decides_who_trains() -> None:
    indices, trains = np.arange(100, 112), np.arange(12) % 3 > 0
    parts = split(indices, trains=trains, labels=np.arange(12) % 2, calibration_fraction=0.25, rng=numpy_generator(0))
    assert sorted(parts.test) == [100, 103, 106, 109]
    assert [len(part) for part in parts] == [6, 0, 4, 0, 2]
    assert set(parts.train) | set(parts.calibration) == set(indices[trains])


@pytest.mark.parametrize("trains", [np.ones(4, bool), np.zeros(4, bool)])
def test_an_own_split_with_an_empty_part_is_refused(trains: Any) -> None:
    with pytest.raises(BadInput, match=rf"own split trains on {trains.sum()} of a client's 4 examples"):
        split(np.arange(4), trains=trains, rng=numpy_generator(0))


@pytest.mark.parametrize(("n", "kept"), [(1, 0), (2, 1), (3, 1), (20, 2)])
def test_a_calibration_part_has_an_example_where_two_train(n: int, kept: int) -> None:
    trains = np.arange(n + 1) < n
    parts = split(np.arange(n + 1), trains=trains, calibration_fraction=0.1, rng=numpy_generator(0))
    assert (len(parts.calibration), len(parts.train)) == (kept, n - kept)


@pytest.mark.parametrize(("fraction", "given"), [(0.0, 0), (0.04, 1), (0.3, 6), (0.99, 19)])
def test_what_the_server_gets_comes_out_of_the_training_part(fraction: float, given: int) -> None:
    """20 of 50 examples are left for training once 5 are held out; the other parts stay as they are."""

    def parts(public: float) -> Split:
        rng = numpy_generator(0)
        return split(np.arange(50), train_fraction=0.5, validation_fraction=0.2, public_fraction=public, rng=rng)

    without, got = parts(0.0), parts(fraction)
    assert len(got.public) == given
    assert np.array_equal(np.concatenate([got.train, got.public]), without.train)
    assert np.array_equal(got.validation, without.validation) and np.array_equal(got.test, without.test)


def test_the_last_training_example_stays_with_its_client() -> None:
    got = split(np.arange(4), train_fraction=0.25, public_fraction=0.9, rng=numpy_generator(0))
    assert len(got.train) == 1 and len(got.public) == 0


def test_without_labels_a_shuffle_is_cut() -> None:
    """The bits of splits that pay no heed to labels: one permutation, and the parts one after the other."""
    indices = 5 + 2 * np.arange(40)
    parts = split(indices, train_fraction=0.5, validation_fraction=0.25, public_fraction=0.2, rng=numpy_generator(1))
    expected = np.split(numpy_generator(1).permutation(indices), [12, 15, 20])
    assert all(map(np.array_equal, (parts.train, parts.public, parts.validation, parts.test), expected))


@pytest.mark.parametrize(
    ("n", "train", "validation", "words"),
    [
        (9, 0.0, 0.0, "train_fraction is 0"),
        (9, 1.0, 0.0, "train_fraction is 1"),
        (9, float("nan"), 0.0, "train_fraction is nan"),
        (9, 0.5, 1.0, "validation_fraction is 1"),
        (9, 0.5, -0.1, "validation_fraction is -0.1"),
        (1, 0.5, 0.0, "a client with 1 examples"),
        (0, 0.5, 0.0, "a client with 0 examples"),
        (9, 0.1, 0.5, "a client with 9 examples and train_fraction 0.1 has 1 for training"),
    ],
)
def test_split_refuses(n: int, train: float, validation: float, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        split(np.arange(n), train_fraction=train, validation_fraction=validation, rng=numpy_generator(0))
