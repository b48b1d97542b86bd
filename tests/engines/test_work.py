"""One client's work: what it reads, what it leaves behind."""

import math
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedbe import FedBE
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Algorithm, Info, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.engines.loop import Engine, federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import (
    ClientData,
    Setup,
    evaluate_client,
    fresh_state,
    granted,
    keep_memory,
    one_thread,
    update_client,
)
from lrbpfl.errors import BadInput
from lrbpfl.metrics import reduce
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, line, noise, same_rounds


@dataclass(frozen=True)
class Views:
    """A personal model made of a whole tensor of the message, parts of it, and something new."""

    def init_server(self, task: Task, rng: Generator) -> Tree:
        return {"w": torch.randn(4, 2, generator=rng), "none": torch.empty(0)}

    def init_client(self, task: Task, rng: Generator) -> Tree:
        return None

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        return server

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator
    ) -> tuple[Tree, Tree, Info]:
        return message, client, {}

    def server_aggregate(self, task: Task, server: Tree, updates: Iterable[Update], rng: Generator) -> Tree:
        return trees.mean((u.upload, u.num_examples) for u in updates)

    def personalise(self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator) -> Tree:
        w = message["w"]
        return {
            "whole": w,
            "head": w[:2],
            "flat": w.flatten(),
            "turned": w.T,
            "bits": w.view(torch.int32),
            "tail": w[2:],
            "none": torch.empty(0, 3),
            "new": w + 1,
        }

    def predict(self, task: Task, personal: Tree, x: Tensor, rng: Generator) -> Tensor:
        return torch.softmax(personal["whole"][0], dim=0).expand(1, len(x), 2)


@pytest.mark.parametrize("name", ["views", *ALGORITHMS])
def test_own_and_shared_tensors_make_up_the_personal_model(name: str) -> None:
    setup = line(Views()) if name == "views" else noise(ALGORITHMS[name](), nn.Linear(5, 3), (5,))
    algorithm, task, clients, seed = setup.algorithm, setup.task, setup.clients, setup.seed
    message = algorithm.broadcast(task, algorithm.init_server(task, generator(seed, "server")), 1)
    state = fresh_state(setup, 1)
    evaluated = evaluate_client(setup, message, state, 2, 1)
    personal = algorithm.personalise(task, message, state, clients[1].train, generator(seed, "personalise", 2, 1))
    sent = dict(trees.named_leaves(message))
    rebuilt = {**evaluated.personal, **{name: sent[there] for name, there in evaluated.shared.items()}}
    assert not evaluated.personal.keys() & evaluated.shared.keys()
    assert trees.equal(trees.rebuild(personal, rebuilt), personal)
    samples = algorithm.predict(task, personal, clients[1].test.x, generator(seed, "predict", 2, 1))
    assert (evaluated.predictions.probs == reduce(samples, clients[1].test.y).probs).all()


def test_only_whole_tensors_of_the_message_are_shared() -> None:
    setup = line(Views())
    message = setup.algorithm.init_server(setup.task, generator(0))
    evaluated = evaluate_client(setup, message, None, 0, 0)
    assert evaluated.shared == {"whole": "w"}


def test_a_personal_model_is_split_into_own_and_shared_names() -> None:
    setup = line(Scripted())
    state = fresh_state(setup, 0)
    evaluated = evaluate_client(setup, {"w": torch.ones(3)}, state, 0, 0)
    assert evaluated.shared == {"w": "w"}
    assert list(evaluated.personal) == ["seen"]
    assert trees.equal(evaluated.personal["seen"], state["seen"])


def test_an_update_is_drawn_from_the_address_of_round_and_client() -> None:
    setup = line(Scripted())
    message, state = {"w": torch.zeros(3)}, fresh_state(setup, 0)
    first, again = (update_client(setup, message, state, 1, 2).upload["w"] for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, 2 + torch.randn(3, generator=generator(setup.seed, "update", 1, 2)))
    assert not torch.equal(first, update_client(setup, message, state, 2, 2).upload["w"])


