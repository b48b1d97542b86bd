"""Shifted clients: undone, they are what they were; and no two are shifted alike."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lrbpfl.data import load, permutations, shift_inputs, shift_labels
from lrbpfl.data.partition import Indices
from lrbpfl.data.shifts import BRIGHTNESS, ROTATION, magnitude, shift_images
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator

PARTS = [np.arange(0, 60), np.arange(60, 90)]


def vectors(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(100, 4, generator=generator(0, "vectors"))


def photographs() -> Tensor:
    return torch.randint(256, (100, 3, 8, 8), generator=generator(0, "photographs"), dtype=torch.uint8)


def shifted(
    x: Tensor, strength: float = 0.5, seed: int = 0, name: str = "shift", parts: list[Indices] = PARTS
) -> Tensor:
    return shift_inputs(x, parts, strength=strength, seed=seed, name=name)


@pytest.mark.parametrize("x", [vectors(), photographs()])
def test_strength_zero_is_the_identity(x: Tensor) -> None:
    assert torch.equal(shifted(x, strength=0.0), x)


@pytest.mark.parametrize("x", [vectors(), photographs()])
def test_the_seed_and_the_client_decide(x: Tensor) -> None:
    before, once = x.clone(), shifted(x)
    assert torch.equal(x, before) and once.dtype == x.dtype
    assert torch.equal(shifted(x), once)
    assert not torch.equal(shifted(x, seed=1)[:60], once[:60])
    assert not torch.equal(shifted(x, name="new shift")[:60], once[:60])
    assert torch.equal(once[90:], x[90:])  # nobody's
    alone = shifted(x, parts=PARTS[:1])
    assert torch.equal(alone[:60], once[:60]) and torch.equal(alone[60:], x[60:])
    same = torch.cat([x[:1]] * 100)
    both = shifted(same)
    assert not torch.equal(both[0], both[60]) and torch.equal(both[0], both[59])


def test_features_are_scaled_and_moved_one_by_one() -> None:
    """A line through all examples of a client, for each feature; its slope and height have the spread asked for."""
    x, parts = torch.randn(4000, 5, generator=generator(0, "x")), np.split(np.arange(4000), 400)
    y = shifted(x, strength=0.3, parts=parts)
    a, b = x.view(400, 10, 5), y.view(400, 10, 5)
    slope = (b[:, 1] - b[:, 0]) / (a[:, 1] - a[:, 0])
    height = b[:, 0] - slope * a[:, 0]
    torch.testing.assert_close(slope[:, None] * a + height[:, None], b, rtol=1e-2, atol=1e-2)
    assert slope.log().std().item() == pytest.approx(0.3, rel=0.1)
    assert height.std().item() == pytest.approx(0.3, rel=0.1)
    assert abs(slope.log().mean().item()) < 0.03 and abs(height.mean().item()) < 0.03


@pytest.mark.parametrize(("scale", "unit"), [(1.0, 1.0), (0.5, 1.0), (2.5, 1.0), (250.0, 100.0), (0.004, 0.01)])
def test_moves_have_the_magnitude_of_the_data(scale: float, unit: float) -> None:
    assert magnitude(vectors(scale)) == pytest.approx(unit)


def test_magnitude_is_about_spread_and_not_about_place() -> None:
    assert magnitude(vectors() + 1000) == 1.0
    assert magnitude(torch.full((5, 3), 7.0)) == 1.0
    assert magnitude(load("digits").x) == magnitude(load("speakers").x) == 1.0


def test_images_turn_about_their_middle() -> None:
    """Whole quarters against torch's own turns; where the sides differ, a half and a whole."""
    x = photographs()
    assert torch.equal(shift_images(x, 0.0, 0.0, 90 / ROTATION), torch.rot90(x, 1, (2, 3)))
    wide = x.reshape(100, 3, 4, 16)
    assert torch.equal(shift_images(wide, 0.0, 0.0, 180 / ROTATION), wide.flip(2, 3))
    for same in (0.0, 360 / ROTATION):
        assert torch.equal(shift_images(wide, 0.0, 0.0, same), wide)


def test_a_turn_does_not_distort_an_image_with_unequal_sides() -> None:
    """A dot six pixels right of the middle is, after a quarter turn, six pixels above or below it."""
    x = torch.zeros(1, 1, 21, 41, dtype=torch.uint8)
    x[0, 0, 10, 26] = 200
    places = shift_images(x, 0.0, 0.0, 90 / ROTATION)[0, 0].nonzero().tolist()
    assert places in ([[4, 20]], [[16, 20]])


def test_brightness_and_contrast_of_images() -> None:
    x = torch.tensor([0, 100, 155, 255], dtype=torch.uint8).reshape(1, 1, 2, 2)
    assert shift_images(x, 0.0, 10 / BRIGHTNESS, 0.0).flatten().tolist() == [10, 110, 165, 255]
    assert shift_images(x, 0.0, -10 / BRIGHTNESS, 0.0).flatten().tolist() == [0, 90, 145, 245]
    assert shift_images(x, float(np.log(2)), 0.0, 0.0).flatten().tolist() == [0, 72, 182, 255]
    assert shift_images(x, -50.0, 0.0, 0.0).flatten().tolist() == 4 * [128]


def test_whole_numbers_that_are_no_images_are_refused() -> None:
    with pytest.raises(BadInput, match=r"data.shift = 'features' needs .* these are torch.uint8 \(7,\)"):
        shifted(torch.zeros(100, 7, dtype=torch.uint8))


def test_two_groups_swap_pairs() -> None:
    assert permutations(5, 2, seed=3).tolist() == [[0, 1, 2, 3, 4], [1, 0, 3, 2, 4]]


@pytest.mark.parametrize(("classes", "groups"), [(3, 3), (10, 3), (11, 4), (100, 100)])
def test_more_groups_differ_in_every_class(classes: int, groups: int) -> None:
    tables = permutations(classes, groups, seed=1)
    assert tables[0].tolist() == list(range(classes))
    assert (np.sort(tables, 1) == np.arange(classes)).all()  # a permutation each
    assert all(len(set(column)) == groups for column in tables.T.tolist())
    assert np.array_equal(permutations(classes, groups, seed=1), tables)


def test_the_seed_decides_the_permutations() -> None:
    assert not np.array_equal(permutations(10, 3, seed=1), permutations(10, 3, seed=2))


@pytest.mark.parametrize("groups", [2, 3])
def test_a_permutation_can_be_undone(groups: int) -> None:
    y = torch.arange(90) % 10
    parts = np.split(np.arange(90), 6)
    got = shift_labels(y, parts, num_classes=10, groups=groups, seed=0)
    for k, part in enumerate(parts):
        back = np.argsort(permutations(10, groups, seed=0)[k % groups])
        assert np.array_equal(back[got[part].numpy()], y[part].numpy())
        assert torch.equal(got[part], y[part]) == (k % groups == 0)
    assert torch.equal(y, torch.arange(90) % 10)


def test_more_groups_than_classes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"data.concept_groups = 4: there are 3 classes"):
        permutations(3, 4, seed=0)
