"""A file that only grows, line by line, and notices when it was tampered with: its length and hash go with a mark."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lrbpfl.disk import PRIVATE_FILE, writing
from lrbpfl.errors import BadInput

Mark = str  # "bytes:sha256" of a journal at some moment


class Journal:
    """Lines of JSON in a file that may not be there yet."""

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path, self._mode = path, PRIVATE_FILE if private else 0o666
        self._length, self._hash = 0, hashlib.sha256()

    def append(self, lines: Iterable[Any]) -> None:
        """Write lines behind the others, for good; a number that is not finite becomes null."""
        data = "".join(json.dumps(_clean(line), allow_nan=False) + "\n" for line in lines).encode()
        if not data:
            return
        with writing(self.path):
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self._mode)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        self._length += len(data)
        self._hash.update(data)

    def read(self) -> Iterator[Any]:
        """The lines, one at a time; none if there is no file."""
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    raise BadInput(f"{self.path} is damaged: line {number} is not JSON") from None

    @property
    def mark(self) -> Mark:
        """What `cut` can find this moment by."""
        return f"{self._length}:{self._hash.hexdigest()}"

    def cut(self, mark: Mark | None) -> None:
        """Go back to a marked moment, or to the beginning; refused if what was written before it has changed."""
        length, hashed = _read_mark(mark)
        self._length, self._hash = 0, hashlib.sha256()
        if self.path.exists():
            with self.path.open("rb") as file:
                while part := file.read(min(2**20, length - self._length)):
                    self._hash.update(part)
                    self._length += len(part)
        if self._length < length:
            raise BadInput(f"{self.path} is shorter than it was: {self._length} bytes are left of {length}")
        if length and self._hash.hexdigest() != hashed:
            raise BadInput(f"{self.path} was altered: its first {length} bytes do not fit their checksum")
        if self.path.exists():
            with writing(self.path):
                os.truncate(self.path, length)


def _read_mark(mark: Mark | None) -> tuple[int, str]:
    length, _, hashed = (mark or "0:").partition(":")
    if not length.isdigit():
        raise BadInput(f"{length[:20]!r} is no length of a journal")
    return int(length), hashed


def _clean(line: Any) -> Any:
    if not isinstance(line, dict):
        return line
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
