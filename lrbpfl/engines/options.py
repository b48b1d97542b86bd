"""What an engine may be told about how to run; nothing here changes a number."""

from typing import NamedTuple

from lrbpfl.engines.launch import Start


class Options(NamedTuple):
    """An engine heeds what concerns it."""

    workers: int = 1
    start: Start = "auto"  # how worker processes come to life
    deadline: float = 0.0  # seconds that a worker may take over a client; 0: a multiple of what others took
    address: str = ""  # of a cluster that is there already; with one, 0 workers are as many as the cluster has CPUs
