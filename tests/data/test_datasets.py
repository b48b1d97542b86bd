"""Datasets by name, and the check of arrays of one's own."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrbpfl.data import DATASETS, Dataset, check_dataset, cifar, datasets, load
from lrbpfl.errors import BadInput
from tests.data.test_cifar import tiny, write


def test_digits() -> None:
    dataset = load("digits")
    assert (dataset.name, dataset.num_classes, dataset.owner, dataset.num_test) == ("digits", 10, None, 0)
    assert dataset.x.shape == (1797, 1, 8, 8) and dataset.x.dtype == torch.float32
    assert dataset.x.min() == -1 and dataset.x.max() == 1
    assert dataset.y.shape == (1797,) and set(dataset.y.tolist()) == set(range(10))
    assert dataset.class_names == tuple("0123456789")
    check_dataset(dataset)


def test_speakers() -> None:
    """Fifteen clients with their names, six examples of each vowel, of which the first three train."""
    dataset = load("speakers")
    check_dataset(dataset)
    assert dataset.owner is not None and dataset.trains is not None and dataset.client_names is not None
    assert dataset.x.shape == (990, 10) and dataset.x.dtype == torch.float32
    assert dataset.class_names == ("hid", "hId", "hEd", "hAd", "hYd", "had", "hOd", "hod", "hUd", "hud", "hed")
    assert len(set(dataset.client_names)) == 15 and dataset.client_names[4] == "Jo"
    each = np.zeros((15, 11, 2), int)
    np.add.at(each, (dataset.owner, dataset.y.numpy(), dataset.trains.astype(int)), 1)
    assert (each == 3).all()
    raw = dataset.x[99].numpy() * datasets.SPEAKERS_STD + datasets.SPEAKERS_MEAN  # line 101 of the file
    assert raw == pytest.approx([-4.477, 0.246, 1.087, 1.108, 0.682, 1.057, 0.424, -0.264, -1.195, -0.52], abs=1e-5)


def test_speakers_are_standardised_by_what_trains() -> None:
    dataset = load("speakers")
    assert dataset.trains is not None
    train = dataset.x[torch.from_numpy(dataset.trains)]
    assert train.mean(0).abs().max() < 0.02 and (train.std(0) - 1).abs().max() < 0.02


def test_cifar_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, contents = tiny()
    write(archive, contents, tmp_path)
    monkeypatch.setitem(DATASETS, "cifar10", partial(datasets._cifar, "cifar10", archive))
    monkeypatch.setenv("LRBPFL_DATA", str(tmp_path))
    dataset = load("cifar10")
    assert (dataset.name, dataset.num_classes, dataset.num_test) == ("cifar10", 10, 40)  # the last of two files
    assert torch.equal(dataset.x, load("cifar10", tmp_path).x)
    assert dataset.class_names is None
    check_dataset(dataset)
    (tmp_path / archive.folder / "names.txt").write_text("".join(f"thing {k}\n" for k in range(10)) + "\n")
    assert load("cifar10").class_names == tuple(f"thing {k}" for k in range(10))


def test_the_cache_is_thedefault_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBPFL_DATA", "~/somewhere")
    assert datasets.default_root() == Path.home() / "somewhere"
    monkeypatch.setenv("LRBPFL_DATA", "")
    assert "lrbpfl" in str(datasets.default_root())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("cifar-10", "cifar10"), ("CIFAR100", "cifar100"), ("digit", "digits"), ("mnisty", ""), ("", "")],
)
def test_unknown_names_meet_the_known_ones(name: str, nearest: str) -> None:
    with pytest.raises(BadInput) as refusal:
        load(name)
    message = str(refusal.value)
    assert repr(name) in message and "speakers, digits, cifar10, cifar100" in message and "client-name.npz" in message
    assert (f"nearest: {nearest!r}" in message) == bool(nearest)


GOOD = Dataset("mine", torch.zeros(3, 2), torch.tensor([0, 1, 1]), 2, np.array([0, 1, 1]), ("anna", "zoe"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": torch.tensor([0, 1, 2])}, "example 1 of client 'zoe' has the label 2, and labels go from 0 to 1"),
        ({"y": torch.tensor([-1, 1, 1])}, "example 0 of client 'anna' has the label -1"),
        ({"y": torch.tensor([0, 1, 2]), "owner": None}, "example 2 of 'mine' has the label 2"),
        ({"y": torch.tensor([0, 1, 2]), "client_names": None}, "example 1 of client 1 has the label 2"),
        ({"y": torch.tensor([0.0, 1.0, 1.0])}, "labels of 'mine' are torch.float32.*integers"),
        ({"y": torch.tensor([0, 1])}, "3 inputs and 2 labels"),
        ({"y": torch.tensor([[0], [1], [1]])}, r"\(3, 2\) and \(3, 1\)"),
        ({"x": torch.zeros(3)}, r"\(3,\) and \(3,\)"),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0, dtype=torch.int64)}, "0 inputs and 0 labels"),
        ({"x": torch.zeros(3, 2, dtype=torch.float64)}, "torch.float64"),
        ({"x": torch.tensor([[0, 0], [0, 0], [0, torch.nan]])}, "example 1 of client 'zoe' holds NaN or infinity"),
        ({"x": torch.tensor([[-torch.inf, 0], [0, 0], [0, 0]])}, "example 0 of client 'anna' holds NaN or infinity"),
        ({"owner": np.array([0, 1])}, r"owner array of 'mine' is \(2,\)"),
        ({"owner": np.array([0.0, 1.0, 1.0])}, "float64"),
        ({"owner": np.array([0, 1, 2])}, "owners of 'mine' go from 0 to 2.*from 0 to 1"),
        ({"owner": np.array([0, 1, -2])}, "owners of 'mine' go from -2 to 1"),
        ({"trains": np.array([True, False])}, r"trains array of 'mine' is \(2,\) bool"),
        ({"trains": np.array([1, 0, 1])}, r"trains array of 'mine' is \(3,\) int64"),
        ({"trains": np.array([True, False, True]), "owner": None}, "a bool for each owned example"),
    ],
)
def test_check_names_the_example(change: dict[str, Any], words: str) -> None:
    check_dataset(GOOD)
    with pytest.raises(BadInput, match=words):
        check_dataset(GOOD._replace(**change))


def test_the_registry_is_complete() -> None:
    assert list(DATASETS) == ["speakers", "digits", "cifar10", "cifar100"]
    assert cifar.CIFAR10.num_classes == 10 and cifar.CIFAR100.num_classes == 100


def test_heavy_libraries_wait_until_they_are_needed() -> None:
    code = "import sys, lrbpfl.data; print(*{'sklearn', 'pooch', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
