"""From a configuration to clients, task and engine, or to a sentence about what is wrong."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lrbpfl.data import Dataset, Split, corrupt, deal_corruptions, load
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import alphas_of_new, build_engine, build_federation, deal, deal_groups, deal_new
from lrbpfl.experiments.config import DataSection, parse
from lrbpfl.rng import numpy_generator
from tests.experiments.conftest import NAMES, Configure


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def same_splits(a: dict[str, Split], b: dict[str, Split]) -> bool:
    return list(a) == list(b) and all(
        all(map(np.array_equal, mine, yours)) for mine, yours in zip(a.values(), b.values(), strict=True)
    )


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
    section = DataSection(**KINDS[kind], clients=7, train_fraction=0.5, validation_fraction=0.25, public_fraction=0.1)
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


def test_a_folder_brings_its_clients_and_their_names(configure: Configure, folder: Path) -> None:
    federation = build_federation(configure(data={"clients": 99}))  # a natural partition brings its own
    assert tuple(client.name for client in federation.clients) == NAMES
    assert [len(client.train.y) for client in federation.clients] == [10, 12, 14, 16]
    for client in federation.clients:
        with np.load(folder / f"{client.name}.npz") as file:
            mine = torch.cat([client.train.x, client.test.x])
            assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, file["x"].astype(np.float32).tolist()))


def test_the_seed_decides_which_examples_natural_clients_train_on(folder: Path) -> None:
    section = DataSection(dataset=str(folder), train_fraction=0.5)
    first, other = (deal(load(str(folder)), section, seed=seed) for seed in (1, 2))
    assert same_splits(deal(load(str(folder)), section, seed=1), first)
    assert all(set(first[name].train) != set(other[name].train) for name in NAMES)


def test_a_folder_may_be_dealt_anew(configure: Configure) -> None:
    federation = build_federation(configure(data={"partition": "size", "clients": 3}))
    assert [client.name for client in federation.clients] == ["client-0", "client-1", "client-2"]


def test_digits_have_no_natural_clients() -> None:
    with pytest.raises(BadInput, match=r"data.partition = 'natural': dataset 'digits' does not say"):
        build_federation(parse({"data": {"partition": "natural"}}))


def test_a_cohort_larger_than_the_federation_is_refused(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"federation.cohort = 5: there are only 4 clients"):
        build_federation(configure(federation={"cohort": 5}))


def test_a_client_with_one_example_is_named(configure: Configure, tmp_path: Path) -> None:
    for name, n in (("anna", 4), ("bert", 1)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((n, 3)), y=np.arange(n) % 2)
    with pytest.raises(BadInput, match=r"^bert: a client with 1 examples? cannot be split"):
        build_federation(configure(data={"dataset": str(tmp_path)}))


@pytest.mark.parametrize("device", ["cuda", "meta", "", "toaster", "hpu", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(device: str, configure: Configure) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(BadInput) as caught:
        build_federation(configure(engine={"device": device}))
    assert str(caught.value).startswith(f"engine.device = {device!r} cannot be used here: ")
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_the_inputs_is_refused(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"model 'cnn' takes images"):
        build_federation(configure(federation={"model": "cnn"}))


def rows(x: Tensor) -> set[tuple[float, ...]]:
    return set(map(tuple, x.tolist()))


def test_validation_is_judged_on_the_validation_part(configure: Configure) -> None:
    data = {"validation_fraction": 0.3}
    judged = build_federation(configure(data=data, federation={"evaluate_on": "validation"}))
    final = build_federation(configure(data=data))
    without = build_federation(configure())
    for validating, testing, plain in zip(judged.clients, final.clients, without.clients, strict=True):
        assert torch.equal(validating.train.x, testing.train.x)
        assert torch.equal(testing.test.x, plain.test.x)
        assert rows(validating.test.x) | rows(validating.train.x) == rows(plain.train.x)
        assert not rows(validating.test.x) & rows(testing.test.x)


def test_the_task_carries_what_the_configuration_says(configure: Configure) -> None:
    federation = build_federation(configure(federation={"label_prior": 0.5, "seed": 7}))
    assert (federation.task.label_prior, federation.seed, federation.task.num_classes) == (0.5, 7, 3)
    assert federation.algorithm == configure().algorithm
    assert not federation.task.model.training


def test_every_round_has_the_pace_of_the_schedule(configure: Configure) -> None:
    federation = build_federation(configure(federation={"schedule": "cosine", "rounds": 4}))
    assert [federation.task_of(t).pace for t in range(4)] == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    steady = build_federation(configure(federation={"rounds": 4}))
    assert [steady.task_of(t).pace for t in range(4)] == [1.0] * 4


def test_the_engine_is_the_one_asked_for(configure: Configure) -> None:
    federation = build_federation(configure())
    assert isinstance(build_engine(configure(), federation), Serial)
    three = build_engine(configure(engine={"kind": "processes", "workers": 3}), federation)
    every = build_engine(configure(engine={"kind": "processes"}), federation)
    assert isinstance(three, Processes) and three._size == 3
    assert isinstance(every, Processes) and every._size == len(os.sched_getaffinity(0))


def test_the_server_gets_inputs_of_training_examples(configure: Configure) -> None:
    """A quarter of 10, 12, 14 and 16 examples, rounded; nobody trains on them or is judged on them."""
    without = build_federation(configure())
    federation = build_federation(configure(data={"public_fraction": 0.25}))
    assert without.task.public is not None and len(without.task.public) == 0
    assert federation.task.public is not None
    assert [len(c.train.y) for c in federation.clients] == [8, 9, 10, 12]
    gone = torch.cat([b.train.x[len(c.train.x) :] for b, c in zip(without.clients, federation.clients, strict=True)])
    assert torch.equal(federation.task.public, gone)
    for before, after in zip(without.clients, federation.clients, strict=True):
        assert torch.equal(before.test.x, after.test.x)


def test_a_share_that_is_nothing_is_told(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"public_fraction = 0\.01 of each client's training examples is none"):
        build_federation(configure(data={"public_fraction": 0.01}))


def test_the_task_knows_how_many_take_part(configure: Configure) -> None:
    assert build_federation(configure()).task.num_clients == len(NAMES)


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


def test_a_federation_has_its_new_clients_last(configure: Configure) -> None:
    data = {"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5, 5.0], "public_fraction": 0.2}
    config = configure(data={**data, "validation_fraction": 0.3}, federation={"evaluate_on": "validation"})
    federation = build_federation(config)
    dataset = load(config.data.dataset)
    training, *new = deal_groups(dataset, config.data, seed=0)
    assert federation.task.num_clients == 3 and list(federation.training) == [0, 1, 2]
    splits = {name: part for group in (training, *new) for name, part in group.splits.items()}
    assert [client.name for client in federation.clients] == list(splits)
    for client, part in zip(federation.clients, splits.values(), strict=True):
        assert torch.equal(client.train.x, dataset.x[torch.from_numpy(part.train)])
        assert torch.equal(client.test.y, dataset.y[torch.from_numpy(part.validation)])
    names = [client.name for client in federation.clients]
    alphas = alphas_of_new(config.data, 3)
    assert alphas == {3: 0.5, 4: 0.5, 5: 5.0, 6: 5.0}
    assert all(names[k].startswith(f"new-{alpha}-") for k, alpha in alphas.items())
    public = sum(len(part.public) for part in training.splits.values())
    assert federation.task.public is not None and len(federation.task.public) == public


def test_new_clients_without_enough_examples_are_told(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"data.new_clients = 30: 30 clients x 2 min_examples need 60 examples of 21"):
        build_federation(configure(data={"partition": "size", "clients": 2, "new_clients": 30}))


def test_new_clients_of_natural_ones_are_refused(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"data.new_clients = 2: .* natural partition is not: name another"):
        build_federation(configure(data={"new_clients": 2}))


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sites with 24 small photographs each."""
    pytest.importorskip("imagecorruptions", exc_type=ImportError)
    monkeypatch.setenv("LRBPFL_DATA", str(tmp_path / "data"))
    (tmp_path / "sites").mkdir()
    for name in ("north", "south"):
        rng = numpy_generator(0, name)
        x = rng.integers(60, 190, size=(24, 3, 32, 32), dtype=np.uint8)
        np.savez(tmp_path / "sites" / f"{name}.npz", x=x, y=np.arange(24) % 3)
    return tmp_path / "sites"


