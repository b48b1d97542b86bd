"""Files that are whole or not there; private ones are for their owner's eyes alone."""

import os
from pathlib import Path

from lrbpfl.errors import BadInput, plain, shown

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def write_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write aside, fsync, rename: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER if private else 0o777)
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)  # a leftover might have been made for more eyes
    with os.fdopen(
        os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE if private else 0o666), "wb"
    ) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


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
    path.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    return path


def fsync_directory(path: Path) -> None:
    """What was renamed in this directory stays so after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
