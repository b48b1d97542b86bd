"""Corrupted images: the package's own, the same bits for the same seed, computed once, and nothing else disturbed."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lrbpfl.data import Corruption, Dataset, check_images, corrupt, corruptions, deal_corruptions, load
from lrbpfl.data.corruptions import KINDS, PAIRS, SEVERITIES
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

FIXED = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"}
FIXED |= {"saturate"}  # these draw nothing
Fresh = Callable[..., Tensor]


def photographs(n: int = 2, height: int = 32, width: int = 40) -> Tensor:
    """Smooth coloured slopes with some noise: black and white pixels are rare."""
    rng = numpy_generator(0, "photographs")
    rows, columns = np.mgrid[:height, :width]
    slopes = 60 + 2 * rows + columns + np.array([0, 20, 40])[:, None, None]
    return torch.from_numpy((slopes + rng.integers(40, size=(n, 3, height, width))).astype(np.uint8))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LRBPFL_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "corrupted"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fresh:
    """`corrupt` with nothing stored yet."""
    pytest.importorskip("imagecorruptions", exc_type=ImportError)
    count = iter(range(100))

    def call(x: Tensor, corruption: Corruption, seed: int) -> Tensor:
        monkeypatch.setenv("LRBPFL_DATA", str(tmp_path / f"fresh-{next(count)}"))
        return corrupt(x, corruption, seed)

    return call


def test_the_kinds_are_those_of_the_package() -> None:
    package = pytest.importorskip("imagecorruptions", exc_type=ImportError)
    assert set(KINDS) == set(package.get_corruption_names("all"))


def test_clients_get_different_pairs_by_the_seed() -> None:
    assert len(set(PAIRS)) == 57
    dealt = deal_corruptions(57, seed=3)
    assert set(dealt) == set(PAIRS)
    assert deal_corruptions(20, seed=3) == dealt[:20]
    assert deal_corruptions(57, seed=4) != dealt
    with pytest.raises(BadInput, match="57 different pairs of kind and severity for 58 clients"):
        deal_corruptions(58, seed=3)


def states() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [name, np.asarray(keys).tolist(), rest, random.getstate(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_alone_decides_and_nothing_else_is_disturbed(kind: str, fresh: Fresh) -> None:
    x, before = photographs(), states()
    clean = x.clone()
    one = fresh(x, Corruption(kind, 3), 1)
    assert states() == before
    assert torch.equal(x, clean)
    assert one.dtype == torch.uint8 and one.shape == x.shape
    assert all(float((one[i] != x[i]).float().mean()) > 0.01 for i in range(len(x)))
    np.random.seed(5)
    assert torch.equal(fresh(x, Corruption(kind, 3), 1), one)
    assert torch.equal(fresh(x, Corruption(kind, 3), 2), one) == (kind in FIXED)
    twins = fresh(x[:1].expand(2, -1, -1, -1), Corruption(kind, 3), 1)
    assert torch.equal(twins[0], twins[1]) == (kind in FIXED)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_is_what_its_formula_says(severity: int, fresh: Fresh) -> None:
    """Every channel moves towards its mean; an image with its axes exchanged would have other means."""
    x = photographs()
    share = {3: 0.2, 4: 0.1, 5: 0.05}[severity]
    means = x.double().mean((2, 3), keepdim=True)
    expected = (means + share * (x - means)).floor()
    found = fresh(x, Corruption("contrast", severity), 0)
    assert float((found - expected).abs().max()) <= 1  # they round differently where a product is almost whole
    assert float((found == expected).float().mean()) > 0.99


def test_the_noise_has_the_size_that_its_severity_says(fresh: Fresh) -> None:
    x = torch.full((4, 3, 32, 32), 128, dtype=torch.uint8)
    noise = fresh(x, Corruption("gaussian_noise", 3), 0).double() / 255 - 128 / 255
    assert float(noise.std()) == pytest.approx(0.18, rel=0.05)


def test_what_was_computed_is_not_computed_again(fresh: Fresh, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBPFL_DATA", str(root.parent))
    x, fog = photographs(), Corruption("fog", 4)
    first = corrupt(x, fog, 1)
    assert len(list(root.iterdir())) == 1
    for other in ((x + 1, fog, 1), (x, Corruption("fog", 5), 1), (x, Corruption("snow", 4), 1), (x, fog, 2)):
        corrupt(*other)
    assert len(list(root.iterdir())) == 5
    monkeypatch.setattr(corruptions, "_computed", lambda *_: pytest.fail("it was computed again"))
    assert torch.equal(corrupt(x, fog, 1), first)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another shape"])
def test_a_damaged_file_is_replaced(damage: str, fresh: Fresh, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBPFL_DATA", str(root.parent))
    x, fog = photographs(), Corruption("fog", 4)
    first = corrupt(x, fog, 1)
    (file,) = root.iterdir()
    whole = file.read_bytes()
    flipped = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    if damage == "another shape":
        np.savez(file, x=first[:1].numpy())
    else:
        file.write_bytes({"cut": whole[:3000], "flipped": flipped, "empty": b""}[damage])
    assert torch.equal(corrupt(x, fog, 1), first)
    with np.load(file, allow_pickle=False) as stored:
        assert np.array_equal(stored["x"], first.numpy())


def test_nothing_half_written_is_left(fresh: Fresh, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBPFL_DATA", str(root.parent))

    def dies(path: Path, **arrays: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", dies)
    with pytest.raises(KeyboardInterrupt):
        corrupt(photographs(), Corruption("fog", 4), 1)
    assert list(root.iterdir()) == []


def test_a_place_that_cannot_be_written_costs_only_time(
    fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LRBPFL_DATA", str(tmp_path / "file"))
    x, fog = photographs(), Corruption("fog", 4)
    assert torch.equal(corrupt(x, fog, 1), fresh(x, fog, 1))


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (torch.zeros(2, 3, 32, 32), r"torch.float32 \(3, 32, 32\)"),
        (torch.zeros(2, 1, 32, 32, dtype=torch.uint8), r"torch.uint8 \(1, 32, 32\)"),
        (torch.zeros(2, 3, 32, 31, dtype=torch.uint8), r"torch.uint8 \(3, 32, 31\)"),
        (torch.zeros(2, 3, dtype=torch.uint8), r"torch.uint8 \(3,\)"),
    ],
)
def test_what_is_no_photograph_is_refused(x: Tensor, found: str) -> None:
    with pytest.raises(BadInput, match=rf"uint8 images .* at least 32 x 32 pixels, and 'mine' holds {found}"):
        check_images(Dataset("mine", x, torch.zeros(2, dtype=torch.int64), 1))


def test_photographs_are_accepted_and_digits_are_not() -> None:
    check_images(Dataset("mine", photographs(), torch.zeros(2, dtype=torch.int64), 1))
    with pytest.raises(BadInput, match="'digits'"):
        check_images(load("digits"))


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(BadInput, match=r"install lrbpfl\[corrupt\]"):
        corrupt(photographs(), Corruption("fog", 4), 1)
