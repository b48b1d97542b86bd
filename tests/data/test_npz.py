"""Arrays from files of anybody: refused by what they claim, before anything is inflated."""

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from lrbpfl.data import npz
from lrbpfl.errors import BadInput


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    made = io.BytesIO()
    npy.write_array_header_1_0(made, {"descr": descr, "fortran_order": False, "shape": shape})
    return made.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(f"{name}.npy", data)
    return path


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.array(["a", "b", "a", "b"])
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", x=np.asfortranarray(x), y=y, z=np.zeros((0, 3)))
        found = npz.arrays(tmp_path / "a.npz")
        assert list(found) == ["x", "y", "z"]
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["y"], y)
        assert list(npz.arrays(tmp_path / "a.npz", ("y",))) == ["y"]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (b"", "magic string"),
        (header((20, 10**30)) + bytes(100), "holds 100 bytes"),
        (header((-1, 3)) + bytes(12), "claims the shape"),
        (header((2, 3)) + bytes(23), "holds 23 bytes"),
        (header((1,), "|O") + bytes(8), "Python objects"),
        (b"\x93NUMPY\x09\x00" + bytes(100), "format"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 60_000, "."),
    ],
)
def test_a_claim_that_cannot_be_is_refused(tmp_path: Path, member: bytes, words: str) -> None:
    with pytest.raises(BadInput, match=f"a.npz cannot be read.*{words}"):
        npz.claims(archive(tmp_path / "a.npz", x=member))


def test_a_bomb_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    width = 20_000_000
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as made,
        made.open("x.npy", "w") as member,
    ):
        member.write(header((10, width), "|u1"))
        for _ in range(10):
            member.write(bytes(width))
    tracemalloc.start()
    with pytest.raises(BadInput, match="would unfold to 200 MB"):
        npz.arrays(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_arrays_beyond_the_memory_are_refused() -> None:
    with pytest.raises(BadInput, match="this machine has"):
        npz.check_memory([npz.Claim((2**50,), np.dtype(np.float32))], "somewhere")
    npz.check_memory([npz.Claim((2**10,), np.dtype(np.float32))], "somewhere")
