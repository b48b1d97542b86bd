"""A folder of images, ``client/class/picture.png``, and pictures that Pillow has opened already.

Pillow comes with the extra ``images``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lrbpfl.data.clients import Part, assemble
from lrbpfl.data.datasets import Dataset
from lrbpfl.errors import BadInput

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
GREY, COLOUR = ("1", "L"), ("RGB", "P", "CMYK", "YCbCr", "HSV", "LAB")
Pixels = npt.NDArray[np.uint8]


def picture_files(path: Path) -> Iterator[Path]:
    """The images anywhere below the folder, hidden ones aside."""
    for file in sorted(path.rglob("*")):
        hidden = any(piece.startswith(".") for piece in file.relative_to(path).parts)
        if file.suffix.lower() in SUFFIXES and not hidden and not file.is_dir():
            if not file.is_file():  # a link that leads nowhere, or a pipe
                raise BadInput(f"{file} is no file that can be read: mend it, or remove it")
            yield file


def load_images(path: Path) -> Dataset:
    """Images (channels, height, width) in uint8, grey or RGB as they are; classes are the names of the folders."""
    shelves: dict[str, list[tuple[str, Path]]] = {}
    for file in picture_files(path):
        place = file.relative_to(path).parts
        if len(place) != 3:
            raise BadInput(f"{file} must lie two folders below {path}: the client's, and in it the class's")
        shelves.setdefault(place[0], []).append((place[1], file))
    parts, first = [], None
    for client, pictures in shelves.items():
        x = []
        for _, file in pictures:
            x.append(_read(file))
            first = first or (file, x[0].shape)
            if x[-1].shape != first[1]:
                found, expected = _words(x[-1].shape), f"{first[0]} is {_words(first[1])}"
                raise BadInput(f"{file} is {found}, and {expected}: all images must have one size, grey or in colour")
        parts.append(Part(client, np.stack(x), np.array([label for label, _ in pictures])))
    return assemble(path.resolve().name, parts)


def _words(shape: tuple[int, ...]) -> str:
    return f"{shape[2]} x {shape[1]} {'grey' if shape[0] == 1 else 'in colour'}"


def _read(file: Path) -> Pixels:
    try:
        from PIL import Image
    except ImportError:
        raise BadInput(f"{file} needs Pillow to be read: pip install 'lrbpfl[images]'") from None
    try:
        with Image.open(file) as image:
            image.load()
            return pixels(image, str(file))
    except BadInput:
        raise
    except Exception as error:  # whatever a decoder trips over: it is about this file
        raise BadInput(f"{file} cannot be read as an image ({error or type(error).__name__})") from None


def is_picture(cell: Any) -> bool:
    """Whether this is an image that Pillow has opened."""
    return hasattr(cell, "getbands") and hasattr(cell, "convert")


def pixels(image: Any, where: str) -> Pixels:
    """A Pillow image as (channels, height, width): one channel if it is grey, else three, turned as its camera says.

    Refused, because a conversion would lose something in silence: more than eight bits, and transparency.
    """
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema() == (255, 255):
        image = image.convert("L" if image.mode == "LA" else "RGB")
    if image.mode in ("LA", "RGBA", "PA", "La", "RGBa") or "transparency" in image.info:
        raise BadInput(f"{where} is partly transparent, and images must be grey or RGB: put it on a background")
    if image.mode not in GREY + COLOUR:
        raise BadInput(f"{where} has pixels of mode {image.mode!r}, and images must be grey or RGB with eight bits")
    array = np.asarray(image.convert("L" if image.mode in GREY else "RGB"))
    return np.ascontiguousarray(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))
