"""Calling the command line in this process as often as wanted, and what must hold whatever it is given."""

import contextlib
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, currently_in_test_context, event, settings

from lrbpfl.cli import main

# More by hand: LRBPFL_FUZZ=20 pytest tests/fuzz runs twenty times as many cases, new ones each time.
TIMES = int(os.environ.get("LRBPFL_FUZZ", "0"))
PATIENCE = 60  # seconds that one case may take
LONGEST = 1200  # characters on stderr


def fuzz(cases: int) -> settings:
    """So many cases, the same in every run, or new ones where more are asked for."""
    return settings(
        max_examples=cases * max(TIMES, 1),
        derandomize=not TIMES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class Outcome(NamedTuple):
    """What a command left on the screen, and its exit code."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """A case that hangs is a failure."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"still busy after {PATIENCE} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def lrbpfl(*arguments: object) -> Outcome:
    """The command, as its entry point runs it; anything but an exit is a traceback, and passes through."""
    out, err = io.StringIO(), io.StringIO()
    before, code = sys.argv, 0
    sys.argv = ["lrbpfl", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _alarm():
            main.run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    finally:
        sys.argv = before
    return Outcome(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, int]:
    """Everything in a folder, and when it was last changed."""
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def check(folder: Path, *arguments: object) -> Outcome:
    """Exit code 0, or 2 with one sentence and nothing written."""
    before = contents(folder)
    with contextlib.chdir(folder):
        outcome = lrbpfl(*arguments)
    assert outcome.code in (0, 2), outcome
    if currently_in_test_context():
        event(f"exit code {outcome.code}")  # told by --hypothesis-show-statistics
    if outcome.code == 2:
        assert contents(folder) == before, outcome
        assert len(outcome.err) <= LONGEST or "Usage" in outcome.err, outcome
        told = [line for line in outcome.err.splitlines() if not line.startswith("note: ")]
        assert len(told) == 1 or "Usage" in outcome.err, outcome
        assert not any(sign < " " and sign != "\n" for sign in outcome.err), outcome
    return outcome


@pytest.fixture(scope="session")
def place() -> Iterator[Callable[[], Path]]:
    """New folders, each empty, that all go away in the end."""
    with tempfile.TemporaryDirectory() as root:
        yield lambda: Path(tempfile.mkdtemp(dir=root))
