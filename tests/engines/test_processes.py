"""Workers die, clients raise, consumers leave: the run goes on, says so, and keeps its bits."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lrbpfl import trees
from lrbpfl.engines.loop import Reply, Round, federate
from lrbpfl.engines.processes import Processes, Worker
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput
from lrbpfl.trees import Tree
from tests.engines.fakes import Hoarder, Scripted, calls, kept, line, same_rounds

DEATH = "its worker died (exit code -9)"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def run(setup: Setup, workers: int = 2, rounds: int = 3) -> list[Round]:
    with closing(Processes(setup, workers)) as engine:
        return list(federate(engine, rounds=rounds, cohort=4, evaluate_every=2))


def undisturbed(rounds: int = 3) -> list[Round]:
    return list(federate(Serial(line(Scripted())), rounds=rounds, cohort=4, evaluate_every=2))


def pid(worker: Worker) -> int:
    assert worker.process.pid is not None
    return worker.process.pid


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_client_whose_worker_is_killed_runs_once_more(workers: int, marker: Path) -> None:
    rounds = run(line(Scripted(update="die once", culprits=(1,), marker=str(marker))), workers)
    assert [ended.retried for ended in rounds] == [{1: DEATH}, {}, {}]
    assert same_rounds(rounds, undisturbed())
    assert calls(marker) == 4  # killed, run again, and the two rounds after


def test_a_killed_client_is_run_again_before_the_many_that_wait(marker: Path) -> None:
    setup = line(Scripted(update="die once", culprits=(0,), marker=str(marker)), clients=12)
    with closing(Processes(setup, 1)) as engine:
        (only,) = federate(engine, rounds=1, cohort=12)
    (expected,) = federate(Serial(line(Scripted(), clients=12)), rounds=1, cohort=12)
    assert same_rounds([only], [expected])
    assert only.retried == {0: DEATH}


def test_a_client_that_kills_every_worker_is_skipped_and_named(marker: Path) -> None:
    rounds = run(line(Scripted(update="die", culprits=(2,), marker=str(marker))))
    again = f"{DEATH}, as it did before"
    assert [ended.failures for ended in rounds] == [{2: f"{DEATH}, 4 times"}, {2: again}, {2: again}]
    assert [ended.retried for ended in rounds] == 3 * [{2: DEATH}]
    assert [ended.accepted for ended in rounds] == 3 * [[0, 1, 3]]
    assert calls(marker) == 6  # four times in the first round, once in the others
    assert len(rounds[-1].evaluations) == 4


def test_all_clients_may_kill_their_workers(marker: Path) -> None:
    (only,) = run(line(Scripted(update="die", culprits=(0, 1, 2, 3), marker=str(marker))), rounds=1)
    assert list(only.failures) == [0, 1, 2, 3]
    assert calls(marker) == 16
    assert all(evaluation.result for evaluation in only.evaluations.values())


def test_a_client_that_raises_is_skipped_with_what_it_raised(marker: Path) -> None:
    rounds = run(line(Scripted(update="raise", culprits=(0,), marker=str(marker))))
    assert [ended.failures for ended in rounds] == 3 * [{0: "LookupError: the disk is gone"}]
    assert all(not ended.retried for ended in rounds)
    assert calls(marker) == 3  # what raised once would raise again


def test_a_client_that_died_and_then_raised_is_named_for_both(marker: Path) -> None:
    (only,) = run(line(Scripted(update="die, then raise", culprits=(3,), marker=str(marker))), rounds=1)
    assert only.failures == {3: "LookupError: the disk is gone"}
    assert only.retried == {3: DEATH}


def test_a_worker_killed_while_it_judges_is_replaced(marker: Path) -> None:
    rounds = run(line(Scripted(predicting="die once", culprits=(1,), marker=str(marker))))
    assert same_rounds(rounds, undisturbed())
    assert calls(marker) == 3


def test_a_client_that_cannot_be_judged_is_named() -> None:
    rounds = run(line(Scripted(predicting="die", culprits=(1,))))
    evaluation = rounds[-1].evaluations[1]
    assert (evaluation.result, evaluation.failure) == (None, f"{DEATH}, as it did before")
    assert all(rounds[-1].evaluations[k].result for k in (0, 2, 3))


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_workers_killed_from_outside_between_rounds_are_replaced(victims: list[int]) -> None:
    rounds = []
    with closing(Processes(line(Scripted()), 2)) as engine:
        for ended in federate(engine, rounds=3, cohort=4, evaluate_every=2):
            rounds.append(ended)
            for i in victims:
                os.kill(pid(engine._workers[i]), signal.SIGKILL)
    assert same_rounds(rounds, undisturbed())


def test_an_interrupt_is_left_to_the_parent() -> None:
    rounds = []
    with closing(Processes(line(Scripted()), 2)) as engine:
        for ended in federate(engine, rounds=3, cohort=4, evaluate_every=2):
            rounds.append(ended)
            for worker in engine._workers:
                os.kill(pid(worker), signal.SIGINT)
    assert same_rounds(rounds, undisturbed())
    assert not any(ended.retried for ended in rounds)


def test_closing_ends_all_workers() -> None:
    engine = Processes(line(Scripted(update="sleep", culprits=(0, 1, 2, 3))), 3)
    replies = engine.update(messages(engine.setup, 0), 0)
    next(replies)
    assert len(multiprocessing.active_children()) == 3
    engine.close()  # while they work
    assert multiprocessing.active_children() == []
    engine.close()


def test_a_closed_engine_can_be_used_again() -> None:
    engine = Processes(line(Scripted()), 2)
    first = list(federate(engine, rounds=1, cohort=4))
    engine.close()
    kept(engine).clear()
    assert same_rounds(list(federate(engine, rounds=1, cohort=4)), first)
    engine.close()
    assert multiprocessing.active_children() == []


def test_there_are_never_more_workers_than_jobs() -> None:
    with closing(Processes(line(Scripted()), 8)) as engine:
        next(federate(engine, rounds=2, cohort=3))
        assert len(multiprocessing.active_children()) == 3


@pytest.mark.parametrize("workers", [0, -1])
def test_an_engine_without_workers_is_refused(workers: int) -> None:
    with pytest.raises(BadInput, match=f"{workers} workers"):
        Processes(line(Scripted()), workers)


def messages(setup: Setup, t: int, size: int = 3) -> dict[int, Tree]:
    """A message of any size to everybody; `Scripted` takes them all."""
    return {k: {"w": torch.full((size,), float(10 * t + k))} for k in range(len(setup.clients))}


def uploads(replies: list[Reply]) -> list[Tree]:
    return [reply.update.upload if reply.update else reply.failure for reply in replies]


def test_leaving_early_leaves_no_stale_answers() -> None:
    setup = line(Scripted(update="sleep", culprits=(1, 3)), clients=6)
    with closing(Processes(setup, 3)) as engine:
        for t in range(4):
            replies = engine.update(messages(setup, t), t)
            assert next(replies).client_id == 0
            assert isinstance(replies, Generator)
            replies.close()
        found = list(engine.update(messages(setup, 9), 9))
    expected = list(Serial(setup).update(messages(setup, 9), 9))
    assert [reply.client_id for reply in found] == list(range(6))
    assert trees.equal(tuple(uploads(found)), tuple(uploads(expected)))


@pytest.mark.parametrize("sizes", [(3, 5_000, 3, 20_000), (20_000, 3)])
def test_messages_may_grow_from_round_to_round(sizes: tuple[int, ...]) -> None:
    setup = line(Scripted())
    with closing(Processes(setup, 2)) as engine:
        for t, size in enumerate(sizes):
            sent = messages(setup, t, size)
            found, expected = list(engine.update(sent, t)), list(Serial(setup).update(sent, t))
            assert trees.equal(tuple(uploads(found)), tuple(uploads(expected)))


def test_a_worker_hired_for_small_messages_gets_room_for_big_ones() -> None:
    setup = line(Scripted())
    small, big = messages(setup, 0, 3), messages(setup, 0, 5_000)
    with closing(Processes(setup, 2)) as engine:
        for sent in ({0: big[0]}, {0: small[0], 1: small[1]}, {0: big[0], 1: big[1]}):
            found, expected = list(engine.update(sent, 0)), list(Serial(setup).update(sent, 0))
            assert trees.equal(tuple(uploads(found)), tuple(uploads(expected)))


def test_an_upload_bigger_than_its_message_still_arrives() -> None:
    setup = line(Scripted(update="big", culprits=(1,)))
    with closing(Processes(setup, 2)) as engine:
        replies = list(engine.update(messages(setup, 0), 0))
    assert uploads(replies)[1]["w"].shape == (10_000,)
    assert trees.equal(uploads(replies)[1], {"w": torch.ones(10_000)})


def test_an_upload_outlives_the_next_job() -> None:
    setup = line(Scripted())
    with closing(Processes(setup, 1)) as engine:
        first = list(engine.update(messages(setup, 0), 0))
        before = [trees.tree_map(torch.clone, upload) for upload in uploads(first)]
        list(engine.update(messages(setup, 1), 1))
        assert trees.equal(tuple(uploads(first)), tuple(before))


def test_states_pass_through_the_pipe_bit_for_bit() -> None:
    payload = torch.tensor([0x7F7FFFFF, 0x7F800000, -0x800000, -0x80000000, 1], dtype=torch.int32)
    strange = payload.view(torch.float32)  # the largest number, both infinities, -0, the smallest number
    with closing(Processes(line(Hoarder(), clients=1), 1)) as engine:
        (reply,) = engine.update({0: {"a": strange, "b": torch.zeros(5)}}, 0)
        engine.accept(0)
        assert trees.equal(kept(engine)[0]["a"], strange)
        (evaluation,) = engine.evaluate({0: {"a": torch.zeros(5), "b": torch.zeros(5)}}, 0)
    assert evaluation.result is not None
    assert trees.equal(evaluation.result.personal["old/a"], strange)
    assert reply.update is not None
    assert trees.equal(reply.update.upload["b"], strange)


def test_workers_can_be_forked_from_a_parent_that_used_many_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.rand(600, 600) @ torch.rand(600, 600)
        found = run(line(Scripted()))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert same_rounds(found, undisturbed())


def test_a_slow_first_client_does_not_stop_the_many_that_wait() -> None:
    """The others run ahead until the window is full, and go on once it is delivered."""
    setup = line(Scripted(update="sleep", culprits=(0,)), clients=20)
    with closing(Processes(setup, 2)) as engine:
        (only,) = federate(engine, rounds=1, cohort=20)
    (expected,) = federate(Serial(line(Scripted(), clients=20)), rounds=1, cohort=20)
    assert same_rounds([only], [expected])


ORPHANS = """
import multiprocessing, sys, time
import torch
from lrbpfl.engines.processes import Processes
from tests.engines.fakes import Hoarder, line

message = {"a": torch.zeros(500_000), "b": torch.zeros(500_000)}  # its state fills any pipe
engine = Processes(line(Hoarder(), clients=4), 2)
replies = engine.update(dict.fromkeys(range(4), message), 0)
next(replies)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
time.sleep(60)  # nobody reads what the workers say now
"""


def is_there(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_with_their_parent_even_in_the_middle_of_an_answer() -> None:
    command = [sys.executable, "-c", ORPHANS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        workers = [int(number) for number in parent.stdout.readline().split()]
        time.sleep(1)
        parent.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(is_there, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [number for number in workers if is_there(number)]
