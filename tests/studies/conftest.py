"""The small runs of the tests of experiments."""

from tests.experiments.conftest import configure, folder, warm

__all__ = ["configure", "folder", "warm"]
