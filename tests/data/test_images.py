"""Folders of images are read as they look, and refused where a conversion would lose something."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from lrbpfl.data import load
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator


def draw(
    folder: Path, client: str, label: str, name: str, mode: str = "RGB", size: tuple[int, int] = (6, 4)
) -> Image.Image:
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = numpy_generator(0, client, label, name).integers(256, size=(*size[::-1], *channels), dtype=np.uint8)
    image = Image.fromarray(pixels)
    (folder / client / label).mkdir(parents=True, exist_ok=True)
    image.save(folder / client / label / name)
    return image


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_clients_and_classes_are_folders(tmp_path: Path, mode: str) -> None:
    drawn = [draw(tmp_path, *place, mode) for place in (("b2", "yes", "0.png"), ("b2", "no", "1.PNG"))]
    drawn += [draw(tmp_path, "b10", "no", f"{i}.png", mode) for i in range(2)]
    (tmp_path / "b2" / "notes.txt").write_text("no image")
    (tmp_path / "b2" / "no" / "._1.png").write_text("no image either")
    dataset = load(str(tmp_path))
    assert dataset.client_names == ("b2", "b10") and dataset.class_names == ("no", "yes")
    assert dataset.x.dtype == torch.uint8 and dataset.x.shape == (4, 1 if mode == "L" else 3, 4, 6)
    assert dataset.y.tolist() == [0, 1, 0, 0]
    expected: npt.NDArray[np.uint8] = np.asarray(drawn[1]) if mode == "L" else np.asarray(drawn[1]).transpose(2, 0, 1)
    assert np.array_equal(dataset.x[0].numpy().squeeze(), expected)


def test_images_are_turned_as_their_camera_says(tmp_path: Path) -> None:
    image = draw(tmp_path, "a", "no", "0.png", "L")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(tmp_path / "a" / "no" / "0.png", exif=exif)
    draw(tmp_path, "a", "no", "1.png", "L", (4, 6))
    assert np.array_equal(load(str(tmp_path)).x[0, 0].numpy(), np.rot90(np.asarray(image), -1))


def test_images_that_differ_are_named(tmp_path: Path) -> None:
    draw(tmp_path, "a", "no", "0.png")
    draw(tmp_path, "a", "yes", "1.png", size=(6, 5))
    with pytest.raises(BadInput, match=r"1\.png is 6 x 5 in colour, and .*0\.png is 6 x 4 in colour"):
        load(str(tmp_path))
    draw(tmp_path, "a", "yes", "1.png", "L")
    with pytest.raises(BadInput, match=r"1\.png is 6 x 4 grey"):
        load(str(tmp_path))
    draw(tmp_path, "a", "yes", "1.png", "RGBA")
    with pytest.raises(BadInput, match=r"1\.png is partly transparent"):
        load(str(tmp_path))
    Image.fromarray(np.full((4, 6), 40_000, np.uint16)).save(tmp_path / "a" / "yes" / "1.png")
    with pytest.raises(BadInput, match=r"1\.png has pixels of mode 'I;16'"):
        load(str(tmp_path))
    (tmp_path / "a" / "yes" / "1.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"1\.png cannot be read as an image"):
        load(str(tmp_path))
    (tmp_path / "a" / "yes" / "1.png").rename(tmp_path / "a" / "1.png")
    with pytest.raises(BadInput, match=r"1\.png must lie two folders below"):
        load(str(tmp_path))


def test_a_picture_beside_the_clients_files_is_none_of_theirs(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.eye(2), y=[0, 1])
    Image.new("L", (3, 3)).save(tmp_path / "plot.png")
    assert load(str(tmp_path)).client_names == ("a",)
    draw(tmp_path, "b", "no", "0.png")
    with pytest.raises(BadInput, match=r"holds \.npz and image files"):
        load(str(tmp_path))
