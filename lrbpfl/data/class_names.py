"""The names of the classes, from a text file beside the data: one on each line, in the order of the class numbers."""

from collections import Counter
from pathlib import Path

from lrbpfl.errors import BadInput

LONGEST = 2**24  # bytes of the file


def read_class_names(file: Path, num_classes: int) -> tuple[str, ...] | None:
    """The names (num_classes,), or None if there is no such file; blank lines do not count."""
    if not file.exists() and not file.is_symlink():
        return None
    try:
        if not file.is_file() or file.stat().st_size > LONGEST:  # a pipe would never end
            raise OSError("it is no file" if not file.is_file() else f"it is longer than {LONGEST} bytes")
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise BadInput(f"{file} cannot be read as class names in UTF-8 ({error}): correct it or remove it") from error
    names = tuple(filter(None, map(str.strip, lines)))
    if len(names) != num_classes:
        found = f"{file} names {len(names)} classes, and the labels of the data go from 0 to {num_classes - 1}"
        raise BadInput(f"{found}: give {num_classes} lines with one name each, in the order of the labels")
    ((name, times),) = Counter(names).most_common(1)
    if times > 1:
        raise BadInput(f"{file} gives the name {name!r} to {times} classes: every class needs a name of its own")
    return names
