"""Clients alone: against torch's own SGD, against each other's data, and over every engine with nothing in the mail."""

import copy
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.local import Client, Local
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data, batches
from lrbpfl.core.network import Params
from lrbpfl.engines.loop import Engine, Round, federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup, fresh_state
from lrbpfl.rng import generator
from tests.algorithms.hand import accuracy, play, predict, start
from tests.conftest import Toy, blobs
from tests.engines.fakes import kept, noise


def sgd(task: Task, W: Params, data: Data, steps: int, lr: float, *path: str | int) -> Params:
    """By torch's own module, loss and optimiser; only the order of the examples is ours."""
    model = copy.deepcopy(task.model)
    model.load_state_dict(W)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    for batch in batches(data, 32, steps, generator(0, *path)):
        optimiser.zero_grad()
        nnf.cross_entropy(model(batch.x), batch.y).backward()
        optimiser.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(algorithm: Local, toy: Toy, rounds: int = 2) -> dict[int, Client]:
    return play(algorithm, toy, start(algorithm, toy), range(rounds)).clients


def test_rounds_are_plain_sgd_on_the_clients_own_data_bit_for_bit(toy: Toy) -> None:
    algorithm = Local(local_steps=7, lr=0.03)
    clients, expected = trained(algorithm, toy, rounds=3), start(algorithm, toy).clients[2].W
    for t in range(3):
        expected = sgd(toy.task, expected, toy.train[2], 7, 0.03, "update", t, 2)
    assert trees.equal(clients[2].W, expected)
    assert int(clients[2].steps) == 21


