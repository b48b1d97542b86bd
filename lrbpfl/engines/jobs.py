"""What a pool has to do, in which order, and how often it tries."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

IN_COMPANY = 2  # times that a client is run beside others, should its worker die each time
ALONE = 2  # times that it is run after that, with nothing else at work: if the worker dies, it is the client's doing


class Job(NamedTuple):
    """One call for one client, with its place in the order of answers."""

    place: int
    what: str  # "update" or "evaluate"
    k: int
    t: int
    deaths: tuple[str, ...] = ()
    suspect: bool = False  # it was given up before, and is tried once, alone

    @property
    def alone(self) -> bool:
        """Whether it is to be run with nothing else at work."""
        return self.suspect or len(self.deaths) >= IN_COMPANY

    @property
    def verdict(self) -> str | None:
        """Why it is given up, if it is."""
        if len(self.deaths) < (1 if self.suspect else IN_COMPANY + ALONE):
            return None
        return f"{self.deaths[-1]}, {'as it did before' if self.suspect else f'{len(self.deaths)} times'}"


class Queue:
    """Jobs that wait for a worker, ahead of the consumer but not so far that answers pile up."""

    def __init__(self, jobs: Iterable[Job], window: int) -> None:
        self._window = window
        self._waiting: deque[Job] = deque()
        self._alone: list[Job] = []
        for job in jobs:
            (self._alone if job.alone else self._waiting).append(job)

    def next(self, due: int, at_work: list[Job]) -> Job | None:
        """The job to begin now, if any, when the consumer waits for the answer at place `due`."""
        if any(job.alone for job in at_work):
            return None
        if self._waiting and self._waiting[0].place < due + self._window:
            return self._waiting.popleft()
        if self._alone and not at_work:
            self._alone.sort()
            return self._alone.pop(0)
        return None

    def back(self, job: Job) -> None:
        """A job whose worker died: before all others, or alone."""
        if job.alone:
            self._alone.append(job)
        else:
            self._waiting.appendleft(job)
