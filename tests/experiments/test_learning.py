"""Every algorithm learns: on digits, ten clients with two labels each, it leaves its own starting point behind."""

import pytest

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.engines.loop import Engine, federate
from lrbpfl.engines.serial import Serial
from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import parse
from lrbpfl.metrics import summarise
from lrbpfl.rng import generator

ROUNDS = {"fedbe": 20, "pfedbayes": 20}  # slow ones; the others need ten


def before(engine: Engine) -> dict[str, float]:
    """The scores of every client's own model before the first round."""
    setup = engine.setup
    algorithm, task, clients, seed = setup.algorithm, setup.task, setup.clients, setup.seed
    server = algorithm.init_server(task, generator(seed, "server"))
    messages = {k: algorithm.broadcast(task, server, k) for k in range(len(clients))}
    judged = {e.client_id: e.result.predictions for e in engine.evaluate(messages, 0) if e.result}
    return summarise(judged, seed=seed)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounds_make_digits_likelier(name: str) -> None:
    """In nats per example; some algorithms fit a client's data before it predicts, and so start well already."""
    engine = Serial(build_setup(parse({"data": {"dataset": "digits"}, "algorithm": {"name": name}})))
    begin = before(engine)
    *_, last = federate(engine, rounds=ROUNDS.get(name, 10), cohort=5)
    end = summarise({k: e.result.predictions for k, e in last.evaluations.items() if e.result}, seed=0)
    print(
        f"{name}: accuracy {begin['accuracy']:.3f} -> {end['accuracy']:.3f}, NLL {begin['nll']:.3f} -> {end['nll']:.3f}"
    )
    assert end["nll"] < 0.9 * begin["nll"]
    assert end["accuracy"] > begin["accuracy"]
