"""How long a worker may take over a client: as long as any honest one could, but not for ever."""

import math
import os
import socket
import struct
import sys
from multiprocessing.connection import Connection

from lrbpfl.engines.jobs import Job
from lrbpfl.engines.lazy import is_lazy
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput

FLOOR = 60.0  # seconds that every job has
MULTIPLE = 20.0  # of the longest job of its kind that was finished
UNKNOWN = 3600.0  # seconds that a job has while none of its kind was finished: nothing is known
TICK = 1.0  # seconds between two looks at the clock


class Deadlines:
    """The seconds that an update or an evaluation of a client may take: those given or, by default, a rule.

    It is 20 times the longest job of the same kind that was finished so far, under whatever load there is, and at least
    a minute; an hour before any was finished. A client with r times the examples of any that was finished has r² times
    as long: where time grows with the cube of examples, as in Gaussian processes, that is enough up to r = 20. A client
    that is run again has twice as long each time.
    """

    def __init__(self, setup: Setup, given: float = 0.0) -> None:
        if not 0 <= given < math.inf:
            raise BadInput(f"a deadline of {given} seconds cannot be kept: give a number from 0 on; 0: the rule")
        self._setup, self._given = setup, given
        self._longest: dict[str, float] = {}
        self._largest: dict[str, int] = {}

    def limit(self, job: Job) -> float:
        """The seconds that this job may take, as far as is known by now."""
        if self._given:
            return self._given
        patience = 2.0 ** len(job.deaths)
        if job.what not in self._longest:
            return patience * UNKNOWN
        times = max(1.0, self._examples(job) / self._largest[job.what])
        return patience * max(FLOOR, MULTIPLE * self._longest[job.what] * times**2)

    def learn(self, job: Job, seconds: float) -> None:
        """A job was finished in so many seconds."""
        self._longest[job.what] = max(seconds, self._longest.get(job.what, 0.0))
        self._largest[job.what] = max(self._examples(job), self._largest.get(job.what, 1))

    def _examples(self, job: Job) -> int:
        if is_lazy(self._setup.clients):  # nobody is loaded here just to be counted: all count alike
            return 1
        client = self._setup.clients[job.k]
        kept = 0 if client.calibration is None else len(client.calibration.y)
        return len(client.train.y) + (len(client.test.y) + kept if job.what == "evaluate" else 0)


def bound(end: Connection, seconds: float) -> None:
    """A transfer that stands still for so long fails with an OSError, as the other side may stop in the middle of one.

    That takes a socket: on Windows, where nothing stops a process like that, pipes are none.
    """
    if sys.platform != "win32":
        with socket.socket(fileno=os.dup(end.fileno())) as other:
            seconds = min(seconds, 1e8)  # years, as far as a C library counts them anywhere
            span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) + 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
