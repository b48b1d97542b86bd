"""A pool of worker processes, one thread each; messages and uploads pass through shared memory."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.engines.conduct import attempt, told
from lrbpfl.engines.deadlines import TICK, Deadlines, bound
from lrbpfl.engines.jobs import Job, Queue
from lrbpfl.engines.launch import Parcel, Pipe, Start, launch, method, pack, unpack
from lrbpfl.engines.pool import Answer, Pool
from lrbpfl.engines.slots import read, room, to_arrays, to_tensors, write
from lrbpfl.engines.work import (
    Evaluated,
    Setup,
    Stateless,
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


class Worker:
    """A process, the pipe to it and the block of memory they share."""

    def __init__(self, setup: Setup | Parcel, capacity: int, how: str) -> None:
        self.slot = torch.empty(capacity, dtype=torch.uint8).share_memory_()
        self.process, self.pipe = launch(how, serve, setup, self.slot)
        self.job: Job | None = None
        self.waited = 0.0  # seconds that the parent spent waiting for the answer

    def send(self, job: Job, message: Tree, state: Tree, seconds: float) -> None:
        """Hand over a job; a worker that takes none, dead or stuck for so long, shows when its answer is read."""
        self.job, self.waited = job, 0.0
        try:
            bound(self.pipe.end, seconds)
            self.pipe.send((job.what, write(message, self.slot), to_arrays(state), job.t, job.k))
        except OSError:
            self.process.kill()

    def receive(self) -> Answer | None:
        """The answer to the job, or None from a worker that died over it."""
        try:
            answer: Answer = self.pipe.recv()
        except Exception:  # it has gone, stopped in the middle of a word, or writes what nobody can read
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
        self.process.join(timeout=10)  # one that waits for a dead disk cannot even be killed
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
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    while True:
        try:
            what, places, arrays, t, k = pipe.recv()
        except (EOFError, OSError):
            return
        message, state = read(places, slot), to_tensors(arrays)
        answer = known if isinstance(known, str) else _answer(known, what, message, state, t, k, slot)
        try:
            pipe.send(answer)
        except OSError:
            return
        except Exception as error:  # of classes that cannot be sent
            pipe.send(told(error))


def _end_with(sentinel: int) -> None:
    """End this process when its parent does, even in the middle of an answer that nobody will read."""
    wait([sentinel])
    os._exit(1)


def _unpacked(setup: Setup | Parcel) -> Setup | str:
    """The setup, or why it cannot be read here, which is then the answer to every job."""
    try:
        return unpack(setup) if isinstance(setup, Parcel) else setup
    except Exception as error:  # e.g. a module that only the parent finds
        return f"its worker cannot read the setup: {told(error)}"


def _answer(setup: Setup, what: str, message: Tree, state: Tree, t: int, k: int, slot: Tensor) -> Answer:
    """Do one job; an update's upload is left in the slot if it fits (a valid one does: it has the message's size)."""

    def do() -> Answer:
        if what == "evaluate":
            evaluated = evaluate_client(setup, message, state, t, k)
            scaling = to_arrays(evaluated.scaling)
            return evaluated._replace(personal=to_arrays(evaluated.personal), scaling=scaling)
        trained = update_client(setup, message, state, t, k)
        fits = room(trained.upload) <= len(slot)
        upload = write(trained.upload, slot) if fits else to_arrays(trained.upload)
        return trained._replace(upload=upload, state=to_arrays(trained.state))

    return attempt(do)


def _obituary(worker: Worker, *, late: bool) -> str:
    """End a worker; what happened to it."""
    code = worker.stop()
    return f"its worker gave no answer for {worker.waited:.0f} s" if late else f"its worker died (exit code {code})"


class Processes(Pool):
    """Runs clients in `workers` processes, with the bits of the serial engine.

    A worker that dies, or does not answer within the deadline (seconds; 0: the rule in `Deadlines`), is replaced, and
    its client is run again: once more beside others, and then, as somebody else may have taken the memory or sent the
    signal, up to twice with nothing else at work. A client whose worker dies each of these four times is skipped in
    this round and, until it goes well, tried once a round, alone. One whose code raises is skipped in this round. The
    replies say so. How processes are started changes no bit.
    """

    def __init__(
        self, setup: Setup, workers: int, start: Start = "auto", states: States | None = None, deadline: float = 0.0
    ) -> None:
        if workers < 1:
            raise BadInput(f"{workers} workers cannot run anything: at least one is needed")
        # The first optimiser of a process imports for a second: do it here, before workers are forked.
        torch.optim.SGD([torch.zeros(1)], lr=0.0)
        self.setup = granted(setup)
        self._how = method(start, setup.device)
        self.states = states or Memory()
        self._size = workers
        self._workers: list[Worker] = []
        self._deadlines = Deadlines(self.setup, deadline)
        self._suspects: set[tuple[str, int]] = set()  # what was given up, and for whom

    def close(self) -> None:
        """End all workers."""
        while self._workers:
            self._workers.pop().stop()
        vars(self).pop("_parcel", None)

    def _map(self, what: str, messages: Mapping[int, Tree], t: int) -> Iterator[tuple[Job, Answer]]:
        jobs = (Job(place, what, k, t, suspect=(what, k) in self._suspects) for place, k in enumerate(messages))
        queue = Queue(jobs, window=4 * self._size)
        answers: dict[int, tuple[Job, Answer]] = {}
        self._hire(max(map(room, messages.values())), min(self._size, len(messages)))
        due = 0
        try:
            while due < len(messages):
                self._dispatch(queue, messages, due, answers)
                self._collect(queue, answers)
                self._dispatch(queue, messages, due, answers)  # workers first: the consumer may take its time
                while due in answers:
                    yield answers.pop(due)
                    due += 1
        finally:  # left early: nobody waits for these answers any more
            for worker in self._busy():
                self._workers.remove(worker)
                worker.stop()

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job is not None]

    def _dispatch(
        self, queue: Queue, messages: Mapping[int, Tree], due: int, answers: dict[int, tuple[Job, Answer]]
    ) -> None:
        """Give jobs to idle workers."""
        for worker in self._workers:
            while worker.job is None and (job := queue.next(due, [busy.job for busy in self._busy() if busy.job])):
                try:
                    state = kept(self.setup, self.states, job.k)
                except Stateless as error:
                    answers[job.place] = (job, str(error))
                else:
                    worker.send(job, messages[job.k], state, self._deadlines.limit(job))

    def _collect(self, queue: Queue, answers: dict[int, tuple[Job, Answer]]) -> None:
        """Wait until some worker answers, dies or is late; the job of one that is gone is queued again, or given up."""
        ready = self._wait()
        for i, worker in enumerate(self._workers):
            late = worker.pipe.end not in ready
            if (job := worker.job) is None or (late and worker.waited < self._deadlines.limit(job)):
                continue
            answer = None if late else worker.receive()
            if answer is None:
                job = job._replace(deaths=(*job.deaths, _obituary(worker, late=late)))
                self._workers[i] = self._worker(len(worker.slot))
                if job.verdict is None:
                    queue.back(job)
                    continue
                self._suspects.add((job.what, job.k))
            else:
                self._suspects.discard((job.what, job.k))
                if not isinstance(answer, str):  # what failed may have taken no time
                    self._deadlines.learn(job, max(worker.waited, answer.seconds))
            answers[job.place] = (job, answer or job.verdict or "")

    def _wait(self) -> list[Any]:
        """The ends of pipes that have something to say, after a second at most."""
        busy = [(worker, job) for worker in self._workers if (job := worker.job)]
        left = [self._deadlines.limit(job) - worker.waited for worker, job in busy]
        began = time.monotonic()
        ready = wait([worker.pipe.end for worker, _ in busy], timeout=max(0.0, min([TICK, *left])))
        passed = min(time.monotonic() - began, 2 * TICK)  # not what passed while this process, too, was stopped
        for worker, _ in busy:
            worker.waited += passed
        return ready

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