def test_all_images_of_a_client_are_corrupted_in_one_way(photographs: Path, configure: Configure) -> None:
    """Training, validation, test and public parts; and no image differently when the parts change."""
    data = {"dataset": str(photographs), "corruptions": True, "public_fraction": 0.25, "validation_fraction": 0.25}
    config = configure(data=data)
    federation = build_federation(config)
    judged = build_federation(configure(data=data, federation={"evaluate_on": "validation"}))
    fewer = build_federation(configure(data={**data, "train_fraction": 0.2}))
    dataset = load(str(photographs))
    pairs = deal_corruptions(2, seed=0)
    (group,) = deal_groups(dataset, config.data, seed=0)
    assert group.corruptions == pairs
    expected = torch.cat([corrupt(dataset.x[24 * k : 24 * k + 24], pairs[k], 0) for k in range(2)])
    for k, part in enumerate(group.splits.values()):
        assert torch.equal(federation.clients[k].train.x, expected[torch.from_numpy(part.train)])
        assert torch.equal(federation.clients[k].test.x, expected[torch.from_numpy(part.test)])
        assert torch.equal(judged.clients[k].test.x, expected[torch.from_numpy(part.validation)])
        own = {bytes(image.numpy()) for image in expected[24 * k : 24 * k + 24]}
        assert {bytes(image.numpy()) for image in fewer.clients[k].test.x} <= own
    public = torch.from_numpy(np.concatenate([part.public for part in group.splits.values()]))
    assert federation.task.public is not None and torch.equal(federation.task.public, expected[public])
    assert torch.equal(load(str(photographs)).x, dataset.x)


def test_new_clients_have_corruptions_of_their_own(photographs: Path, configure: Configure) -> None:
    data = {"dataset": str(photographs), "corruptions": True, "partition": "size", "clients": 2}
    config = configure(data={**data, "new_clients": 2, "new_alpha": [0.5, 5.0], "new_fraction": 0.5})
    dataset = load(str(photographs))
    groups = deal_groups(dataset, config.data, seed=0)
    pairs = deal_corruptions(4, seed=0)
    assert [group.corruptions for group in groups] == [pairs[:2], pairs[2:], pairs[2:]]
    federation = build_federation(config)
    parts = [part for group in groups for part in group.splits.values()]
    for client, part, pair in zip(federation.clients, parts, [*pairs, *pairs[2:]], strict=True):
        own = torch.from_numpy(np.sort(np.concatenate(part)))
        expected = torch.zeros_like(dataset.x)
        expected[own] = corrupt(dataset.x[own], pair, 0)
        assert torch.equal(client.train.x, expected[torch.from_numpy(part.train)])


def test_more_clients_than_corruptions_are_refused(digits: Dataset) -> None:
    images = digits._replace(x=torch.zeros(1797, 3, 32, 32, dtype=torch.uint8))
    section = DataSection(partition="size", clients=50, corruptions=True, new_clients=8)
    with pytest.raises(BadInput, match="57 different pairs of kind and severity for 58 clients"):
        deal_groups(images, section, seed=0)
