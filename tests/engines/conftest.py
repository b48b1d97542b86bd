"""What the tests of engines share: a watchdog, and imports done before anything forks."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
from torch import nn


def _bark(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("an engine waited for something that never came")


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A test that hangs fails instead."""
    before = signal.signal(signal.SIGALRM, _bark)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope="session")
def warm() -> None:
    """Torch imports a good deal with the first optimiser; forked workers find it done."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