def test_an_update_has_the_pace_of_its_round() -> None:
    setup = noise(ALGORITHMS["fedavg"](), nn.Linear(5, 3), (5,))._replace(paces=(1.0, 0.0))
    message = setup.algorithm.init_server(setup.task, generator(0))
    moved = [not trees.equal(update_client(setup, message, None, t, 0).upload, message) for t in range(3)]
    assert moved == [True, False, True], "past the last pace given, a whole one"


def test_a_client_trains_on_its_training_data() -> None:
    """Scripted tells whose inputs it saw: here those for testing are another client's."""
    setup = line(Scripted())
    mixed = setup.clients[2]._replace(test=setup.clients[1].test, calibration=setup.clients[3].test)
    update = update_client(setup._replace(clients=(mixed,)), {"w": torch.zeros(3)}, fresh_state(setup, 0), 0, 0)
    assert update.info == {"k": 2.0} and update.examples == 6


def test_what_a_client_kept_from_training_is_predicted_with_the_samples_that_test_data_are() -> None:
    setup = noise(LRBPFL(mask_steps=1), nn.Linear(5, 3), (5,))
    algorithm, task, clients, seed = setup.algorithm, setup.task, setup.clients, setup.seed
    message = algorithm.broadcast(task, algorithm.init_server(task, generator(0)), 2)
    state = fresh_state(setup, 2)
    evaluated = evaluate_client(setup, message, state, 4, 2)
    personal = algorithm.personalise(task, message, state, clients[2].train, generator(seed, "personalise", 4, 2))
    kept = clients[2].calibration
    assert kept is not None and evaluated.calibration is not None
    samples = algorithm.predict(task, personal, kept.x, generator(seed, "predict", 4, 2))
    assert (evaluated.calibration.probs == reduce(samples, kept.y).probs).all()
    assert evaluated.calibration.y.tolist() == kept.y.tolist()
    bare = clients[2]._replace(calibration=None)
    without = evaluate_client(setup._replace(clients=(*clients[:2], bare)), message, state, 4, 2)
    assert without.calibration is None
    assert (without.predictions.probs == evaluated.predictions.probs).all()


def test_one_thread_gives_the_threads_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_memory_can_be_kept_again_and_again() -> None:
    keep_memory()
    keep_memory()
    assert torch.ones(2**20).sum() == 2**20


def open_task(algorithm: Algorithm, **said: Any) -> Setup:
    """Five clients in Python whose task says nothing about priors and public inputs but what is given; one is new."""

    def data(k: int, n: int) -> Data:
        y = torch.arange(n) % 3 if k % 2 else torch.zeros(n, dtype=torch.int64)
        return Data(x=torch.randn(n, 5, generator=generator(0, k, n)) + y[:, None], y=y)

    clients = tuple(ClientData(name=f"c{k}", train=data(k, 20 + 10 * k), test=data(k, 6)) for k in range(5))
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    task = Task(model, num_classes=3, num_clients=4)
    return Setup(algorithm, task._replace(**said), clients, seed=5)


ENGINES: tuple[Callable[[Setup], Engine], ...] = (Serial, lambda setup: Processes(setup, 2))


def priors(setup: Setup, make: Callable[[Setup], Engine]) -> dict[int, list[float]]:
    """The log prior in every client's own model."""
    with closing(make(setup)) as engine:
        *_, last = federate(engine, rounds=1, cohort=2)
    results = {k: evaluation.result for k, evaluation in last.evaluations.items()}
    return {k: result.personal["log_prior"].tolist() for k, result in results.items() if result}


