"""Arrays in .npz files, mapped into memory where they lie there as they are, and read where they are compressed."""

import struct
import zipfile
import zlib
from collections.abc import Collection
from functools import lru_cache
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lrbpfl.data import npz

SMALL = 2**20  # bytes of an array that is sooner read than mapped
_MARK, _LOCAL = b"PK\3\4", struct.Struct("<4s22xHH")  # of a member's own header; the lengths of two fields follow it


def map_arrays(file: Path, wanted: Collection[str]) -> dict[str, npt.NDArray[Any]]:
    """As `npz.arrays`; large arrays take no memory of their own unless compressed, and changes to them stay private."""
    found = {}
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            for name in wanted:
                mapped = _map(stream, archive.getinfo(f"{name}.npy"))
                if mapped is not None:
                    found[name] = mapped
    except Exception:  # whatever is wrong shows, and is told, when it is read
        return npz.arrays(file, wanted)
    left = [name for name in wanted if name not in found]
    return {**found, **npz.arrays(file, left)} if left else found


def _map(stream: IO[bytes], member: zipfile.ZipInfo) -> npt.NDArray[Any] | None:
    """A member's array, if it lies in the file as it would in memory and its checksum is right."""
    stream.seek(member.header_offset)
    mark, *lengths = _LOCAL.unpack(stream.read(_LOCAL.size))
    start = stream.seek(member.header_offset + _LOCAL.size + sum(lengths))
    if mark != _MARK or member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        return None
    whole: npt.NDArray[Any] = (
        np.frombuffer(bytearray(stream.read(member.file_size)), np.uint8)
        if member.file_size <= SMALL
        else np.memmap(stream, np.uint8, "c", start, (member.file_size,))
    )
    if zlib.crc32(whole.data) != member.CRC:
        return None
    length = 2 if whole[6] == 1 else 4  # bytes that say how long the rest of the header is
    place = 8 + length + int.from_bytes(whole[8 : 8 + length].tobytes(), "little")
    shape, fortran, dtype = _header(whole[:place].tobytes())
    if dtype.hasobject or not prod(shape) or prod(shape) * dtype.itemsize != len(whole) - place:
        return None
    return whole[place:].view(dtype).reshape(shape, order="F" if fortran else "C").view(np.ndarray)


@lru_cache(maxsize=1024)  # many clients have arrays of one shape
def _header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = BytesIO(header)
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = npz.HEADERS[np.lib.format.read_magic(stream)](stream)
    return found
