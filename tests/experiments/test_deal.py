"""Who gets what: every example once, by the seed alone; and what is done to each client's examples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrbpfl.data import Dataset, Split, load, permutations
from lrbpfl.errors import BadInput
from lrbpfl.experiments.deal import deal, deal_groups, deal_new, shift_group
from lrbpfl.experiments.sections import DataSection
from tests.experiments.conftest import NAMES


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def same_splits(a: dict[str, Split], b: dict[str, Split]) -> bool:
    return list(a) == list(b) and all(
        all(map(np.array_equal, mine, yours)) for mine, yours in zip(a.values(), b.values(), strict=True)
    )


OTHERS: dict[str, Any] = {"public_fraction": 0.1, "calibration_fraction": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "labels": {"partition": "labels", "labels_per_client": 3},
    "unbalanced labels": {"partition": "labels", "balanced": False},
    "dirichlet": {"partition": "dirichlet", "alpha": 1.0},
    "size": {"partition": "size", "skew": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_alone_decides_who_gets_what(kind: str, digits: Dataset) -> None:
    section = DataSection(**KINDS[kind], clients=7)
    first = deal(digits, section, seed=1)
    np.random.default_rng(0).random(5)
    assert same_splits(deal(digits, section, seed=1), first)
    assert not same_splits(deal(digits, section, seed=2), first)


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_goes_to_one_place(kind: str, digits: Dataset) -> None:
    section = DataSection(**KINDS[kind], clients=7, train_fraction=0.5, validation_fraction=0.25, **OTHERS)
    splits = deal(digits, section, seed=1)
    assert list(splits) == [f"client-{k}" for k in range(7)]
    everything = np.concatenate([part for split in splits.values() for part in split])
    assert np.array_equal(np.sort(everything), np.arange(len(digits.y)))
    assert all(len(part) for split in splits.values() for part in split)


@pytest.mark.parametrize("kind", KINDS)
def test_the_test_part_does_not_depend_on_the_validation_part(kind: str, digits: Dataset) -> None:
    section = DataSection(**KINDS[kind], clients=5, train_fraction=0.3)
    without = deal(digits, section, seed=1)
    with_it = deal(digits, section.model_copy(update={"validation_fraction": 0.4}), seed=1)
    for name in without:
        assert np.array_equal(without[name].test, with_it[name].test)
        assert set(without[name].train) == set(with_it[name].train) | set(with_it[name].validation)


def test_each_kind_keeps_its_promise(digits: Dataset) -> None:
    y = digits.y.numpy()

    def parts(**keys: Any) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        return [np.concatenate(split) for split in deal(digits, DataSection(**keys, clients=10), seed=1).values()]

    assert all(len(np.unique(y[part])) == 3 for part in parts(partition="labels", labels_per_client=3))
    sizes = [len(part) for part in parts(partition="size", skew=0.0)]
    assert max(sizes) - min(sizes) <= 1
    skewed = [len(part) for part in parts(partition="size", skew=2.0)]
    assert max(skewed) > 4 * min(skewed)
    even, uneven = (
        np.mean(
            [np.bincount(y[part], minlength=10).max() / len(part) for part in parts(partition="dirichlet", alpha=a)]
        )
        for a in (1e6, 0.05)
    )
    assert even < 0.15 < 0.4 < uneven


def test_labels_are_the_partition_unless_another_is_named(digits: Dataset) -> None:
    named = deal(digits, DataSection(partition="labels"), seed=0)
    assert same_splits(deal(digits, DataSection(), seed=0), named)


def test_numbers_in_names_have_equal_length(digits: Dataset) -> None:
    names = list(deal(digits, DataSection(partition="size", clients=11), seed=0))
    assert names == [f"client-{k:02d}" for k in range(11)]


def test_the_seed_decides_which_examples_natural_clients_train_on(folder: Path) -> None:
    section = DataSection(dataset=str(folder), train_fraction=0.5)
    first, other = (deal(load(str(folder)), section, seed=seed) for seed in (1, 2))
    assert same_splits(deal(load(str(folder)), section, seed=1), first)
    assert all(set(first[name].train) != set(other[name].train) for name in NAMES)


def with_test_set(digits: Dataset) -> Dataset:
    return digits._replace(num_test=400)


def everything(splits: dict[str, Split]) -> list[int]:
    return sorted(int(i) for part in splits.values() for indices in part for i in indices)


def test_new_clients_share_the_official_test_set(digits: Dataset) -> None:
    section = DataSection(partition="dirichlet", clients=5, new_clients=4, new_alpha=(0.1, 1.0), public_fraction=0.3)
    training, *new = deal_groups(with_test_set(digits), section, seed=1)
    assert everything(training.splits) == list(range(1397))
    assert [group.new_alpha for group in new] == [0.1, 1.0]
    for group in new:
        assert everything(group.splits) == list(range(1397, 1797))
        assert list(group.splits) == [f"new-{group.new_alpha}-{k}" for k in range(4)]
        assert all(len(part.public) == 0 < min(len(part.train), len(part.test)) for part in group.splits.values())
        sizes = [(len(part.train), len(part.train) + len(part.test)) for part in group.splits.values()]
        assert all(abs(train - 0.1 * both) <= 1 for train, both in sizes)


@pytest.mark.parametrize(("fraction", "expected"), [(None, 0.2), (0.4, 0.4)])
def test_new_clients_share_a_fraction_of_every_class_elsewhere(
    fraction: float | None, expected: float, digits: Dataset
) -> None:
    section = DataSection(clients=5, new_clients=3, new_fraction=fraction)
    training, new = deal_groups(digits, section, seed=1)
    held = everything(new.splits)
    assert sorted(everything(training.splits) + held) == list(range(1797))
    counts, of = (np.bincount(digits.y.numpy()[chosen], minlength=10) for chosen in (held, np.arange(1797)))
    assert np.array_equal(counts, np.rint(expected * of))


def test_a_fraction_that_is_named_goes_before_the_test_set(digits: Dataset) -> None:
    _, new = deal_groups(with_test_set(digits), DataSection(new_clients=3, new_fraction=0.1), seed=1)
    assert min(everything(new.splits)) < 1397


def test_new_clients_do_not_depend_on_other_alphas(digits: Dataset) -> None:
    some = deal_new(digits, DataSection(new_clients=3, new_alpha=(0.1, 0.5)), seed=1)
    more = deal_new(digits, DataSection(new_clients=3, new_alpha=(2.0, 0.5, 0.1)), seed=1)
    assert all(same_splits(some[alpha], more[alpha]) for alpha in (0.1, 0.5))
    assert list(some) == [0.1, 0.5] and list(more) == [2.0, 0.5, 0.1]
    other = deal_new(digits, DataSection(new_clients=3, new_alpha=(0.1,)), seed=2)
    assert not same_splits(some[0.1], other[0.1])


def test_a_smaller_alpha_makes_new_clients_more_unlike(digits: Dataset) -> None:
    groups = deal_new(digits, DataSection(new_clients=5, new_alpha=(0.05, 1e6), new_fraction=0.5), seed=1)
    uneven, even = (
        np.mean(
            [np.bincount(digits.y.numpy()[np.concatenate(part)]).max() / sum(map(len, part)) for part in g.values()]
        )
        for g in groups.values()
    )
    assert even < 0.15 < 0.4 < uneven


def test_more_clients_than_corruptions_are_refused(digits: Dataset) -> None:
    images = digits._replace(x=torch.zeros(1797, 3, 32, 32, dtype=torch.uint8))
    section = DataSection(partition="size", clients=50, corruptions=True, new_clients=8)
    with pytest.raises(BadInput, match="57 different pairs of kind and severity for 58 clients"):
        deal_groups(images, section, seed=0)


def sizes(dataset: Dataset, **keys: Any) -> set[tuple[int, int]]:
    """How many examples of each client train and test."""
    return {(len(part.train), len(part.test)) for part in deal(dataset, DataSection(**keys), seed=0).values()}


def test_what_trains_unless_a_fraction_is_named(digits: Dataset, tmp_path: Path) -> None:
    """The data's own split; 0.7 of natural clients without one, so that ten examples are enough; 0.1 of dealt ones."""
    speakers = load("speakers")
    assert sizes(speakers) == {(33, 33)} and sizes(speakers, train_fraction=1 / 3) == {(22, 44)}
    own = deal(speakers, DataSection(), seed=0)
    assert speakers.trains is not None and speakers.client_names == tuple(own)
    assert set(np.concatenate([part.train for part in own.values()])) == set(np.flatnonzero(speakers.trains))
    assert sizes(speakers, partition="size", skew=0.0) == {(10, 89)}
    for name in ("anna", "bert"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((10, 3)), y=np.arange(10) % 4)
    assert sizes(load(str(tmp_path))) == {(7, 3)} and sizes(load(str(tmp_path)), train_fraction=0.5) == {(5, 5)}
    assert sizes(digits, partition="size", skew=0.0, clients=3) == {(60, 539)}