def test_one_step_by_hand() -> None:
    """One example (x, y) at w = 0 of a linear network: the gradient is (p - onehot(y)) x with p = 1/2 everywhere."""
    task = Task(model=nn.Linear(2, 2), num_classes=2)
    zero = Client(W={"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, steps=torch.tensor(0))
    data = Data(x=torch.tensor([[1.0, -2.0]]), y=torch.tensor([1]))
    upload, client, info = Local(local_steps=1, lr=0.5).client_update(task, None, zero, data, generator(0))
    assert upload is None
    torch.testing.assert_close(client.W["weight"], torch.tensor([[-0.25, 0.5], [0.25, -0.5]]))
    torch.testing.assert_close(client.W["bias"], torch.tensor([-0.25, 0.25]))
    assert info["loss"] == pytest.approx(0.6931472) and int(client.steps) == 1


def test_the_label_prior_takes_the_step_of_shifted_logits() -> None:
    """Frequencies (1 + 1) / (1 + 2) and 1 / 3 at w = 0: p - onehot(y) is (1/3, -1/3) instead of (1/2, -1/2)."""
    task = Task(model=nn.Linear(1, 2), num_classes=2, label_prior=2.0)
    zero = Client(W={"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}, steps=torch.tensor(0))
    data, algorithm = Data(x=torch.tensor([[3.0]]), y=torch.tensor([1])), Local(local_steps=1, min_steps=0, lr=1.0)
    _, client, _ = algorithm.client_update(task, None, zero, data, generator(0))
    torch.testing.assert_close(client.W["weight"], torch.tensor([[-1.0], [1.0]]))
    probs = predict(algorithm, task, None, zero, data, torch.zeros(1, 1))
    torch.testing.assert_close(probs, torch.tensor([[[1 / 3, 2 / 3]]]))


def test_the_data_of_one_client_never_reach_another(toy: Toy) -> None:
    other = toy._replace(train={**toy.train, 1: blobs(torch.arange(30) % 4, "other data")})
    before, after = trained(Local(), toy), trained(Local(), other)
    for k in (0, 2, 3):
        assert trees.equal(after[k], before[k])
        x = toy.test[k].x
        one, two = (predict(Local(), toy.task, None, clients[k], toy.train[k], x) for clients in (before, after))
        assert torch.equal(one, two)
    assert not trees.equal(after[1], before[1])


def test_clients_start_apart_unless_the_template_is_pretrained(toy: Toy) -> None:
    a, b = (Local().init_client(toy.task, generator(0, "client", k)).W for k in (0, 1))
    assert not any(torch.equal(a[name], b[name]) for name in a)
    pretrained = toy.task._replace(pretrained=True)
    for k in (0, 1):
        W = Local().init_client(pretrained, generator(0, "client", k)).W
        assert trees.equal(W, {name: p.detach() for name, p in toy.task.model.named_parameters()})


def test_one_client_alone_is_fedavg_with_one_client(toy: Toy) -> None:
    """From the same network, with the same batches."""
    alone = toy._replace(train={0: toy.train[0]})
    local, fedavg = Local(lr=0.1), FedAvg(lr=0.1)
    begin = start(fedavg, alone)
    mine = start(local, alone)._replace(clients={0: Client(W=begin.server, steps=torch.tensor(0))})
    assert trees.equal(play(local, alone, mine, range(3)).clients[0].W, play(fedavg, alone, begin, range(3)).server)


@pytest.mark.parametrize(("done", "missing"), [(0, 60), (20, 40), (60, 0), (100, 0)])
def test_a_client_called_too_seldom_makes_up_for_it(toy: Toy, done: int, missing: int) -> None:
    W, data = Local().init_client(toy.task, generator(0)).W, toy.train[1]
    client = Client(W=W, steps=torch.tensor(done))
    personal = Local().personalise(toy.task, None, client, data, generator(0, "catch up"))
    assert trees.equal(personal.W, sgd(toy.task, W, data, missing, 0.05, "catch up"))
    assert int(client.steps) == done


def test_a_client_that_was_never_called_predicts_well(toy: Toy) -> None:
    begin = start(Local(), toy)
    assert accuracy(Local(), toy, begin) > accuracy(Local(min_steps=0), toy, begin) + 0.15


def test_rounds_teach_without_making_up(toy: Toy) -> None:
    algorithm = Local(min_steps=0)
    begin = start(algorithm, toy)
    assert accuracy(algorithm, toy, play(algorithm, toy, begin, range(8))) > accuracy(algorithm, toy, begin) + 0.15


def small(algorithm: Local) -> Setup:
    return noise(algorithm, nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (5,))


def run(engine: Engine, rounds: int = 2) -> list[Round]:
    with closing(engine):
        return list(federate(engine, rounds=rounds, cohort=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_travels_and_everybody_is_judged(workers: int) -> None:
    federation = small(Local())
    engine: Engine = Processes(federation, workers) if workers else Serial(federation)
    rounds = run(engine)
    for ended in rounds:
        assert ended.bytes_up == ended.bytes_down == 0
        assert ended.accepted == ended.cohort and not ended.failures and ended.server is None
    called = {k for ended in rounds for k in ended.cohort}
    assert kept(engine).keys() == called != set(range(4))
    evaluations = rounds[-1].evaluations
    assert list(evaluations) == [0, 1, 2, 3]
    assert all(evaluation.result and not evaluation.result.shared for evaluation in evaluations.values())


def test_a_client_that_diverges_keeps_its_last_good_network() -> None:
    engine = Serial(small(Local(lr=1e9))._replace(paces=(1e21, 1e21)))
    good = {k: fresh_state(engine.setup, k) for k in range(4)}
    kept(engine).update(good)
    (ended,) = federate(engine, rounds=2, cohort=3, start=(1, None))
    assert not ended.accepted and ended.failures.keys() == set(ended.cohort)
    assert all("diverged" in reason and "not finite" in reason for reason in ended.failures.values())
    assert trees.equal(kept(engine), good)


def test_every_update_is_consumed_though_nothing_is_in_it(toy: Toy) -> None:
    updates = iter([Update(client_id=k, num_examples=k + 1, upload=None) for k in range(3)])
    Local().server_aggregate(toy.task, None, updates, generator(0))
    assert next(updates, None) is None
