"""A pool of worker processes, one thread each; messages and uploads pass through shared memory."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import wait
from typing import NamedTuple

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.engines.launch import Parcel, Pipe, Start, launch, method, pack, unpack
from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.slots import read, room, to_arrays, to_tensors, write
from lrbpfl.engines.work import (
    Evaluated,
    Setup,
    Trained,
    evaluate_client,
    granted,
    keep_memory,
    kept,
    update_client,
)
from lrbpfl.errors import BadInput
from lrbpfl.states import Memory, States
from lrbpfl.trees import Tree

TRIES = 2  # a client whose worker died is run once more in a new one; if that dies too, it is skipped


class Job(NamedTuple):
    """One call for one client, with its place in the order of answers."""

    place: int
    what: str  # "update" or "evaluate"
    k: int
    t: int
    deaths: tuple[str, ...] = ()


Answer = Trained | Evaluated | str  # the string says what the client's code raised


class Worker:
    """A process, the pipe to it and the block of memory they share."""

    def __init__(self, setup: Setup | Parcel, capacity: int, how: str) -> None:
        self.slot = torch.empty(capacity, dtype=torch.uint8).share_memory_()
        self.process, self.pipe = launch(how, serve, setup, self.slot)
        self.job: Job | None = None

    def send(self, job: Job, message: Tree, state: Tree) -> None:
        """Hand over a job; that the worker is dead already shows when its answer is read."""
        self.job = job
        with suppress(OSError):
            self.pipe.send((job.what, write(message, self.slot), to_arrays(state), job.t, job.k))

    def receive(self) -> Answer | None:
        """The answer to the job, or None from a worker that died over it."""
        try:
            answer: Answer = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.job = None
        if isinstance(answer, Evaluated):
            return answer._replace(personal=to_tensors(answer.personal), scaling=to_tensors(answer.scaling))
        if isinstance(answer, Trained):  # the slot is needed for the next job: copy the upload out of it
            upload = trees.tree_map(torch.clone, to_tensors(read(answer.upload, self.slot)))
            return answer._replace(upload=upload, state=to_tensors(answer.state))
        return answer

    def stop(self) -> int | None:
        """End the process, whatever it is doing; its exit code (negative: the signal that killed it)."""
        self.process.join(timeout=0 if self.process.is_alive() else 10)
        self.process.kill()
        self.process.join()
        self.pipe.end.close()
        return self.process.exitcode


def serve(setup: Setup | Parcel, pipe: Pipe, slot: Tensor) -> None:
    """The life of a worker: take a job, do it, answer; end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    keep_memory()
    known = _unpacked(setup)
    parent = multiprocessing.parent_process()
    assert parent is not None
    while pipe.end in wait([pipe.end, parent.sentinel]):
        try:
            what, places, arrays, t, k = pipe.recv()
            message, state = read(places, slot), to_tensors(arrays)
            pipe.send(known if isinstance(known, str) else _answer(known, what, message, state, t, k, slot))
        except (EOFError, OSError):
            return


def _unpacked(setup: Setup | Parcel) -> Setup | str:
    """The setup, or why it cannot be read here, which is then the answer to every job."""
    try:
        return unpack(setup) if isinstance(setup, Parcel) else setup
    except Exception as error:  # e.g. a module that only the parent finds
        return f"its worker cannot read the setup: {type(error).__name__}: {error}"


def _answer(setup: Setup, what: str, message: Tree, state: Tree, t: int, k: int, slot: Tensor) -> Answer:
    """Do one job; an update's upload is left in the slot if it fits (a valid one does: it has the message's size)."""
    try:
        message = trees.tree_map(torch.clone, message)  # what the client keeps of it must outlive the slot
        if what == "evaluate":
            evaluated = evaluate_client(setup, message, state, t, k)
            scaling = to_arrays(evaluated.scaling)
            return evaluated._replace(personal=to_arrays(evaluated.personal), scaling=scaling)
        trained = update_client(setup, message, state, t, k)
        fits = room(trained.upload) <= len(slot)
        upload = write(trained.upload, slot) if fits else to_arrays(trained.upload)
        return trained._replace(upload=upload, state=to_arrays(trained.state))
    except Exception as error:  # whatever a client's code raises must not end the run
        return f"{type(error).__name__}: {error}"


