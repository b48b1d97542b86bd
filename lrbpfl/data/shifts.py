"""Clients that differ in what their inputs look like, or in what their labels mean, whoever got which example."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from lrbpfl.data.partition import Indices
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

GREY = 127.5  # contrast is taken about it
BRIGHTNESS = 64.0  # levels of 255 at strength 1, about the spread of a photograph's pixels
ROTATION = 30.0  # degrees at strength 1


def shift_inputs(x: Tensor, parts: Sequence[Indices], *, strength: float, seed: int, name: str) -> Tensor:
    """The inputs (n, *input) with those of each client, given by their indices, changed in a way of its own.

    Client k draws what happens to all its inputs from the address (seed, name, k).  float32 inputs are scaled and
    moved feature by feature, uint8 images become brighter or darker, with more or less contrast, and turned.
    """
    check_inputs(x)
    unit, shifted = magnitude(x), x.clone()
    for k, part in enumerate(parts):
        own, rng = torch.from_numpy(part), numpy_generator(seed, name, k)
        if x.dtype == torch.uint8:
            shifted[own] = shift_images(x[own], *(strength * rng.standard_normal(3)).tolist())
        else:
            scale, move = torch.from_numpy(strength * rng.standard_normal((2, *x.shape[1:])))
            shifted[own] = (x[own] * scale.exp() + unit * move).float()
    return shifted


def check_inputs(x: Tensor) -> None:
    """Refuse inputs that cannot be shifted: whole numbers that are no images."""
    if x.dtype == torch.uint8 and x.ndim != 4:
        needed = "float32 inputs or uint8 images (channels, height, width)"
        raise BadInput(f"data.shift = 'features' needs {needed}, and these are {x.dtype} {tuple(x.shape[1:])}")


def magnitude(x: Tensor) -> float:
    """The power of ten nearest to the spread of a feature: 1 for data of order one.

    The spread is the root of the mean variance over the features of all examples (n, *input).
    """
    spread = x.double().var(0, correction=0).mean().sqrt().item() if x.is_floating_point() else 0.0
    return float(10.0 ** round(math.log10(spread))) if spread else 1.0


def shift_images(x: Tensor, contrast: float, brightness: float, rotation: float) -> Tensor:
    """Images (n, channels, height, width) turned about their middle, then with another contrast and brightness.

    All three are 0 for no change.  What a turn brings in from outside is the image's own mirror.
    """
    height, width = x.shape[2:]
    angle = math.radians(ROTATION * rotation)
    cos, sin = math.cos(angle), math.sin(angle)
    # Coordinates go from -1 to 1 along both sides, whatever their lengths.
    turn = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = functional.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    turned = functional.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False)
    toned = (turned - GREY) * math.exp(contrast) + GREY + BRIGHTNESS * brightness
    return toned.round().clamp(0, 255).to(torch.uint8)


def shift_labels(y: Tensor, parts: Sequence[Indices], *, num_classes: int, groups: int, seed: int) -> Tensor:
    """The labels (n,) with those of each client, given by their indices, as its group has them.

    Client k is in group k mod ``groups``.
    """
    tables, shifted = torch.from_numpy(permutations(num_classes, groups, seed)), y.clone()
    for k, part in enumerate(parts):
        own = torch.from_numpy(part)
        shifted[own] = tables[k % groups][y[own]]
    return shifted


def permutations(num_classes: int, groups: int, seed: int) -> npt.NDArray[np.int64]:
    """What each group calls each class, (groups, num_classes); group 0 keeps the labels.

    Two groups: the second swaps 0 and 1, 2 and 3, ...; the last of an odd number of classes stays.  More: steps round a
    ring of all classes in random order, so that any two groups differ in every class.
    """
    if groups > num_classes:
        what = f"data.concept_groups = {groups}: there are {num_classes} classes"
        raise BadInput(f"{what}, and at most as many groups have labels that differ throughout")
    labels = np.arange(num_classes)
    if groups == 2:
        swapped = labels ^ 1
        return np.stack([labels, np.where(swapped < num_classes, swapped, labels)])
    ring = numpy_generator(seed, "concept").permutation(num_classes)
    place = np.argsort(ring)
    return np.stack([ring[(place + group) % num_classes] for group in range(groups)])
