"""Clients that are loaded when they are needed: what is known of them before, and what of a file is mapped."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrbpfl.data import LazyClients, lazy, lazy_folder
from lrbpfl.data import mapped as mapping
from lrbpfl.data.mapped import map_arrays
from lrbpfl.data.npz import arrays
from lrbpfl.errors import BadInput
from lrbpfl.rng import numpy_generator

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize(
    ("x", "save"),
    [
        (numpy_generator(0).normal(size=(5, 3)), np.savez),
        (np.asfortranarray(numpy_generator(0).normal(size=(5, 3)).astype(">f4")), np.savez),
        (numpy_generator(0).integers(256, size=(5, 2, 2), dtype=np.uint8), np.savez),
        (np.array([["a", "bc"]]), np.savez),
        (np.zeros((0, 3)), np.savez),
        (np.float64(3.0), np.savez),
        (numpy_generator(0).normal(size=(5, 3)), np.savez_compressed),
    ],
)
@pytest.mark.parametrize("small", [0, 2**20])
def test_what_is_mapped_is_what_is_read(
    x: Array, save: Callable[..., None], small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "SMALL", small)
    save(tmp_path / "a.npz", y=np.arange(3), x=x, other=1)
    mapped, read = (way(tmp_path / "a.npz", ("x", "y", "z")) for way in (map_arrays, arrays))
    assert mapped.keys() == read.keys() == {"x", "y"}
    for name in read:
        assert mapped[name].dtype == read[name].dtype and np.array_equal(mapped[name], read[name])


def test_only_what_is_compressed_or_small_is_copied(tmp_path: Path) -> None:
    for name, save in {"plain": np.savez, "small": np.savez_compressed}.items():
        save(tmp_path / f"{name}.npz", x=np.zeros((9, 2**15)), y=np.zeros(9))
    assert isinstance(map_arrays(tmp_path / "plain.npz", "x")["x"].base, np.memmap)
    assert not isinstance(map_arrays(tmp_path / "plain.npz", "y")["y"].base, np.memmap)
    assert not isinstance(map_arrays(tmp_path / "small.npz", "x")["x"].base, np.memmap)


@pytest.mark.parametrize("place", [200, 400, 2000])
def test_a_flipped_bit_is_found_in_a_map_too(place: int, tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x=numpy_generator(0).normal(size=(200, 3)), y=np.zeros(200, int))
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(bytes(content))
    with pytest.raises(BadInput, match=r"a\.npz cannot be read"):
        map_arrays(file, ("x", "y"))


def nobody(name: str) -> Any:
    raise AssertionError("nobody need be loaded for this")


def test_names_come_in_natural_order_and_nobody_is_loaded() -> None:
    clients = LazyClients([f"s{k}" for k in (10, 2, 1)], nobody, classes=3)
    assert clients.names == ("s1", "s2", "s10") and clients.known_classes() == (0, 1, 2)
    assert clients.digest == LazyClients(("s2", "s1", "s10"), nobody, classes=np.arange(3)).digest
    assert clients.digest != LazyClients(clients.names, nobody, classes=4).digest
    assert clients.digest != LazyClients(("s1", "s2", "s11"), nobody, classes=3).digest


@pytest.mark.parametrize(
    ("names", "classes", "words"),
    [
        ([], 3, "there are no clients"),
        ("abc", 3, "give a list of them"),
        (["a", "b", "a"], 3, "two clients are called 'a'"),
        (["a", " "], 3, "a client has an empty name"),
        (["a"], 0, "classes is 0"),
        (["a"], ["x", "x"], "different labels"),
        (["a"], ["x", 1], "all numbers or all text"),
        (["a"], [0.0, 1.0], "all numbers or all text"),
    ],
)
def test_names_and_classes_that_cannot_be(names: Any, classes: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        LazyClients(names, nobody, classes=classes)


def test_classes_are_found_by_a_look_at_everybody() -> None:
    labels = {"a": [10, 2], "b": [2, 2], "c": [7]}
    clients = LazyClients(labels, lambda name: (np.zeros((len(labels[name]), 2)), labels[name]))
    assert clients.known_classes() == (2, 7, 10)
    assert clients.census is not None
    assert (clients.census.sizes.tolist(), clients.census.kinds.tolist()) == ([2, 2, 1], [2, 1, 1])
    assert clients.census.owners == {2: 2, 7: 1, 10: 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three clients, which count as many."""
    monkeypatch.setattr(lazy, "MANY_FILES", 2)
    for k, name in enumerate(("s10 .npz", "s2.npz", "S1.NPZ")):
        with (tmp_path / name).open("wb") as file:
            np.savez(file, x=np.full((4, 2), k), y=[0, 0, k, k])
    return tmp_path


def test_a_large_folder_is_listed_and_its_labels_are_read(folder: Path) -> None:
    (folder / ".hidden.npz").write_text("not a client")
    (folder / "README.md").write_text("not a client either")
    clients = lazy_folder(folder)
    assert clients is not None and clients.names == ("S1", "s2", "s10 ") and clients.classes == (0, 1, 2)
    known, first = clients.opened()
    assert first.client_names == ("S1",) and first.x.tolist() == [[2.0, 2.0]] * 4 and first.y.tolist() == [0, 0, 2, 2]
    assert clients.dataset(2, known).x.tolist() == [[0.0, 0.0]] * 4
    (folder / "classes.txt").write_text("cat\ndog\nowl\n")
    named = lazy_folder(folder)
    assert named is not None and named.class_names == ("cat", "dog", "owl")


def test_the_digest_tells_a_folder_that_changed(folder: Path) -> None:
    def digest() -> str:
        clients = lazy_folder(folder)
        assert clients is not None
        return clients.digest

    before = digest()
    assert digest() == before
    os.utime(folder / "s2.npz", ns=(1, 1))
    assert digest() != before


@pytest.mark.parametrize("beside", ["a.csv", "b.parquet", "anna/cat/1.png"])
def test_a_folder_of_several_kinds_is_not_taken(folder: Path, beside: str) -> None:
    (folder / beside).parent.mkdir(parents=True, exist_ok=True)
    (folder / beside).write_bytes(b"")
    assert lazy_folder(folder) is None


def test_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path, Path("~nobody1/x"), Path("x" * 5000)):
        assert lazy_folder(path) is None
