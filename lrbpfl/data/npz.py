"""Arrays in .npz files: mapped into memory where they lie there as they are, read where they are compressed."""

import struct
import zipfile
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.npyio import NpzFile

from lrbpfl.errors import BadInput

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
_MARK, _LOCAL = b"PK\3\4", struct.Struct("<4s22xHH")  # of a member's own header; the lengths of two fields follow it
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_arrays(file: Path, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Those of these arrays that the file holds, in memory; checksums are checked."""
    try:
        with file.open("rb") as stream:
            arrays = np.load(stream, allow_pickle=False)
            if not isinstance(arrays, NpzFile):
                raise ValueError("it holds a single array")
            return {key: arrays[key] for key in names if key in arrays}
    except _UNREADABLE as error:
        reason = str(error) or type(error).__name__
        raise BadInput(f"{file} cannot be read as an .npz file of plain arrays ({reason})") from error


def map_arrays(file: Path, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The same arrays; those that are not compressed take no memory of their own, and changes to them stay private."""
    names = list(names)
    found = {}
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            for name in names:
                mapped = _map(stream, archive.getinfo(f"{name}.npy"))
                if mapped is not None:
                    found[name] = mapped
    except _UNREADABLE:  # whatever is wrong shows, and is told, when it is read
        return read_arrays(file, names)
    left = [name for name in names if name not in found]
    return {**found, **read_arrays(file, left)} if left else found


def _map(stream: IO[bytes], member: zipfile.ZipInfo) -> npt.NDArray[Any] | None:
    """A member's array, if it lies in the file as it would in memory and its checksum is right."""
    stream.seek(member.header_offset)
    mark, *lengths = _LOCAL.unpack(stream.read(_LOCAL.size))
    start = stream.seek(member.header_offset + _LOCAL.size + sum(lengths))
    if mark != _MARK or member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        return None
    shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(stream)](stream)
    place, size = stream.tell(), prod(shape) * dtype.itemsize
    if dtype.hasobject or not size or place - start + size != member.file_size:
        return None
    whole = np.memmap(stream, np.uint8, "c", start, (member.file_size,))
    if zlib.crc32(whole.data) != member.CRC:
        return None
    return whole[place - start :].view(dtype).reshape(shape, order="F" if fortran else "C").view(np.ndarray)
