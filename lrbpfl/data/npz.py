"""Arrays from an .npz file that may have been made by anybody: what it claims is looked at before anything is inflated.

No pickle is read. An array must be as long as its file's directory says, and no larger than its file can be trusted
with: a few kilobytes that unfold into gigabytes are refused.
"""

import os
import zipfile
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from lrbpfl.errors import BadInput, plain

SMALL = 2**26  # bytes: an array up to this size may be compressed as much as it can be
FOLD = 100  # a larger one is at most so many times as large as its file
MEMBERS = 1000  # arrays in one file
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Claim(NamedTuple):
    """What the header of an array says."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize


def claims(file: Path, wanted: Collection[str] | None = None) -> dict[str, Claim]:
    """What an .npz file claims to hold, of all arrays or of those wanted; refused by name if it cannot be so."""
    try:
        with _opened(file) as archive:
            return {name: _claim(archive, member, file) for name, member in _members(archive, wanted).items()}
    except Exception as error:  # zip files and headers can be broken in more ways than can be listed
        raise _unreadable(file, error) from None


def arrays(file: Path, wanted: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file, all or those wanted, by name."""
    claims(file, wanted)
    try:
        with _opened(file) as archive:
            return {name: _array(archive, member) for name, member in _members(archive, wanted).items()}
    except Exception as error:
        raise _unreadable(file, error) from None


def check_memory(claimed: Iterable[Claim], what: str) -> None:
    """Refuse arrays that together are larger than this machine's memory."""
    size = sum(claim.size for claim in claimed)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else size
    if size > there:
        raise BadInput(
            f"{what} holds arrays of {size / 1e9:.1f} GB, and this machine has {there / 1e9:.1f} GB of memory"
        )


def _opened(file: Path) -> zipfile.ZipFile:
    if not file.is_file():
        raise ValueError("it is no file" if file.exists() else "it is not there")
    if not zipfile.is_zipfile(file):
        raise ValueError("it holds a single array, or is damaged or no .npz file")
    return zipfile.ZipFile(file)


def _members(archive: zipfile.ZipFile, wanted: Collection[str] | None) -> dict[str, zipfile.ZipInfo]:
    entries = archive.infolist()
    if len(entries) > MEMBERS:
        raise ValueError(f"it holds more than {MEMBERS} arrays")
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        if wanted is not None and name not in wanted:
            continue
        if name in found:
            raise ValueError(f"it holds {plain(name, 80)} twice")
        found[name] = entry
    return found


def _claim(archive: zipfile.ZipFile, member: zipfile.ZipInfo, file: Path) -> Claim:
    with archive.open(member) as stream:
        claim = _header(stream)
        held, name = member.file_size - stream.tell(), plain(member.filename, 80)
    if claim.dtype.hasobject:
        raise ValueError(f"{name} holds Python objects")
    if any(n < 0 for n in claim.shape) or claim.size != held:
        shape = plain(claim.shape, 80)
        raise ValueError(f"{name} claims the shape {shape} {plain(claim.dtype, 80)}, and holds {max(held, 0)} bytes")
    if claim.size > max(SMALL, FOLD * file.stat().st_size):
        raise ValueError(
            f"{name} would unfold to {claim.size / 1e6:.0f} MB, more than {FOLD} times the file: if that is meant, "
            "save it with np.savez, which does not compress"
        )
    return claim


def _header(stream: IO[bytes]) -> Claim:
    version = npy.read_magic(stream)
    if version not in HEADERS:
        raise ValueError(f"its format is {version[0]}.{version[1]}")
    shape, _, dtype = HEADERS[version](stream)
    return Claim(shape, dtype)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    with archive.open(member) as stream:
        found: npt.NDArray[Any] = npy.read_array(stream, allow_pickle=False)
    return found


def _unreadable(file: Path, error: Exception) -> BadInput:
    return BadInput(f"{plain(file, 300)} cannot be read as an .npz file of plain arrays ({plain(error, 300)})")
