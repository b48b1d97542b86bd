"""Whatever a client does, every engine treats it alike, and nobody else is worse off."""

import json
import math
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrbpfl import trees
from lrbpfl.engines import conduct
from lrbpfl.engines.conduct import attempt, lent_data, told
from lrbpfl.engines.loop import Engine, Round, federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput
from lrbpfl.journal import Journal
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, kept, line, same_rounds
from tests.engines.rogues import DICE, FAIL, HARMLESS, Drawn, Meddler, Mute, Rogue, Stillborn


def rogue(way: str = "well", **scripted: Any) -> Setup:
    """Always with the same model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return line(Rogue(way=way, **scripted))


def run(engine: Engine) -> tuple[list[Round], dict[int, Tree]]:
    with closing(engine):
        return list(federate(engine, rounds=3, cohort=4, evaluate_every=2)), kept(engine)


def both(setup: Setup) -> tuple[list[Round], dict[int, Tree]]:
    """The rounds, and what clients keep, which are the same in one worker, where all share a process, and in two."""
    rounds, states = run(Serial(setup))
    for workers in (1, 2):
        others, states_too = run(Processes(setup, workers))
        assert same_rounds(rounds, others)
        assert trees.equal(states, states_too)
        assert not any(ended.retried for ended in others)
    return rounds, states


@pytest.mark.parametrize("way", FAIL)
def test_a_client_that_fails_in_its_own_way_is_skipped_and_named(way: str) -> None:
    rounds, states = both(rogue(way))
    expected, _ = run(Serial(rogue(update="raise", culprits=(1,))))
    for ended, other in zip(rounds, expected, strict=True):
        assert list(ended.failures) == [1] and ended.failures[1].startswith(FAIL[way][1])
        assert trees.equal(ended.server, other.server)
        assert ended.infos == other.infos
    assert list(states) == [0, 2, 3]


@pytest.mark.parametrize("way", HARMLESS)
def test_what_a_client_changes_is_its_own(way: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    rounds, states = both(rogue(way))
    expected, states_too = run(Serial(rogue()))
    for ended, other in zip(rounds, expected, strict=True):
        assert not ended.failures
        assert trees.equal(ended.server, other.server)
        assert {k: ended.infos[k] for k in (0, 2, 3)} == {k: other.infos[k] for k in (0, 2, 3)}
    assert trees.equal(states, states_too)
    assert not any(leaf.requires_grad for leaf in trees.leaves((states, rounds[-1].server)))
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize("dice", DICE)
def test_who_draws_from_everybodys_dice_gets_the_same_numbers_anywhere(dice: str) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state(legacy=True)
    rounds, _ = both(rogue(dice))
    assert not rounds[-1].failures
    assert torch.equal(before[0], torch.get_rng_state())
    assert str(before[1]) == str(np.random.get_state(legacy=True))


def test_what_is_changed_while_a_model_is_made_and_tried_is_a_copy_too() -> None:
    setup = line(Meddler())
    before = trees.tree_map(torch.clone, (setup.clients[0].train, setup.clients[0].test))
    rounds, states = both(setup)
    honest, states_too = run(Serial(line(Scripted())))
    assert trees.equal((setup.clients[0].train, setup.clients[0].test), before)
    assert trees.equal(states, states_too) and trees.equal(rounds[-1].server, honest[-1].server)
    for k, evaluation in rounds[-1].evaluations.items():
        assert evaluation.result is not None
        own = evaluation.result.personal
        assert ("w" in own) == (k > 0), "client 0 adds 0, and its network is still the server's"
        assert k == 0 or torch.equal(own["w"], rounds[-1].server["w"] + k)
        assert evaluation.result.predictions.y.tolist() == [0, 1, 0]


def test_a_client_without_a_first_state_is_skipped_and_not_judged() -> None:
    rounds, _ = both(line(Stillborn(), clients=6))
    failures = {k: reason for ended in rounds for k, reason in ended.failures.items()}
    assert 0 < len(failures) < 6
    assert set(failures.values()) == {"SystemExit: 3"}
    assert {k for k, evaluation in rounds[-1].evaluations.items() if evaluation.failure} >= failures.keys()


def test_first_states_may_be_of_any_number_format_and_are_the_same_anywhere() -> None:
    rounds, states = both(line(Drawn()))
    assert not rounds[-1].failures
    assert states[0]["seen"].dtype == torch.bfloat16


def test_odd_infos_become_numbers_or_gaps(tmp_path: Path) -> None:
    rounds, _ = both(rogue("infos"))
    info = rounds[0].infos[1]
    numbers = {name: value for name, value in info.items() if not math.isnan(value)}
    assert all(type(value) is float for value in info.values())
    name = next(name for name in numbers if name.startswith("bell"))
    assert len(name) <= 100 and name.isprintable()
    assert numbers == {"half": 0.5, "two": 2.0, "one": 1.0, "yes": 1.0, "7": 7.0, name: 1.0}
    assert info.keys() - numbers.keys() == {"word", "none", "huge", "nan", "complex"}
    Journal(tmp_path / "record").append([info])
    assert json.loads((tmp_path / "record").read_text())["huge"] is None


def test_an_interrupt_by_the_user_ends_the_run_whatever_the_client_makes_of_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what started us may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(Serial(rogue("signal")))
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_another_handler_raises_is_not_the_clients_either() -> None:
    def bell(number: int, frame: object) -> None:
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGUSR1, bell)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            attempt(lambda: signal.raise_signal(signal.SIGUSR1))
        assert signal.getsignal(signal.SIGUSR1) is bell
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_clients_may_run_in_a_thread() -> None:
    found: list[list[Round]] = []
    thread = threading.Thread(target=lambda: found.append(run(Serial(rogue("interrupt")))[0]))
    thread.start()
    thread.join()
    assert [list(ended.failures) for ended in found[0]] == [[1], [1], [1]]


def test_data_too_large_to_be_copied_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "DATA", 8)
    data = {"x": torch.zeros(100_000), "y": torch.zeros(3)}
    with lent_data(data, "cpu") as same:
        assert same["x"].data_ptr() == data["x"].data_ptr()
    with pytest.raises(BadInput, match="changed in place"), lent_data(data, "cpu") as same:
        same["x"][77:78].add_(1)
    with pytest.raises(BadInput, match="changed in place"), lent_data(data, "cpu") as same:
        np.add(same["x"].numpy(), 1, out=same["x"].numpy())


SECRETS = torch.arange(40) % 7 + 0.25


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(f"labels {SECRETS.tolist()} are wrong"), "ValueError: labels [...] are wrong"),
        (ValueError(f"labels {SECRETS} are wrong"), "ValueError: labels ... are wrong"),
        (ValueError(f"labels {SECRETS.numpy()} are wrong"), "ValueError: labels [...] are wrong"),
        (ValueError(SECRETS[:2].numpy()), "ValueError: [0.25 1.25]"),  # a few numbers are told, as shapes are
        (RuntimeError("shape '[2, 3]' is invalid for input of size 7"), None),
        (LookupError("the disk\n  is\x1b[2J gone\r"), "LookupError: the disk is\N{REPLACEMENT CHARACTER}[2J gone"),
        (Mute(), "Mute"),
        (KeyError(), "KeyError"),
    ],
)
def test_what_is_told_of_an_exception_is_a_short_line_without_data(error: Exception, expected: str | None) -> None:
    assert told(error) == (expected or f"{type(error).__name__}: {error}")


def test_a_long_text_is_cut() -> None:
    long = type("E" * 500, (Exception,), {})
    assert len(told(long("word " * 100_000))) < 310
