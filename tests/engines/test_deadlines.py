"""Workers that hang are ended, honest ones are not; who is given up was tried alone."""

import itertools
import math
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lrbpfl.engines import deadlines
from lrbpfl.engines.deadlines import Deadlines
from lrbpfl.engines.jobs import Job, Queue
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from tests.engines.fakes import Hoarder, Scripted, calls, line, same_rounds


def late(reason: str) -> bool:
    return reason.startswith("its worker gave no answer for ")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_stopped_is_ended_and_its_client_run_again(workers: int, tmp_path: Path) -> None:
    setup = line(Scripted(update="stop once", culprits=(1,), marker=str(tmp_path / "marker")))
    with closing(Processes(setup, workers, deadline=2)) as engine:
        rounds = list(federate(engine, rounds=2, cohort=4))
    assert same_rounds(rounds, list(federate(Serial(line(Scripted())), rounds=2, cohort=4)))
    assert list(rounds[0].retried) == [1] and late(rounds[0].retried[1])


def test_a_client_that_never_ends_is_skipped_after_four_tries(tmp_path: Path) -> None:
    setup = line(Scripted(predicting="spin", culprits=(1,), marker=str(tmp_path / "marker")))
    with closing(Processes(setup, 2, deadline=0.5)) as engine:
        (only,) = federate(engine, rounds=1, cohort=4)
    assert late(only.evaluations[1].failure or "")
    assert calls(tmp_path / "marker") == 4
    assert all(only.evaluations[k].result for k in (0, 2, 3))


def test_a_worker_stopped_between_rounds_cannot_block_its_parent() -> None:
    """A state larger than any pipe's buffer is on its way to a worker that does not read."""
    sent = {0: {"a": torch.ones(10**6), "b": torch.ones(10**6)}}
    with closing(Processes(line(Hoarder(), clients=1), 1, deadline=1)) as engine:
        engine.states.stage(0, 1, sent[0])
        engine.accept(0)
        (first,) = engine.update(sent, 0)
        assert engine._workers[0].process.pid is not None
        os.kill(engine._workers[0].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        (second,) = engine.update(sent, 1)
        assert time.monotonic() - began < 30
    assert first.update is not None and second.update is not None
    assert len(second.deaths) == 1


def test_time_while_the_parent_was_stopped_too_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stops all, and who goes on an hour later goes on with the same workers."""
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    setup = line(Scripted(update="sleep", culprits=(0, 1, 2, 3)))
    with closing(Processes(setup, 2, deadline=100)) as engine:
        (only,) = federate(engine, rounds=1, cohort=4)
    assert not only.retried and not only.failures


def test_two_kills_beside_others_and_one_alone_skip_nobody(tmp_path: Path) -> None:
    setup = line(Scripted(update="die thrice", culprits=(1,), marker=str(tmp_path / "marker")))
    with closing(Processes(setup, 2)) as engine:
        rounds = list(federate(engine, rounds=2, cohort=4))
    assert same_rounds(rounds, list(federate(Serial(line(Scripted())), rounds=2, cohort=4)))
    assert [list(ended.retried) for ended in rounds] == [[1], []]


def test_a_client_that_goes_well_again_is_no_suspect_any_more(tmp_path: Path) -> None:
    setup = line(Scripted(update="die", culprits=(1,), marker=str(tmp_path / "marker")))
    with closing(Processes(setup, 2)) as engine:
        (first,) = federate(engine, rounds=1, cohort=4)
        engine.setup = engine.setup._replace(algorithm=Scripted())
        engine._workers, gone = [], engine._workers
        for worker in gone:
            worker.stop()
        well = next(federate(engine, rounds=9, cohort=4, start=(1, first.server)))
    assert list(first.failures) == [1] and not well.failures
    assert not engine._suspects


def dead(job: Job, times: int) -> Job:
    return job._replace(deaths=times * ("its worker died",))


def test_who_is_run_alone_waits_for_the_others_and_they_for_it() -> None:
    first, second, third = (Job(place, "update", k=place, t=0) for place in range(3))
    queue = Queue([first, second, third], window=2)
    assert queue.next(0, []) == first
    assert queue.next(0, [first]) == second
    assert queue.next(0, [first, second]) is None, "the third is beyond the window"
    queue.back(dead(first, 1))
    assert queue.next(0, [second]) == dead(first, 1), "once more beside others"
    queue.back(dead(first, 2))
    assert queue.next(0, [second]) is None
    lone = queue.next(0, [])
    assert lone == dead(first, 2)
    assert queue.next(1, [lone]) is None, "nobody beside it"
    assert queue.next(1, []) == third


def test_tries_are_bounded() -> None:
    job = Job(0, "update", k=0, t=0)
    assert [dead(job, n).verdict for n in range(4)] == 4 * [None]
    assert dead(job, 4).verdict == "its worker died, 4 times"
    assert dead(job._replace(suspect=True), 1).verdict == "its worker died, as it did before"


def test_by_default_a_job_has_a_multiple_of_what_the_longest_took() -> None:
    setup = line(Scripted(), clients=9)  # client k has 4 + k examples, and 3 for testing
    small, big = Job(0, "update", k=0, t=0), Job(1, "update", k=4, t=0)
    rule = Deadlines(setup)
    assert rule.limit(small) == 3600, "nothing is known"
    rule.learn(small, 0.1)
    assert rule.limit(small) == 60
    assert [rule.limit(dead(small, n)) for n in (1, 2, 3)] == [120, 240, 480]
    rule.learn(small, 30)
    rule.learn(small, 2)
    assert rule.limit(small) == 600
    assert rule.limit(big) == 2400, "twice the examples, four times as long"
    assert rule.limit(small._replace(what="evaluate")) == 3600, "another kind of job"
    rule.learn(big, 31)
    assert rule.limit(small) == rule.limit(big) == 620
    assert Deadlines(setup, 7).limit(dead(small, 3)) == 7


def test_the_first_limit_shrinks_once_others_have_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of two workers hangs from the start: what the other one learns is enough to notice."""
    monkeypatch.setattr(deadlines, "FLOOR", 1.0)
    setup = line(Scripted(update="stop once", culprits=(0,), marker=str(tmp_path / "marker")))
    with closing(Processes(setup, 2)) as engine:
        (only,) = federate(engine, rounds=1, cohort=4)
    assert late(only.retried[0]) and not only.failures


def test_what_a_client_raised_at_once_says_nothing_about_the_time_it_takes() -> None:
    with closing(Processes(line(Scripted(update="raise", culprits=(0, 1))), 1)) as engine:
        replies = engine.update({k: {"w": torch.zeros(3)} for k in (0, 1)}, 0)
        assert all(reply.failure for reply in replies)
        assert engine._deadlines.limit(Job(0, "update", k=2, t=0)) == 3600


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_deadline_that_cannot_be_kept_is_refused(seconds: float) -> None:
    with pytest.raises(BadInput, match="a deadline of"):
        Processes(line(Scripted()), 1, deadline=seconds)
