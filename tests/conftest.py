"""What all tests share: one thread, and a toy federation that trains within a second."""

import os
import secrets
from collections import Counter

import pytest
import torch

from lrbpfl.testing.toy import CLASSES as CLASSES
from lrbpfl.testing.toy import FEATURES as FEATURES
from lrbpfl.testing.toy import Toy as Toy
from lrbpfl.testing.toy import blobs as blobs
from lrbpfl.testing.toy import make_toy
from lrbpfl.testing.toy import mlp as mlp

torch.manual_seed(0)  # of the modules that test files build when they are imported
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
# A Ray of a test answers to that test alone, tells nobody, and leaves no token in anybody's home.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line of what was skipped and why, so that a missing browser or extra is no secret."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        told = "; ".join(f"{reason} ({times})" for reason, times in sorted(reasons.items()))
        terminalreporter.write_line(f"skipped: {told}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first, and last those that leave a Ray behind: later forks of the same process may die of it."""

    def place(item: pytest.Item) -> int:
        if item.path.name == "test_ray.py" or item.name == "test_a_cluster_gives_the_same_bits":
            return 2
        return 0 if item.get_closest_marker("sites") else 1

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def toy() -> Toy:
    return make_toy()
