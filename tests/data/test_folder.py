"""A folder of clients is read whole, or refused by the name of the file at fault."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lrbpfl.data import load, natural
from lrbpfl.data.folder import load_folder
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator


def save(folder: Path, name: str, x: npt.ArrayLike, y: npt.ArrayLike) -> None:
    np.savez(folder / f"{name}.npz", x=x, y=y)


def test_clients_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    rng = numpy_generator(0)
    x = {name: rng.normal(size=(n, 2, 3)) for name, n in [("b.2", 3), ("a", 2)]}
    save(tmp_path, "b.2", x["b.2"], np.array([4, 0, 1], np.uint8))
    save(tmp_path, "a", x["a"].astype(np.float16), np.array([2, 2], np.int32))
    (tmp_path / "README.md").write_text("not a client")
    (tmp_path / ".hidden.npz").write_text("not a client either")
    dataset = load(str(tmp_path))
    assert dataset.name == tmp_path.name
    assert dataset.client_names == ("a", "b.2")
    assert dataset.num_classes == 4 and dataset.classes == (0, 1, 2, 4)
    assert dataset.x.dtype == torch.float32 and dataset.y.dtype == torch.int64
    assert dataset.y.tolist() == [2, 2, 3, 0, 1]
    assert np.array_equal(dataset.x[2:].numpy(), x["b.2"].astype(np.float32))
    assert dataset.owner is not None
    assert [part.tolist() for part in natural(dataset.owner)] == [[0, 1], [2, 3, 4]]


def test_bytes_stay_bytes(tmp_path: Path) -> None:
    images = numpy_generator(0).integers(256, size=(4, 3, 5, 5), dtype=np.uint8)
    save(tmp_path, "anna", images, [0, 1, 1, 0])
    dataset = load_folder(tmp_path)
    assert dataset.x.dtype == torch.uint8
    assert np.array_equal(dataset.x.numpy(), images)


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere is not there"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match=r"holds no client-name\.npz"):
        load(str(tmp_path))


GOOD = np.zeros((2, 3))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros(2), [0, 1], r"x of shape \(2,\)"),
        (GOOD, [[0], [1]], r"y of shape \(2, 1\)"),
        (GOOD, [0, 1, 2], r"y of shape \(3,\)"),
        (np.zeros((0, 3)), np.zeros(0, int), "empty"),
        (np.zeros((2, 0)), [0, 1], "empty"),
        (GOOD.astype(str), [0, 1], "row 0 of .*zoe.npz holds '0.0', which is not a number"),
        (GOOD.astype(complex), [0, 1], "client 'zoe' has inputs of type complex128"),
        (GOOD, [0.0, 0.5], "zoe.npz has the label 0.5 in row 1"),
        (GOOD, ["cat", "dog"], "client 'zoe' has labels that are text, and client 'anna' has labels that are numbers"),
        (GOOD, [0, -1], "example 1 of client 'zoe' has the label -1"),
        (GOOD, [-1, -1], "example 0 of client 'zoe' has the label -1"),
        ([[0, 0, 0], [0, np.nan, 0]], [0, 1], "row 1 of client 'zoe', feature 1, holds nan"),
        ([[1e300, 0, 0], [0, 0, 0]], [0, 1], "row 0 of client 'zoe', feature 0, holds 1e.300"),
        (np.array([[None], [1]], object), [0, 1], "zoe.npz cannot be read.*Python objects"),
        (np.zeros((2, 4)), [0, 1], r"client 'zoe' has inputs \(4,\) float32 where client 'anna' has \(3,\) float32"),
        (np.zeros((2, 3, 3), np.uint8), [0, 1], "client 'zoe' has inputs .* uint8 where client 'anna'"),
        (GOOD[:1], [0], "client 'zoe' has one example only"),
    ],
)
def test_a_bad_client_is_named(tmp_path: Path, x: npt.ArrayLike, y: npt.ArrayLike, words: str) -> None:
    save(tmp_path, "anna", GOOD, [0, 1])
    save(tmp_path, "zoe", x, y)
    with pytest.raises(BadInput, match=words) as refusal:
        load(str(tmp_path))
    assert "zoe" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def no_labels(file: Path) -> None:
    np.savez(file, x=GOOD)


def nothing(file: Path) -> None:
    np.savez(file, images=GOOD, labels=[0, 1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("x,y\n0,1\n")


def one_array(file: Path) -> None:
    with file.open("wb") as out:
        np.save(out, GOOD)


def truncated(file: Path) -> None:
    np.savez(file, x=GOOD, y=[0, 1])
    file.write_bytes(file.read_bytes()[:-200])


def flipped(file: Path) -> None:
    np.savez_compressed(file, x=numpy_generator(0).normal(size=(200, 3)), y=np.zeros(200, int))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(bytes(content))


def flipped_plain(file: Path) -> None:
    np.savez(file, x=np.zeros((200, 3)), y=np.zeros(200, int))
    content = bytearray(file.read_bytes())
    content[2000] ^= 255
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_labels, "has no array y"),
        (nothing, "has no array x and y"),
        (empty, "cannot be read"),
        (text, "cannot be read"),
        (one_array, "single array"),
        (truncated, "cannot be read"),
        (flipped, "cannot be read"),
        (flipped_plain, "cannot be read.*CRC"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    save(tmp_path, "anna", GOOD, [0, 1])
    spoil(tmp_path / "zoe.npz")
    with pytest.raises(BadInput, match=rf"zoe\.npz .*{words}"):
        load_folder(tmp_path)


def test_a_file_beside_the_clients_may_name_the_classes(tmp_path: Path) -> None:
    save(tmp_path, "anna", GOOD, [0, 2])
    assert load_folder(tmp_path).class_names == ("0", "2")
    (tmp_path / "classes.txt").write_text("cat\ndog\nowl\n")
    dataset = load_folder(tmp_path)
    assert (dataset.class_names, dataset.client_names, dataset.num_classes) == (("cat", "dog", "owl"), ("anna",), 3)
    (tmp_path / "classes.txt").write_text("cat\ndog\nowl\nfox\n")
    with pytest.raises(BadInput, match=r"classes\.txt names 4 classes"):
        load_folder(tmp_path)


def test_clients_come_in_natural_order_and_labels_with_gaps_are_the_classes_there_are(tmp_path: Path) -> None:
    for k in (10, 2, 1):
        save(tmp_path, f"site-{k}", np.full((11, 2), k), 100 * np.arange(11))
    dataset = load_folder(tmp_path)
    assert dataset.client_names == ("site-1", "site-2", "site-10")
    assert dataset.num_classes == 11 and dataset.classes == tuple(range(0, 1001, 100))
    assert dataset.x[:, 0].tolist() == [1.0] * 11 + [2.0] * 11 + [10.0] * 11
    assert dataset.y.tolist() == [*range(11)] * 3
