"""Corrupted images (Hendrycks and Dietterich 2019): 19 kinds at three severities, a pair of its own for each client.

The 57 pairs are those of pFedGP's noisy experiment (Achituve et al. 2021), which the LR-BPFL paper repeats.
"""

import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lrbpfl.data.datasets import Dataset, default_root
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression", "speckle_noise",
    "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
SEVERITIES = (3, 4, 5)  # of 1 to 5
SMALLEST = 32  # pixels on each side, below which the package refuses an image
OWN_SEED = ("impulse_noise", "glass_blur")  # these take a seed; the others draw from NumPy's global state
Images = npt.NDArray[np.uint8]


class Corruption(NamedTuple):
    """What happens to all images of one client."""

    kind: str
    severity: int


PAIRS = tuple(Corruption(kind, severity) for kind, severity in product(KINDS, SEVERITIES))


def deal_corruptions(clients: int, seed: int) -> list[Corruption]:
    """A different pair for each client; those of the first clients do not depend on how many follow."""
    if clients > len(PAIRS):
        raise BadInput(f"data.corruptions has {len(PAIRS)} different pairs of kind and severity for {clients} clients")
    return [PAIRS[i] for i in numpy_generator(seed, "corruptions").permutation(len(PAIRS))[:clients]]


def check_images(dataset: Dataset) -> None:
    """Refuse what cannot be corrupted."""
    shape = tuple(dataset.x.shape[1:])
    if dataset.x.dtype != torch.uint8 or len(shape) != 3 or shape[0] != 3 or min(shape[1:]) < SMALLEST:
        needed = f"uint8 images (3, height, width) of at least {SMALLEST} x {SMALLEST} pixels"
        raise BadInput(f"data.corruptions needs {needed}, and {dataset.name!r} holds {dataset.x.dtype} {shape}")


def corrupt(x: Tensor, corruption: Corruption, seed: int) -> Tensor:
    """The images (n, 3, height, width) after the corruption; stored below the data root, and computed only once."""
    function = _function()
    path = default_root() / "corrupted" / f"{_key(x, corruption, seed)}.npz"
    images = _stored(path, tuple(x.shape))
    if images is None:
        images = _computed(function, x.numpy(), corruption, seed)
        with suppress(OSError):  # a place that cannot be written costs time, not the run
            _store(path, images)
    return torch.from_numpy(images)


def _function() -> Callable[..., Any]:
    """The function that corrupts one image, from a package that is not always there."""
    try:
        from imagecorruptions import corrupt as function
    except ImportError as error:
        raise BadInput(f"data.corruptions needs another package: install lrbpfl[corrupt] ({error})") from None
    found: Callable[..., Any] = function
    return found


def _computed(function: Callable[..., Any], x: Images, corruption: Corruption, seed: int) -> Images:
    """Every image with a seed of its own."""
    kind, severity = corruption
    seeds = numpy_generator(seed, "corrupt", kind, severity).integers(2**32, size=len(x))
    images = np.empty_like(x)
    with _global_state_kept():
        for i, own in enumerate(seeds.tolist()):
            np.random.seed(own)
            options = {"seed": own} if kind in OWN_SEED else {}
            image = np.ascontiguousarray(x[i].transpose(1, 2, 0))
            images[i] = function(image, corruption_name=kind, severity=severity, **options).transpose(2, 0, 1)
    return images


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """NumPy's global random state is afterwards what it was before."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


def _key(x: Tensor, corruption: Corruption, seed: int) -> str:
    """A hash of everything that decides the corrupted images."""
    described = (tuple(x.shape), corruption.kind, corruption.severity, seed, version("imagecorruptions-imaug"))
    digest = hashlib.blake2b(repr(described).encode(), digest_size=16)
    digest.update(x.numpy().tobytes())
    return digest.hexdigest()


def _stored(path: Path, shape: tuple[int, ...]) -> Images | None:
    """The images of a file, or None if it is not there or damaged."""
    try:
        with path.open("rb") as file:
            images: npt.NDArray[Any] = np.load(file, allow_pickle=False)["x"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return images if images.dtype == np.uint8 and images.shape == shape else None


def _store(path: Path, images: Images) -> None:
    """Write aside under a name nobody else uses, then rename: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as aside:
        np.savez(Path(aside) / path.name, x=images)
        (Path(aside) / path.name).replace(path)
