"""Death at a chosen moment, without processes: work ends before the n-th change to the files of a folder."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrbpfl.disk import DiskFault

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
GIVING = ("os.remove", "os.rmdir", "os.truncate")  # what a full disk still does


class Cut(BaseException):
    """The end of a process, as far as a test without processes can play it."""


class Reaper:
    """Raises `Cut` before the n-th change to the files of a folder, and before every later one: the dead write not."""

    def __init__(self) -> None:
        self.folder, self.left, self.counting = "", 0, False
        self.end: BaseException = Cut()
        sys.addaudithook(self)  # for good: it stays idle unless it is counting

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.counting or event not in CHANGES or not self._changes(event, args):
            return
        if isinstance(self.end, OSError) and event in GIVING:
            return
        if self.left == 0:
            raise self.end
        self.left -= 1

    def _changes(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return False
        return event in ("os.rmdir", "os.remove") or str(args[0]).startswith(self.folder)

    def survives(
        self, folder: Path, changes: int, work: Callable[[], object], end: BaseException | None = None
    ) -> bool:
        """Whether the work ends within so many changes; after them it dies, or hears `end` from the disk."""
        self.folder, self.left, self.counting, self.end = str(folder), changes, True, end or Cut()
        try:
            work()
        except (Cut, DiskFault):
            return False
        finally:
            self.counting = False
        return True


REAPER = Reaper()