class Processes:
    """Runs clients in `workers` processes, with the bits of the serial engine.

    A worker that dies is replaced and its client run once more; a client whose worker dies twice, or whose code raises,
    is skipped in this round. The replies say so. How processes are started changes no bit.
    """

    def __init__(self, setup: Setup, workers: int, start: Start = "auto", states: States | None = None) -> None:
        if workers < 1:
            raise BadInput(f"{workers} workers cannot run anything: at least one is needed")
        # The first optimiser of a process imports for a second: do it here, before workers are forked.
        torch.optim.SGD([torch.zeros(1)], lr=0.0)
        self.setup = granted(setup)
        self._how = method(start, setup.device)
        self.states = states or Memory()
        self._size = workers
        self._workers: list[Worker] = []

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """The clients' replies, in the order of the messages."""
        for job, answer in self._map("update", messages, t):
            if isinstance(answer, Trained):
                self.states.stage(job.k, t + 1, answer.state)
                yield Reply.of(job.k, answer, job.deaths)
            else:
                yield Reply.failed(job.k, str(answer), job.deaths)

    def accept(self, k: int) -> None:
        """The server took client k's upload: keep the state that came with it."""
        self.states.accept(k)

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """The clients' evaluations, in the order of the messages."""
        for job, answer in self._map("evaluate", messages, t):
            if isinstance(answer, Evaluated):
                yield Evaluation(job.k, answer)
            else:
                yield Evaluation(job.k, None, str(answer))

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop().stop()
        vars(self).pop("_parcel", None)

    def _map(self, what: str, messages: Mapping[int, Tree], t: int) -> Iterator[tuple[Job, Answer]]:
        jobs = deque(Job(place, what, k, t) for place, k in enumerate(messages))
        answers: dict[int, tuple[Job, Answer]] = {}
        self._hire(max(map(room, messages.values())), min(self._size, len(jobs)))
        due = 0
        try:
            while due < len(messages):
                self._dispatch(jobs, messages, due)
                self._collect(jobs, answers)
                self._dispatch(jobs, messages, due)  # workers first: the consumer may take its time
                while due in answers:
                    yield answers.pop(due)
                    due += 1
        finally:  # left early: nobody waits for these answers any more
            for worker in [worker for worker in self._workers if worker.job is not None]:
                self._workers.remove(worker)
                worker.stop()

    def _dispatch(self, jobs: deque[Job], messages: Mapping[int, Tree], due: int) -> None:
        """Give jobs to idle workers, ahead of the consumer but not so far that uploads pile up."""
        for worker in self._workers:
            if worker.job is None and jobs and jobs[0].place < due + 4 * self._size:
                job = jobs.popleft()
                worker.send(job, messages[job.k], kept(self.setup, self.states, job.k))

    def _collect(self, jobs: deque[Job], answers: dict[int, tuple[Job, Answer]]) -> None:
        """Wait until some worker answers or dies; a dead one's job goes back to the front, or is given up."""
        ready = wait([worker.pipe.end for worker in self._workers if worker.job is not None])
        for i, worker in enumerate(self._workers):
            if worker.pipe.end not in ready or worker.job is None:
                continue
            job, answer = worker.job, worker.receive()
            if answer is None:
                job = job._replace(deaths=(*job.deaths, f"its worker died (exit code {worker.stop()})"))
                self._workers[i] = self._worker(len(worker.slot))
                if len(job.deaths) < TRIES:
                    jobs.appendleft(job)
                    continue
                answer = f"{job.deaths[-1]}, {TRIES} times"
            answers[job.place] = (job, answer)

    def _hire(self, capacity: int, number: int) -> None:
        """At least this many workers, each with a block that holds a message."""
        if any(len(worker.slot) < capacity for worker in self._workers):
            self.close()
        while len(self._workers) < number:
            self._workers.append(self._worker(max(capacity, 1)))

    def _worker(self, capacity: int) -> Worker:
        return Worker(self.setup if self._how == "fork" else self._parcel, capacity, self._how)

    @cached_property
    def _parcel(self) -> Parcel:
        return pack(self.setup)
