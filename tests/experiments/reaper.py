"""Death at a chosen moment, without processes: work ends before the n-th change to the files of a folder."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


class Cut(BaseException):
    """The end of a process, as far as a test without processes can play it."""


class Reaper:
    """Raises `Cut` before the n-th change to the files of a folder, and before every later one: the dead write not."""

    def __init__(self) -> None:
        self.folder, self.left, self.counting = "", 0, False
        sys.addaudithook(self)  # for good: it stays idle unless it is counting

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.counting or event not in CHANGES or not self._changes(event, args):
            return
        if self.left == 0:
            raise Cut
        self.left -= 1

    def _changes(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return False
        return event in ("os.rmdir", "os.remove") or str(args[0]).startswith(self.folder)

    def survives(self, folder: Path, changes: int, work: Callable[[], object]) -> bool:
        """Whether the work ends within so many changes."""
        self.folder, self.left, self.counting = str(folder), changes, True
        try:
            work()
        except Cut:
            return False
        finally:
            self.counting = False
        return True


REAPER = Reaper()
