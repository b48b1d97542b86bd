"""Rows of different clients together: each is answered as by its own model alone."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.core.masks import Factors
from lrbpfl.personal.model import PersonalModel, load
from lrbpfl.serving import batching, masked
from lrbpfl.serving.answers import Question, answers
from lrbpfl.serving.shelf import shelf

from .conftest import FEATURES, NAMES, Written, rows

IMAGE = (1, 8, 8)
LR_BPFL: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("mlp", (FEATURES,), {"max_rank": 3, "ranks": "printed", "predict_samples": 3}),
    ("cnn", IMAGE, {}),
    ("cnn", IMAGE, {"mask_layers": "all", "predict_samples": 2}),
    ("resnet", IMAGE, {}),
]


def check(folder: Path, shape: tuple[int, ...] = (FEATURES,), most: int = 40) -> None:
    """Mixed rows, one client's so many that it goes alone, against every client's own file."""
    x = rows(most + 5, "asked", shape=shape)
    owners = ["north", "south", "north", "east", "south"] + ["east"] * most
    found = answers(shelf(folder).models, [Question(name, row.tolist()) for name, row in zip(owners, x, strict=True)])
    for name in NAMES:
        at = [i for i, owner in enumerate(owners) if owner == name]
        expected = load(folder / f"{name}.safetensors").predict(x[at])
        for place, i in enumerate(at):
            got = found[i]
            assert got.client == name
            assert got.label == expected.label[place]
            assert list(got.probability) == list(expected.classes)
            np.testing.assert_allclose(list(got.probability.values()), expected.probability[place], atol=1e-5)
            for part in ("total", "aleatoric", "epistemic"):
                assert getattr(got, part) == pytest.approx(getattr(expected, part)[place], abs=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_mixed_rows_are_answered_as_by_each_client_alone(name: str, written: Written) -> None:
    check(written(name))


@pytest.mark.parametrize(("model", "shape", "fields"), LR_BPFL)
def test_so_they_are_under_masks_of_every_kind(
    model: str, shape: tuple[int, ...], fields: dict[str, Any], written: Written
) -> None:
    check(written("lr-bpfl", model, shape, **fields), shape, most=6)


def test_pieces_change_nothing(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "NUMBERS", 1)
    check(written("lr-bpfl"), most=3)


@pytest.mark.parametrize("name", ["lr-bpfl", "fedavg", "fedbe"])
def test_what_has_a_network_in_common_takes_one_pass(
    name: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = shelf(written(name)).models

    def alone(self: PersonalModel, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("asked alone")

    monkeypatch.setattr(PersonalModel, "samples", alone)
    found = answers(models, [Question(owner, [0.5] * FEATURES) for owner in NAMES])
    assert len({tuple(one.probability.values()) for one in found}) == len(NAMES)


def test_closed_ranks_count_for_nothing() -> None:
    """A client of rank 1 beside one of rank 2: each mask is the product of the client's own factors."""
    rng = torch.Generator().manual_seed(0)
    drawn = [{"w": Factors(*(torch.randn(5, rank, size, generator=rng) for size in (3, 4)))} for rank in (2, 1)]
    Q, R = masked.side_by_side(drawn)["w"]
    assert Q.shape == (2, 5, 2, 3)
    for k, one in enumerate(drawn):
        torch.testing.assert_close(Q[k].mT @ R[k], one["w"].Q.mT @ one["w"].R)


def test_a_client_with_many_rows_goes_alone(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    models = shelf(written("lr-bpfl")).models
    few = batching.FEW // 2
    alone: list[str] = []
    own = PersonalModel.samples

    def noted(self: PersonalModel, x: torch.Tensor) -> torch.Tensor:
        alone.append(self.client)
        return own(self, x)

    monkeypatch.setattr(PersonalModel, "samples", noted)
    counts = {"north": few, "south": few + 1, "east": 1}
    batching.samples([batching.Asked.of(models[name], rows(n)) for name, n in counts.items()])
    assert alone == ["south"]


def test_several_threads_do_not_mix_networks(written: Written) -> None:
    """Clients with networks of their own in one template, whose parameters are put in place for each call."""
    models = shelf(written("local", "cnn", IMAGE, min_steps=1)).models
    x = rows(4, shape=IMAGE)
    asked = [[Question(name, row.tolist()) for row in x] for name in NAMES * 10]
    expected = {name: answers(models, [Question(name, row.tolist()) for row in x]) for name in NAMES}
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda rows: answers(models, rows), asked):
            assert found == expected[found[0].client]
