"""What a model takes in: recorded, and demanded of what it is shown."""

import json

import numpy as np
import pytest
import torch

from lrbpfl.errors import BadInput
from lrbpfl.personal.signature import as_inputs, checked, example, signature

IMAGE = torch.zeros(5, 3, 8, 8, dtype=torch.uint8)
TOKENS = torch.zeros(5, 7, dtype=torch.int64)
FLOATS = torch.zeros(5, 2)


@pytest.mark.parametrize("x", [IMAGE, TOKENS, FLOATS, (FLOATS, TOKENS), {"a": IMAGE, "b": FLOATS, "c": TOKENS}])
def test_examples_of_a_signature_have_it(x: object) -> None:
    said = checked(json.loads(json.dumps(signature(x))), "the file")
    assert signature(example(said, 3)) == signature(x)
    assert signature(as_inputs(x, said)) == signature(x)


def test_images_stay_bytes_whatever_they_came_as() -> None:
    said = signature(IMAGE)
    given = np.arange(192).reshape(1, 3, 8, 8)
    for kind in (np.int32, np.float64, np.uint8):
        assert torch.equal(as_inputs(given.astype(kind), said), torch.from_numpy(given.astype(np.uint8)))
    for wrong in (given / 255, given + 200, given - 1):
        with pytest.raises(BadInput, match="uint8 images: whole numbers from 0 to 255"):
            as_inputs(wrong, said)


def test_tokens_are_whole_numbers() -> None:
    with pytest.raises(BadInput, match=r"the inputs are torch.float32, and the model takes whole numbers \(int64\)"):
        as_inputs(TOKENS.float(), signature(TOKENS))


def test_several_inputs_have_one_row_for_each_example() -> None:
    pair, named = signature((FLOATS, TOKENS)), signature({"age": FLOATS, "notes": TOKENS})
    with pytest.raises(BadInput, match="the inputs have 4, 5 rows: give as many of each"):
        as_inputs((FLOATS[:4], TOKENS), pair)
    with pytest.raises(BadInput, match="a tuple of 2 arrays"):
        as_inputs(FLOATS, pair)
    with pytest.raises(BadInput, match="a dict of age, notes"):
        as_inputs({"age": FLOATS}, named)
    with pytest.raises(BadInput, match=r"input 'notes' have the shape \(5, 2\)"):
        as_inputs({"age": FLOATS, "notes": FLOATS}, named)


def test_arrays_of_any_layout_are_taken() -> None:
    x = np.arange(12.0).reshape(6, 2)
    for given in (x, x.astype(">f8"), np.asfortranarray(x), x[::-1][::-1], x.tolist(), torch.from_numpy(x)):
        assert torch.equal(as_inputs(given, signature(FLOATS)), torch.tensor(x, dtype=torch.float32))
