"""What is worth saying is said once, with a name; good data are passed over in silence."""

import numpy as np
import pytest

from lrbpfl.data import load, read_clients, remarks
from lrbpfl.rng import numpy_generator


def clients(**changes: tuple[object, object]) -> dict[str, tuple[object, object]]:
    rng = numpy_generator(0)
    good = {name: (rng.normal(size=(20, 3)), np.arange(20) % 3) for name in "abc"}
    return {**good, **changes}


@pytest.mark.parametrize("name", ["speakers", "digits"])
def test_data_of_ours_need_no_remark(name: str) -> None:
    assert remarks(load(name)) == []


def test_good_data_need_none() -> None:
    assert remarks(read_clients(clients())) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d": (np.zeros((12, 3)), [1] * 12)}, "client 'd' has examples of a single class only"),
        ({"d": (np.zeros((4, 3)), [0, 1, 2, 0])}, "client 'd' has fewer than 10 examples"),
        ({"d": (np.zeros((12, 3)), [0, 3] * 6)}, "class '3' has examples at one client only"),
        ({"d": (np.zeros((12, 3)), [0, -1] * 6)}, "the label -1 is a class like any other"),
        ({" A": (np.zeros((12, 3)), [0, 1] * 6)}, "'a' and 'A' differ in spaces or capitals only"),
        ({"d": (np.full((12, 3), (0, 900, 0)), [0, 1, 2] * 4)}, "1 of 3 features are out of scale, feature 1 the most"),
        ({"d": (np.zeros((90, 3)), np.arange(90))}, "150 examples have 90 different labels"),
    ],
)
def test_what_is_worth_saying(changes: dict[str, tuple[object, object]], words: str) -> None:
    assert any(words in remark for remark in remarks(read_clients(clients(**changes))))


def test_scales_name_the_worst_feature_and_the_remedy() -> None:
    rng = numpy_generator(0)
    large = read_clients({"a": (rng.normal(size=(50, 2)) * (1, 40) + (0, 240), np.arange(50) % 2)})
    (remark,) = remarks(large._replace(feature_names=("sex", "cholesterol")))
    assert "column 'cholesterol'" in remark and "data.standardise=pooled" in remark and "standardise='pooled'" in remark
    assert remarks(large, standardise="pooled") == []
    tiny = read_clients({"a": (1e-4 * rng.normal(size=(50, 2)), np.arange(50) % 2)})
    assert "all features are tiny" in remarks(tiny)[0]
    assert remarks(large, train=np.zeros(1, np.int64)) != []
    stamps = read_clients({"a": (1.7e9 + 1000 * rng.normal(size=(50, 1)), np.arange(50) % 2)})
    assert any("too little for float32" in remark for remark in remarks(stamps, standardise="client"))


def test_constant_features_are_passed_over() -> None:
    x = np.column_stack([np.full(999, 0.1), np.full(999, 9.9), numpy_generator(0).normal(size=999)])
    assert remarks(read_clients({"a": (x, np.arange(999) % 2)})) == []


def test_images_with_channels_last_are_told() -> None:
    images = np.zeros((12, 16, 16, 3), np.uint8)
    assert "channels last" in remarks(read_clients({"a": (images, [0, 1] * 6)}))[0]
    assert remarks(read_clients({"a": (images.transpose(0, 3, 1, 2), [0, 1] * 6)})) == []