def test_parts_have_the_classes_of_their_client_unless_told_otherwise(digits: Dataset) -> None:
    """A tenth of 600 examples in ten classes: six of each but for rounding, and by chance far from that."""
    y, section = digits.y.numpy(), DataSection(partition="size", skew=0.0, clients=3)

    def spread(section: DataSection) -> list[int]:
        counts = [np.bincount(y[part.train], minlength=10) for part in deal(digits, section, seed=0).values()]
        return [int(np.ptp(row)) for row in counts]

    assert max(spread(section)) <= 3 < 5 <= min(spread(section.model_copy(update={"stratified": False})))


def test_shifts_reach_every_part_of_every_client(digits: Dataset) -> None:
    """What is dealt stays as it is; labels of every second client are swapped, new clients counted from the first."""
    section = DataSection(clients=5, new_clients=3, new_alpha=(0.5, 5.0), shift="concept", **OTHERS)
    plain = deal_groups(digits, section.model_copy(update={"shift": "none"}), seed=1)
    swap = torch.from_numpy(permutations(10, 2, seed=1)[1])
    for group, before in zip(deal_groups(digits, section, seed=1), plain, strict=True):
        assert same_splits(group.splits, before.splits)
        y = shift_group(digits, group, section, seed=1).y
        for k, part in enumerate(group.splits.values()):
            for own in part:
                assert torch.equal(y[own], swap[digits.y[own]] if k % 2 else digits.y[own])


