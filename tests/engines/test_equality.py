"""The same seed gives the same bits, whatever runs the clients."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing

import pytest
from torch import nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.engines.launch import Start
from lrbpfl.engines.loop import Engine, Round, federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup
from lrbpfl.models import cnn
from lrbpfl.trees import Tree
from tests.engines.fakes import Hoarder, Scripted, kept, line, noise, same_rounds


def run(engine: Engine, rounds: int = 3, cohort: int = 3) -> tuple[list[Round], dict[int, Tree]]:
    with closing(engine):
        return list(federate(engine, rounds=rounds, cohort=cohort)), kept(engine)


def small(name: str, clients: int = 4) -> Setup:
    layers = OrderedDict(fc1=nn.Linear(5, 8), relu=nn.ReLU(), fc2=nn.Linear(8, 3))
    return noise(ALGORITHMS[name](), nn.Sequential(layers), (5,), clients)


def assert_engines_agree(setup: Setup, *others: Callable[[Setup], Engine], rounds: int = 3) -> None:
    expected, states = run(Serial(setup), rounds)
    assert not expected[-1].failures
    assert all(evaluation.result for evaluation in expected[-1].evaluations.values())
    for other in others:
        found, states_too = run(other(setup), rounds)
        assert same_rounds(found, expected)
        assert states.keys() == states_too.keys()
        assert all(trees.equal(states[k], states_too[k]) for k in states)


def pool(workers: int) -> Callable[[Setup], Engine]:
    return lambda setup: Processes(setup, workers)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_workers_give_the_bits_of_the_serial_engine(name: str) -> None:
    assert_engines_agree(small(name), pool(2))


def test_so_do_one_and_four() -> None:
    assert_engines_agree(small("lr-bpfl"), pool(1), pool(4))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_seed_gives_other_bits(name: str) -> None:
    setup = small(name)
    one, two = (run(Serial(f), rounds=1, cohort=4) for f in (setup, setup._replace(seed=6)))
    assert not trees.equal((one[0][-1].server, one[1]), (two[0][-1].server, two[1]))


def test_convolutions_give_the_same_bits_too() -> None:
    algorithm = LRBPFL(mask_layers="all", samples=2, mask_steps=2, model_steps=2)
    assert_engines_agree(noise(algorithm, cnn(3, (1, 8, 8)), (1, 8, 8), clients=3), pool(2), rounds=2)


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_every_way_to_start_workers_gives_the_same_bits(start: Start) -> None:
    """With a client that keeps something, and calibration data at some clients only."""
    assert_engines_agree(small("lr-bpfl"), lambda setup: Processes(setup, 1, start), rounds=2)


def test_what_a_client_took_from_its_message_is_kept_whole() -> None:
    assert_engines_agree(line(Hoarder()), pool(1), pool(2))


def test_clients_that_fail_make_no_difference_between_engines() -> None:
    for script in ("nan", "raise", "shape", "big"):
        setup = line(Scripted(update=script, predicting="raise", culprits=(1, 2)))
        expected, _ = run(Serial(setup))
        found, _ = run(Processes(setup, 2))
        assert same_rounds(found, expected)
        assert any(ended.failures for ended in expected)
        assert expected[-1].evaluations[1].result is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_new_clients_are_judged_with_the_same_bits_too(name: str) -> None:
    """The last two of five never train."""
    setup = small(name, clients=5)
    setup = setup._replace(task=setup.task._replace(num_clients=3))
    assert_engines_agree(setup, pool(2), rounds=2)
