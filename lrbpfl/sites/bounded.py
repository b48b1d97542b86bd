"""Worker processes within the limits that a site sets."""

import sys

from lrbpfl.engines.processes import Processes, Worker
from lrbpfl.engines.work import Setup
from lrbpfl.sites.holdings import SiteSection
from lrbpfl.states import States

GIB = 2**30


class Bounded(Processes):
    """Started afresh, as whoever carries letters has threads of its own, and with only so much memory (on Linux)."""

    def __init__(self, setup: Setup, limits: SiteSection, states: States) -> None:
        super().__init__(setup, limits.workers, "spawn", states, limits.seconds)
        self._memory = limits.memory

    def _worker(self, capacity: int) -> Worker:
        worker = super()._worker(capacity)
        if self._memory is not None and sys.platform == "linux" and worker.process.pid:
            import resource

            most = int(self._memory * GIB)
            resource.prlimit(worker.process.pid, resource.RLIMIT_DATA, (most, most))
        return worker