def test_shifts_of_features_belong_to_clients_and_not_to_parts(digits: Dataset) -> None:
    section = DataSection(clients=4, new_clients=2, new_alpha=(0.5, 5.0), shift="features", partition="size")
    other = section.model_copy(update={"train_fraction": 0.6, "stratified": False, "validation_fraction": 0.3})
    training, *new = deal_groups(digits, section, seed=1)
    x = shift_group(digits, training, section, seed=1).x
    again = shift_group(digits, deal_groups(digits, other, seed=1)[0], other, seed=1).x
    assert torch.equal(x, again) and not torch.equal(x, digits.x)
    constant = digits._replace(x=torch.ones_like(digits.x))  # what is left is the client's shift
    shifts = [
        shift_group(constant, group, section, seed=1).x[part.test[0]]
        for group in (training, *new)
        for part in group.splits.values()
    ]
    assert all(torch.equal(shifts[4 + j], shifts[6 + j]) for j in range(2))  # whatever the alpha
    assert len({tuple(shift.flatten().tolist()) for shift in shifts}) == 6


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shift": "features"}, r"data.shift = 'features' needs float32 inputs or uint8 images"),
        ({"shift": "concept", "concept_groups": 11}, r"data.concept_groups = 11: there are 10 classes"),
    ],
)
def test_shifts_that_cannot_be_are_refused(keys: dict[str, Any], words: str, digits: Dataset) -> None:
    numbers = digits._replace(x=torch.zeros(1797, 5, dtype=torch.uint8))
    with pytest.raises(BadInput, match=words):
        deal_groups(numbers, DataSection(**keys), seed=0)
