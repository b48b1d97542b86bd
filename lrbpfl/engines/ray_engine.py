"""Clients as tasks of a Ray cluster. It comes in by an entry point, as an engine of any other package would."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lrbpfl.engines import ray_session as session
from lrbpfl.engines.conduct import told
from lrbpfl.engines.options import Options
from lrbpfl.engines.pool import Answer, Pool
from lrbpfl.engines.ray_task import Work, common_part, run, unwrap, wrap, wrap_setup
from lrbpfl.engines.work import Setup, Stateless, granted, kept
from lrbpfl.errors import BadInput
from lrbpfl.states import Memory, States
from lrbpfl.trees import Tree

TRIES = 3  # a client whose worker or node died is run again elsewhere, so many times in all
AHEAD = 4  # answers, for each worker, that may wait for a slower one before them


class Job(NamedTuple):
    """One call for one client, with its place in the order of answers."""

    place: int
    k: int
    message: Tree  # with marks for what others have as well
    deaths: tuple[str, ...] = ()


class Ray(Pool):
    """Runs clients as tasks on a Ray cluster, a CPU and a thread each, with the bits of the serial engine.

    The setup lies in every node's store, and what several clients of a round are sent is put there once. What clients
    keep stays with this process: it goes out with a task and comes back. A task whose worker or node died runs again
    elsewhere; a client whose tasks die again and again, or whose code raises, is skipped in this round.

    Without an address a Ray of this machine's own lives as long as the engine. A process that is connected to a cluster
    already stays connected to it.
    """

    def __init__(self, setup: Setup, workers: int = 0, address: str = "", states: States | None = None) -> None:
        if torch.device(setup.device).type != "cpu":
            raise BadInput(f"engine.device = {setup.device!r}: the engine ray runs clients on CPUs alone")
        if workers < 0:
            raise BadInput(f"{workers} workers cannot run anything: give 0 for as many as the cluster has CPUs")
        self.setup = granted(setup)
        self.states = states or Memory()
        self._workers, self._address = workers, address
        self._ray = session.ray_module()
        # Ray would run a lost task again by itself, and nobody would hear of it.
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(run)
        self._place: Any = None  # of the setup in Ray's store
        self._flight: _Flight | None = None
        self._open = False
        self._enter()

    def close(self) -> None:
        """Free what was put into the cluster; end it if it is ours alone."""
        if self._open:
            if self._flight:
                self._flight.cancel()
            self._flight = self._place = None
            self._open = False
            session.leave()

    def _enter(self) -> int:
        """Connect, if need be; how many tasks there may be at a time, which changes where a cluster grows."""
        if not self._open:
            session.enter(self._workers, self._address)
            self._open = True
        return self._workers or max(session.cpus(), 1)  # where there is none now, tasks wait for one

    def _map(self, what: str, messages: Mapping[int, Tree], t: int) -> Iterator[tuple[Job, Answer]]:
        size = self._enter()
        if self._place is None:
            self._place = self._ray.put(wrap_setup(self.setup))
        common, own = common_part(messages)
        shared = self._ray.put(wrap(common)) if common else None

        def start(job: Job) -> Any:
            work = Work(what, job.k, t, job.message, kept(self.setup, self.states, job.k))
            return self._task.remote([self._place], shared, wrap(work))

        self._flight = flight = _Flight(self._ray, own, start, size)
        try:
            yield from flight.answers()
        finally:  # left early: nobody waits for the other answers any more
            flight.cancel()
            if self._flight is flight:
                self._flight = None  # and with it what this round put into the store


class _Flight:
    """The tasks of one call, some at a time, and their answers in order."""

    def __init__(self, ray: ModuleType, messages: Mapping[int, Tree], start: Callable[[Job], Any], size: int) -> None:
        self._ray, self._start, self._size = ray, start, size
        self._jobs = deque(Job(place, k, message) for place, (k, message) in enumerate(messages.items()))
        self._flying: dict[Any, Job] = {}
        self._answers: dict[int, tuple[Job, Answer]] = {}
        of = ray.exceptions
        lost = (of.NodeDiedError, of.OutOfMemoryError, of.ObjectLostError, of.TaskCancelledError)
        self._deaths: tuple[type[Exception], ...] = (of.WorkerCrashedError, *lost)

    def answers(self) -> Iterator[tuple[Job, Answer]]:
        """In the order of the messages, whichever is ready first."""
        for due in range(len(self._jobs)):
            while due not in self._answers:
                self._submit(due)
                if due not in self._answers:
                    self._collect()
            self._submit(due)  # tasks first: the consumer may take its time
            yield self._answers.pop(due)

    def cancel(self) -> None:
        """Let all tasks go."""
        while self._flying:
            task, _ = self._flying.popitem()
            self._ray.cancel(task)

    def _submit(self, due: int) -> None:
        """Start tasks, ahead of the consumer but not so far that uploads pile up."""
        while self._jobs and len(self._flying) < self._size and self._jobs[0].place < due + AHEAD * self._size:
            job = self._jobs.popleft()
            try:
                self._flying[self._start(job)] = job
            except Stateless as error:
                self._answers[job.place] = (job, str(error))

    def _collect(self) -> None:
        """Wait until some task ends; one that died goes back to the front, or is given up."""
        (done, *_), _ = self._ray.wait(list(self._flying), num_returns=1)
        job = self._flying.pop(done)
        try:
            answer: Answer = unwrap(self._ray.get(done))
        except self._deaths as error:
            job = job._replace(deaths=(*job.deaths, self._reason(error)))
            if len(job.deaths) < TRIES:
                self._jobs.appendleft(job)
                return
            answer = f"{job.deaths[-1]}, {TRIES} times"
        except self._ray.exceptions.RayTaskError as error:  # e.g. this package is not installed there
            answer = f"its node cannot run it: {told(error.cause)}"
        self._answers[job.place] = (job, answer)

    def _reason(self, error: Exception) -> str:
        error.__traceback__ = None  # through it, a circle would keep what the task was given in the store
        kind = next(kind.__name__ for kind in self._deaths if isinstance(error, kind))
        return f"its worker or its node died ({kind})"


def make(setup: Setup, options: Options, states: States) -> Ray:
    """What the entry point offers."""
    return Ray(setup, options.workers, options.address, states)