@pytest.mark.parametrize("make", ENGINES)
def test_an_algorithm_in_python_has_the_label_prior_it_asks_for(make: Callable[[Setup], Engine]) -> None:
    quick = LRBPFL(mask_steps=1, model_steps=1)
    found = priors(open_task(quick), make)
    assert len(found) == 5
    for k, log_prior in found.items():
        n = 20 + 10 * k
        counts = [-(-(n - c) // 3) if k % 2 else n * (c == 0) for c in range(3)]
        assert log_prior == pytest.approx([math.log((count + 1 / 3) / (n + 1)) for count in counts], rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (LRBPFL(**{**LRBPFL.PRESETS["paper"], "mask_steps": 1}), {}),
        (LRBPFL(mask_steps=1, model_steps=1), {"label_prior": 0.0}),
        (FedAvg(local_steps=1), {}),
    ],
)
def test_no_prior_for_who_asks_for_none_or_is_told_so(algorithm: Algorithm, said: dict[str, float]) -> None:
    assert priors(open_task(algorithm, **said), Serial) == {k: [0.0] * 3 for k in range(5)}


def test_another_algorithm_has_its_own_wishes() -> None:
    setup = open_task(LRBPFL())
    assert granted(setup).task.label_prior == 1.0
    assert granted(setup._replace(algorithm=FedAvg())).task.label_prior == 0.0
    assert granted(granted(setup)._replace(algorithm=FedAvg())).task.label_prior == 1.0


def test_fedbe_in_python_gets_a_share_of_the_training_inputs() -> None:
    setup = open_task(FedBE())
    after = granted(setup)
    assert granted(after) is after
    gone = []
    for k, (before, now) in enumerate(zip(setup.clients, after.clients, strict=True)):
        share = 0 if k == 4 else round(0.04 * (20 + 10 * k))  # the last one is new, and gives nothing
        assert len(now.train.y) == len(now.train.x) == len(before.train.y) - share
        at_home = (before.train.x[:, None] == now.train.x).all(2)
        assert (at_home.sum(1) <= 1).all() and at_home.any(0).all(), "each of its examples is one it had, once"
        assert torch.equal(before.train.y[at_home.any(1)], now.train.y)
        gone.append(before.train.x[~at_home.any(1)])
        assert trees.equal(before.test, now.test)
    public = after.task.public
    assert public is not None and len(public) == sum(map(len, gone)) == 1 + 1 + 2 + 2
    assert torch.equal(public.sort(0).values, torch.cat(gone).sort(0).values)
    runs = []
    for make in ENGINES:
        with closing(make(setup)) as engine:
            runs.append(list(federate(engine, rounds=2, cohort=3)))
    assert same_rounds(*runs) and not runs[0][-1].failures


def test_public_inputs_that_are_given_stay_and_no_others_are_taken() -> None:
    given = torch.randn(7, 5, generator=generator(1))
    after = granted(open_task(FedBE(), public=given, label_prior=0.0))
    assert after.task.public is given and [len(client.train.y) for client in after.clients] == [20, 30, 40, 50, 60]
    with pytest.raises(BadInput, match="unlabelled inputs at the server"):
        next(federate(Serial(open_task(FedBE(), public=given[:0])), rounds=1, cohort=2))


def test_broken_data_are_told_before_inputs_are_moved() -> None:
    setup = open_task(FedBE())
    broken = setup.clients[0]._replace(train=Data(x=torch.zeros(3, 5), y=torch.zeros(9, dtype=torch.int64)))
    with pytest.raises(BadInput, match="3 inputs and 9 labels"):
        Serial(setup._replace(clients=(broken, *setup.clients[1:])))


def test_an_engine_that_does_not_grant_wishes_is_told() -> None:
    engine = Serial(open_task(LRBPFL()))
    engine.setup = open_task(LRBPFL())
    with pytest.raises(TypeError, match="Serial runs a setup with open wishes"):
        next(federate(engine, rounds=1, cohort=2))


def test_tiny_clients_give_one_input_each_and_nobody_loses_its_last() -> None:
    def client(n: int) -> ClientData:
        data = Data(torch.randn(n, 2), torch.zeros(n, dtype=torch.int64))
        return ClientData(f"of {n}", train=data, test=data)

    setup = Setup(FedBE(), Task(nn.Linear(2, 2), num_classes=2), (client(5), client(1)), seed=0)
    after = granted(setup)
    assert after.task.public is not None and len(after.task.public) == 2
    assert [len(one.train.y) for one in after.clients] == [4, 1]
    assert torch.equal(after.task.public[1], setup.clients[1].train.x[0])
