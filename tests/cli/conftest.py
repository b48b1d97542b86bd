"""Running the command line in this process, as its entry point does."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lrbpfl.cli import main


class Outcome(NamedTuple):
    """What a command left on the screen, and its exit code."""

    code: int
    out: str
    err: str


Lrbpfl = Callable[..., Outcome]


@pytest.fixture
def lrbpfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Lrbpfl:
    """`lrbpfl(*arguments)` in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lrbpfl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.run()
            raise SystemExit(0)
        code = ended.value.code
        out, err = capsys.readouterr()
        return Outcome(code=code if isinstance(code, int) else 0 if code is None else 1, out=out, err=err)

    return call


DIGITS = ("--set", "data.dataset=digits")
TINY = (
    *DIGITS, "--set", "data.clients=5", "--set", "data.train_fraction=0.3", "--set", "federation.rounds=2",
    "--set", "federation.cohort=2", "--set", "engine.workers=2",
)  # fmt: skip
