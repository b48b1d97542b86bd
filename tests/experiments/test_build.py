"""From a configuration to clients, task and engine, or to a sentence about what is wrong."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lrbpfl.data import corrupt, deal_corruptions, load
from lrbpfl.engines.jobs import Job
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import alphas_of_new, build, build_engine, build_setup
from lrbpfl.experiments.config import parse
from lrbpfl.experiments.deal import deal_groups
from lrbpfl.rng import numpy_generator
from lrbpfl.states import Memory
from tests.experiments.conftest import NAMES, Configure


def test_a_folder_brings_its_clients_and_their_names(configure: Configure, folder: Path) -> None:
    setup = build_setup(configure(data={"clients": 99}))  # a natural partition brings its own
    assert tuple(client.name for client in setup.clients) == NAMES
    assert [len(client.train.y) for client in setup.clients] == [10, 12, 14, 16]
    for client in setup.clients:
        with np.load(folder / f"{client.name}.npz") as file:
            mine = torch.cat([client.train.x, client.test.x])
            assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, file["x"].astype(np.float32).tolist()))


def test_a_folder_may_be_dealt_anew(configure: Configure) -> None:
    setup = build_setup(configure(data={"partition": "size", "clients": 3}))
    assert [client.name for client in setup.clients] == ["client-0", "client-1", "client-2"]


def test_digits_have_no_natural_clients() -> None:
    with pytest.raises(BadInput, match=r"data.partition = 'natural': dataset 'digits' does not say"):
        build_setup(parse({"data": {"dataset": "digits", "partition": "natural"}}))


def test_a_cohort_larger_than_the_federation_is_refused(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"federation.cohort = 5: there are only 4 clients"):
        build_setup(configure(federation={"cohort": 5}))


def test_a_client_with_one_example_is_named(configure: Configure, tmp_path: Path) -> None:
    for name, n in (("anna", 4), ("bert", 1)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((n, 3)), y=np.arange(n) % 2)
    with pytest.raises(BadInput, match=r"^client 'bert' has one example only, which cannot be split"):
        build_setup(configure(data={"dataset": str(tmp_path)}))


@pytest.mark.parametrize("device", ["cuda", "meta", "", "toaster", "hpu", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(device: str, configure: Configure) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(BadInput) as caught:
        build_setup(configure(engine={"device": device}))
    assert str(caught.value).startswith(f"engine.device = {device!r} cannot be used here: ")
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_fit_the_inputs_is_refused(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"model 'cnn' takes images"):
        build_setup(configure(federation={"model": "cnn"}))


def rows(x: Tensor) -> set[tuple[float, ...]]:
    return set(map(tuple, x.tolist()))


def test_validation_is_judged_on_the_validation_part(configure: Configure) -> None:
    data = {"validation_fraction": 0.3}
    judged = build_setup(configure(data=data, federation={"evaluate_on": "validation"}))
    final = build_setup(configure(data=data))
    without = build_setup(configure())
    for validating, testing, plain in zip(judged.clients, final.clients, without.clients, strict=True):
        assert torch.equal(validating.train.x, testing.train.x)
        assert torch.equal(testing.test.x, plain.test.x)
        assert rows(validating.test.x) | rows(validating.train.x) == rows(plain.train.x)
        assert not rows(validating.test.x) & rows(testing.test.x)


def test_the_task_carries_what_the_configuration_says(configure: Configure) -> None:
    federation = {"label_prior": 0.5, "seed": 7, "precision": "bf16", "threads": 2}
    setup = build_setup(configure(federation=federation))
    assert (setup.precision, setup.threads) == ("bf16", 2)
    assert (setup.task.label_prior, setup.seed, setup.task.num_classes) == (0.5, 7, 3)
    assert setup.algorithm == configure().algorithm
    assert not setup.task.model.training


def test_every_round_has_the_pace_of_the_schedule(configure: Configure) -> None:
    setup = build_setup(configure(federation={"schedule": "cosine", "rounds": 4}))
    assert [setup.task_of(t).pace for t in range(4)] == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    steady = build_setup(configure(federation={"rounds": 4}))
    assert [steady.task_of(t).pace for t in range(4)] == [1.0] * 4


def test_the_engine_is_the_one_asked_for(configure: Configure) -> None:
    setup = build_setup(configure())
    assert isinstance(build_engine(configure(), setup, Memory()), Serial)
    three = build_engine(configure(engine={"kind": "processes", "workers": 3, "deadline": 7.5}), setup, Memory())
    every = build_engine(configure(engine={"kind": "processes"}), setup, Memory())
    assert isinstance(three, Processes) and three._size == 3
    assert three._deadlines.limit(Job(0, "update", k=0, t=0)) == 7.5
    assert isinstance(every, Processes) and every._size == len(os.sched_getaffinity(0))


def test_the_server_gets_inputs_of_training_examples(configure: Configure) -> None:
    """A quarter of 10, 12, 14 and 16 examples, rounded; nobody trains on them or is judged on them."""
    without = build_setup(configure())
    setup = build_setup(configure(data={"public_fraction": 0.25}))
    assert without.task.public is not None and len(without.task.public) == 0
    assert setup.task.public is not None
    assert [len(c.train.y) for c in setup.clients] == [8, 9, 10, 12]
    gone = [rows(b.train.x) - rows(c.train.x) for b, c in zip(without.clients, setup.clients, strict=True)]
    assert rows(setup.task.public) == set().union(*gone)
    for before, after in zip(without.clients, setup.clients, strict=True):
        assert torch.equal(before.test.x, after.test.x)


def test_what_is_kept_to_calibrate_on_trains_nobody(configure: Configure) -> None:
    """A quarter of 10, 12, 14 and 16 examples; nothing is kept unless it is asked for."""
    without = build_setup(configure())
    setup = build_setup(configure(data={"calibration_fraction": 0.25}))
    assert all(client.calibration is None for client in without.clients)
    for before, after, kept in zip(without.clients, setup.clients, [2, 3, 4, 4], strict=True):
        assert after.calibration is not None and len(after.calibration.y) == kept
        assert rows(after.calibration.x) == rows(before.train.x) - rows(after.train.x)
        assert torch.equal(before.test.x, after.test.x)


def test_shifts_reach_clients_and_server(configure: Configure) -> None:
    """Every second of the four clients, in all its parts, has labels 0 and 1 swapped; inputs in their own ways."""
    data = {"calibration_fraction": 0.25, "public_fraction": 0.25}
    plain = build_setup(configure(data=data))
    swapped = build_setup(configure(data={**data, "shift": "concept"}))
    moved = build_setup(configure(data={**data, "shift": "features"}))
    swap = torch.tensor([1, 0, 2])
    for k in range(4):
        for part in ("train", "test", "calibration"):
            before, after, other = (getattr(f.clients[k], part) for f in (plain, swapped, moved))
            assert torch.equal(after.x, before.x) and torch.equal(other.y, before.y)
            assert torch.equal(after.y, swap[before.y] if k % 2 else before.y)
            assert not torch.equal(other.x, before.x)
    assert plain.task.public is not None and swapped.task.public is not None and moved.task.public is not None
    assert torch.equal(swapped.task.public, plain.task.public)
    assert not (moved.task.public == plain.task.public).any()


def test_a_share_that_would_be_nothing_is_one_example_of_each(configure: Configure, tmp_path: Path) -> None:
    setup = build_setup(configure(data={"public_fraction": 0.01}))
    assert setup.task.public is not None and len(setup.task.public) == len(NAMES)
    assert [len(client.train.y) for client in setup.clients] == [9, 11, 13, 15]
    for name in "ab":  # who has a single example for training keeps it
        np.savez(tmp_path / f"{name}.npz", x=np.eye(2), y=[0, 1])
    setup = build_setup(configure(data={"dataset": str(tmp_path), "public_fraction": 0.04}))
    assert setup.task.public is not None and len(setup.task.public) == 2
    assert [len(client.train.y) for client in setup.clients] == [1, 1]


def test_the_task_knows_how_many_take_part(configure: Configure) -> None:
    assert build_setup(configure()).task.num_clients == len(NAMES)


def test_a_federation_has_its_new_clients_last(configure: Configure) -> None:
    data = {"partition": "size", "clients": 3, "new_clients": 2, "new_alpha": [0.5, 5.0], "public_fraction": 0.2}
    config = configure(data={**data, "validation_fraction": 0.3}, federation={"evaluate_on": "validation"})
    setup = build_setup(config)
    dataset = load(config.data.dataset)
    training, *new = deal_groups(dataset, config.data, seed=0)
    assert setup.task.num_clients == 3 and list(setup.training) == [0, 1, 2]
    splits = {name: part for group in (training, *new) for name, part in group.splits.items()}
    assert [client.name for client in setup.clients] == list(splits)
    for client, part in zip(setup.clients, splits.values(), strict=True):
        assert torch.equal(client.train.x, dataset.x[torch.from_numpy(part.train)])
        assert torch.equal(client.test.y, dataset.y[torch.from_numpy(part.validation)])
    names = [client.name for client in setup.clients]
    alphas = alphas_of_new(config.data, 3)
    assert alphas == {3: 0.5, 4: 0.5, 5: 5.0, 6: 5.0}
    assert all(names[k].startswith(f"new-{alpha}-") for k, alpha in alphas.items())
    public = sum(len(part.public) for part in training.splits.values())
    assert setup.task.public is not None and len(setup.task.public) == public


def test_new_clients_without_enough_examples_are_told(configure: Configure) -> None:
    with pytest.raises(BadInput, match=r"data.new_clients = 30: 30 clients x 2 min_examples need 60 examples of 21"):
        build_setup(configure(data={"partition": "size", "clients": 2, "new_clients": 30}))


def test_whole_sites_can_be_new(configure: Configure) -> None:
    plain = {client.name: client for client in build_setup(configure()).clients}
    built = build(configure(data={"new_sites": ["dora", "bert"]}))
    assert [client.name for client in built.setup.clients] == ["anna", "carl", "bert", "dora"]
    assert list(built.setup.training) == [0, 1] and alphas_of_new(built.config.data, 2) == {2: "sites", 3: "sites"}
    for client in built.setup.clients:  # who is new changes nobody's parts
        assert torch.equal(client.train.x, plain[client.name].train.x)
        assert torch.equal(client.test.x, plain[client.name].test.x)


def test_sites_may_be_called_by_numbers() -> None:
    assert parse({"data": {"new_sites": 3}}).data.new_sites == ("3",)
    assert parse({"data": {"new_sites": [3, "b"]}}).data.new_sites == ("3", "b")


def test_the_seed_chooses_which_sites_are_new(configure: Configure) -> None:
    chosen = set()
    for seed in range(8):
        built = build(configure(data={"new_clients": 2}, federation={"seed": seed}))
        sites = built.config.data.new_sites
        assert len(sites) == 2 and [client.name for client in built.setup.clients[2:]] == list(sites)
        again = build(parse(built.config.tables()))  # what is recorded names them
        assert again.config == built.config
        chosen.add(sites)
    assert len(chosen) > 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"new_sites": ["dorra"]},
            r"unknown site in data.new_sites 'dorra' \(did you mean 'dora'\?\); known: anna, bert",
        ),
        ({"new_sites": list(NAMES)}, "data.new_sites names all 4 clients"),
        ({"new_clients": 4}, "data.new_clients = 4: there are 4 clients, and at least one must train"),
        ({"new_sites": ["dora"], "partition": "size"}, "data.new_sites = .* natural clients, and data.partition"),
        ({"new_clients": 2, "new_alpha": 0.5}, "data.new_alpha is about new clients that are dealt by label"),
    ],
)
def test_new_sites_that_cannot_be_are_refused(data: dict[str, Any], words: str, configure: Configure) -> None:
    with pytest.raises(BadInput, match=words):
        build_setup(configure(data=data))


def test_a_cohort_that_nobody_names_is_five_or_all(folder: Path) -> None:
    config = parse({"data": {"dataset": str(folder)}})
    assert build(config).config.federation.cohort == 4
    assert build(parse({})).config.federation.cohort == 5
    with pytest.raises(BadInput, match=r"federation.cohort = 5: there are only 4 clients"):
        build(parse({"data": {"dataset": str(folder)}, "federation": {"cohort": 5}}))


def test_each_client_is_standardised_by_its_training_part(configure: Configure) -> None:
    keys = {"calibration_fraction": 0.2, "public_fraction": 0.2, "new_sites": ["carl"]}
    raw = build_setup(configure(data=keys))
    own = build_setup(configure(data={**keys, "standardise": "client"}))
    for before, after in zip(raw.clients, own.clients, strict=True):
        assert before.scaling is None and after.scaling is not None
        mean, std = before.train.x.double().mean(0), before.train.x.double().std(0, correction=0)
        assert torch.allclose(after.scaling[0].double(), mean) and torch.allclose(after.scaling[1].double(), std)
        for part in ("train", "test", "calibration"):
            x, scaled = getattr(before, part).x, getattr(after, part).x
            assert torch.allclose(scaled.double(), (x.double() - mean) / std, atol=1e-5)
            assert torch.equal(getattr(before, part).y, getattr(after, part).y)
    assert raw.task.public is not None and own.task.public is not None
    assert not torch.equal(raw.task.public, own.task.public)


def test_a_federation_is_standardised_by_the_training_parts_of_those_who_train(configure: Configure) -> None:
    raw = build_setup(configure(data={"new_sites": ["carl"]}))
    pooled = build_setup(configure(data={"new_sites": ["carl"], "standardise": "pooled"}))
    together = torch.cat([raw.clients[k].train.x for k in raw.training]).double()
    mean, std = together.mean(0), together.std(0, correction=0)
    for before, after in zip(raw.clients, pooled.clients, strict=True):  # the new one, too
        assert after.scaling is not None and torch.allclose(after.scaling[0].double(), mean)
        assert torch.allclose(after.test.x.double(), (before.test.x.double() - mean) / std, atol=1e-5)


def test_images_are_not_standardised(configure: Configure, tmp_path: Path) -> None:
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=[0, 1, 0, 1])
    for how in ("client", "pooled"):
        with pytest.raises(BadInput, match=f"data.standardise = '{how}' is for features, and .* holds images"):
            build_setup(configure(data={"dataset": str(tmp_path), "standardise": how}))


def test_remarks_are_about_natural_clients_and_what_trains(configure: Configure, tmp_path: Path) -> None:
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.full((12, 2), 500.0), y=[0, 1] * 6 if name == "a" else [0] * 12)
    single, scale = "client 'b' has examples of a single class", "out of scale"
    data = {"dataset": str(tmp_path)}
    natural, dealt, scaled = (
        " ".join(build(configure(data={**data, **keys})).remarks)
        for keys in ({}, {"partition": "size", "clients": 2}, {"standardise": "pooled"})
    )
    assert single in natural and scale in natural
    assert single not in dealt and scale in dealt
    assert single in scaled and scale not in scaled


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
    setup = build_setup(config)
    judged = build_setup(configure(data=data, federation={"evaluate_on": "validation"}))
    fewer = build_setup(configure(data={**data, "train_fraction": 0.2}))
    dataset = load(str(photographs))
    pairs = deal_corruptions(2, seed=0)
    (group,) = deal_groups(dataset, config.data, seed=0)
    assert group.corruptions == pairs
    expected = torch.cat([corrupt(dataset.x[24 * k : 24 * k + 24], pairs[k], 0) for k in range(2)])
    for k, part in enumerate(group.splits.values()):
        assert torch.equal(setup.clients[k].train.x, expected[torch.from_numpy(part.train)])
        assert torch.equal(setup.clients[k].test.x, expected[torch.from_numpy(part.test)])
        assert torch.equal(judged.clients[k].test.x, expected[torch.from_numpy(part.validation)])
        own = {bytes(image.numpy()) for image in expected[24 * k : 24 * k + 24]}
        assert {bytes(image.numpy()) for image in fewer.clients[k].test.x} <= own
    public = torch.from_numpy(np.concatenate([part.public for part in group.splits.values()]))
    assert setup.task.public is not None and torch.equal(setup.task.public, expected[public])
    assert torch.equal(load(str(photographs)).x, dataset.x)


def test_new_clients_have_corruptions_of_their_own(photographs: Path, configure: Configure) -> None:
    data = {"dataset": str(photographs), "corruptions": True, "partition": "size", "clients": 2}
    config = configure(data={**data, "new_clients": 2, "new_alpha": [0.5, 5.0], "new_fraction": 0.5})
    dataset = load(str(photographs))
    groups = deal_groups(dataset, config.data, seed=0)
    pairs = deal_corruptions(4, seed=0)
    assert [group.corruptions for group in groups] == [pairs[:2], pairs[2:], pairs[2:]]
    setup = build_setup(config)
    parts = [part for group in groups for part in group.splits.values()]
    for client, part, pair in zip(setup.clients, parts, [*pairs, *pairs[2:]], strict=True):
        own = torch.from_numpy(np.sort(np.concatenate(part)))
        expected = torch.zeros_like(dataset.x)
        expected[own] = corrupt(dataset.x[own], pair, 0)
        assert torch.equal(client.train.x, expected[torch.from_numpy(part.train)])
