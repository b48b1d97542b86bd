"""One tensor or several, row by row."""

import pytest
import torch

from lrbpfl import trees
from lrbpfl.core.inputs import Inputs, describe, device_of, fault, joined, length, pieces, take

IMAGES = torch.arange(7 * 12, dtype=torch.uint8).reshape(7, 3, 2, 2)
IDS, FEATURES = torch.arange(7 * 4).reshape(7, 4), torch.randn(7, 2)
KINDS: dict[str, Inputs] = {"one": IMAGES, "tuple": (IDS, FEATURES), "dict": {"ids": IDS, "mask": FEATURES}}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stay_together(kind: str) -> None:
    x, places = KINDS[kind], torch.tensor([5, 0, 5])
    assert length(x) == 7 and device_of(x).type == "cpu"
    assert trees.equal(take(x, places), trees.tree_map(lambda part: part[places], x))
    parts = list(pieces(x, 3))
    assert [length(part) for part in parts] == [3, 3, 1] and trees.equal(joined(parts), x)
    assert [length(part) for part in pieces(take(x, places[:0]), 3)] == [0], "as torch.split does"


def test_descriptions() -> None:
    assert describe(IMAGES) == "(3, 2, 2) uint8"
    assert describe((IDS, FEATURES)) == "(4,) int64, (2,) float32"
    assert describe({"ids": IDS, "mask": FEATURES}) == "ids (4,) int64, mask (2,) float32"


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1, 2], "are a list"),
        ((), "hold nothing"),
        ((IDS, (IDS, IDS)), "hold Tensor, tuple"),
        ({"a": torch.tensor(3.0)}, "one row for each example"),
        ((IDS, IDS[:3]), "7, 3"),
    ],
)
def test_what_are_no_inputs(x: object, words: str) -> None:
    assert words in str(fault(x))
    assert all(fault(good) is None for good in KINDS.values())
