"""Files that are whole or not there; private ones are for their owner's eyes alone; one writer at a time."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lrbpfl.errors import BadInput, plain, shown

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
LOCK = ".lock"

_held: set[str] = set()  # folders that this process writes: the system's locks tell processes apart, not threads


class DiskFault(BadInput):
    """The disk is full, read-only or gone: whatever was written before is whole, and the run can go on."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever the disk refuses inside is told in a sentence that names the path."""
    try:
        yield
    except OSError as error:
        raise DiskFault(f"{path} cannot be written: {error.strerror or error}") from None


def write_file(path: Path, data: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Write a file that is whole or not there."""
    with whole(path, private=private, durable=durable) as file:
        file.write(data)


@contextmanager
def whole(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[BinaryIO]:
    """Write aside, fsync (unless `make_durable` follows), rename: the file is whole or not there."""
    aside = path.with_name(f".{path.name}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER if private else 0o777)
        try:
            aside.unlink(missing_ok=True)  # a leftover might have been made for more eyes
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE if private else 0o666)
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            aside.rename(path)
        except Exception:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise


def make_durable(path: Path) -> None:
    """What was written to this file, or renamed in this directory, stays so after a power cut."""
    with writing(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def usable(path: str | os.PathLike[str], *, home: bool = False) -> Path:
    """The path, whether or not something is there; refused if this system could never have it.

    With ``home``, a leading ~ is somebody's home directory.
    """
    try:
        found = Path(path).expanduser() if home else Path(path)
        found.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL in it, somebody's home that is not there
        reason = (error.strerror if isinstance(error, OSError) else None) or plain(error, 200)
        raise BadInput(f"the path {shown(str(path))} cannot be used: {reason}") from None
    return found


def private_folder(path: Path) -> Path:
    """The folder, made for its owner's eyes alone if it is not there; its parents must be."""
    with writing(path):
        path.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    return path


def remove_folder(path: Path) -> None:
    """The folder is gone with all it held; one that is not there already is."""
    with writing(path), suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process, and nothing else in this one, writes to the folder; the lock dies with the process."""
    name = str(folder.resolve())
    if name in _held:
        raise BadInput(f"{folder} is being written by this process already")
    _held.add(name)
    try:
        with writing(folder):
            handle = _lock(folder)
        try:
            yield
        finally:
            with suppress(OSError):  # on some systems an open file cannot go; it does no harm
                (folder / LOCK).unlink()
            os.close(handle)
    finally:
        _held.discard(name)


def _lock(folder: Path) -> int:
    """An open, locked file of the folder."""
    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        if not _take(handle):
            holder = os.pread(handle, 20, 0).decode(errors="replace").strip() if hasattr(os, "pread") else ""
            os.close(handle)
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise BadInput(f"{folder} is being written by {who}: wait until it has ended")
        try:
            same = os.path.samestat(os.fstat(handle), path.stat())
        except FileNotFoundError:  # whoever held it removed it meanwhile
            same = False
        if same:
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            return handle
        os.close(handle)


def _take(handle: int) -> bool:
    """Whether this process now holds the file. Not inherited by forks, which may outlive us for a moment."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
