"""MetaVD against FedAvg, torch's own modules and optimiser, and numbers by hand."""

import copy
import math
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.metavd import Message, MetaVD, Server, log_variances
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data, batches
from lrbpfl.core.network import Params
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from tests.algorithms.hand import ToyRun, play, predict, start
from tests.conftest import CLASSES, Toy

EVERYTHING = 1000  # a batch size beyond every client's data
HUGE = 1e9  # a clip that never shortens
NEW = 1_000_000
SMALL = MetaVD(hidden=8)


def alike(algorithm: MetaVD, toy: Toy) -> Server:
    """The server at the start, with the same embedding for everybody."""
    server: Server = start(algorithm, toy).server
    return server._replace(hyper=server.hyper._replace(embeddings=torch.ones(4, 2)))


def message(toy: Toy, log_variance: float | Tensor, kl_weight: float = 0.0) -> Message:
    """The starting network with these log-variances on its second layer."""
    W = start(SMALL, toy).server.theta
    row = torch.as_tensor(log_variance).expand(W["fc2.weight"].shape).clone()
    return Message(W=W, log_variance={"fc2.weight": row}, kl_weight=torch.tensor(kl_weight))


def test_without_noise_and_kl_new_clients_train_as_in_fedavg(toy: Toy) -> None:
    """Without an embedding all have the same variances, and the precision-weighted mean is the weighted mean."""
    away = toy._replace(train={k + 10: data for k, data in toy.train.items()})
    algorithm, fedavg = MetaVD(noise=0.0, beta=0.0, clip=HUGE, hidden=8), FedAvg(lr=0.02)
    begin, begin_fedavg = start(algorithm, away), start(fedavg, away)
    assert trees.equal(begin.server.theta, begin_fedavg.server)
    end = play(fedavg, away, begin_fedavg, range(4)).server
    torch.testing.assert_close(play(algorithm, away, begin, range(4)).server.theta, end)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(play(MetaVD(beta=0.0, hidden=8), away, begin, range(4)).server.theta, end)


def test_without_noise_and_kl_clients_with_equal_variances_train_as_in_fedavg(toy: Toy) -> None:
    algorithm, fedavg = MetaVD(noise=0.0, beta=0.0, clip=HUGE, hidden=8, hyper_decay=0.0), FedAvg(lr=0.02)
    begin = ToyRun(server=alike(algorithm, toy), clients=dict.fromkeys(toy.train))
    end = play(algorithm, toy, begin, range(4)).server
    expected = play(fedavg, toy, start(fedavg, toy), range(4)).server
    torch.testing.assert_close(end.theta, expected)
    torch.testing.assert_close(end.hyper, begin.server.hyper)
    x = toy.test[1].x
    probs = predict(algorithm, toy.task, algorithm.broadcast(toy.task, end, 1), None, toy.train[1], x)
    torch.testing.assert_close(probs, predict(fedavg, toy.task, expected, None, toy.train[1], x))


def test_the_weight_of_the_kl_grows_to_beta_and_travels(toy: Toy) -> None:
    weights = [MetaVD().kl_weight(t) for t in range(40)]
    assert weights[0] == 0 and weights[10] == pytest.approx(5.0) and weights[20:] == [10.0] * 20
    assert all(a < b for a, b in pairwise(weights[:21]))
    low, high = (1 / (1 + math.exp(6 * sign)) for sign in (1, -1))
    for t in (1, 7, 13):
        sigmoid = 1 / (1 + math.exp(-12 * (t / 20 - 0.5)))
        assert weights[t] == pytest.approx(10 * (sigmoid - low) / (high - low))
    assert MetaVD(warmup=0, beta=3.0).kl_weight(0) == 3.0
    run = play(SMALL, toy, start(SMALL, toy), range(3))
    assert run.server.rounds == 3
    assert SMALL.broadcast(toy.task, run.server, NEW).kl_weight.item() == pytest.approx(weights[3])


def test_one_step_without_noise_by_hand(toy: Toy) -> None:
    """W along the gradient of the cross-entropy, l along that of the KL: -(theta^2 / v) / (1 + theta^2 / v) / 2 |l|."""
    algorithm = MetaVD(noise=0.0, local_steps=1, batch_size=EVERYTHING, clip=HUGE, lr=0.3)
    data, log_variance = toy.train[1], torch.linspace(-8, -1, 32)
    sent = message(toy, log_variance, kl_weight=7.0)
    upload, _, info = algorithm.client_update(toy.task, sent, None, data, generator(0))
    model = copy.deepcopy(toy.task.model)
    model.load_state_dict(sent.W)
    loss = nnf.cross_entropy(model(data.x), data.y)
    loss.backward()
    torch.testing.assert_close(
        upload.W, {name: sent.W[name] - 0.3 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    )
    ratio = sent.W["fc2.weight"].square() / log_variance.exp()
    slope = -0.5 * 7.0 * ratio / (1 + ratio) / 128
    torch.testing.assert_close(upload.log_variance["fc2.weight"], log_variance.expand(4, 32) - 0.3 * slope)
    assert info["loss"] == pytest.approx(loss.item() + 7.0 * 0.5 * ratio.log1p().mean().item(), rel=1e-5)
    assert torch.equal(upload.kl_weight, sent.kl_weight)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_the_objective_with_noise_by_hand(toy: Toy, average: Literal["logits", "probabilities"]) -> None:
    """The cross-entropy of the mean logits, or the mean of the cross-entropies, of three noisy passes."""
    task = toy.task._replace(label_prior=2.0)
    algorithm = MetaVD(average=average, local_steps=1, batch_size=16)
    data, sent = toy.train[2], message(toy, -1.0)
    _, _, info = algorithm.client_update(task, sent, None, data, generator(0, "noise"))
    rng = generator(0, "noise")
    (batch,) = batches(data, 16, 1, rng)
    hidden = torch.relu(batch.x @ sent.W["fc1.weight"].T + sent.W["fc1.bias"])
    std = (hidden.square() @ torch.full((32, CLASSES), math.exp(-1.0))).sqrt()
    mean = hidden @ sent.W["fc2.weight"].T + sent.W["fc2.bias"]
    logits = torch.stack([mean + std * torch.randn(16, CLASSES, generator=rng) for _ in range(3)])
    prior = ((torch.bincount(data.y, minlength=CLASSES) + 0.5) / (len(data.y) + 2)).log()
    if average == "logits":
        expected = nnf.cross_entropy(logits.mean(0) + prior, batch.y)
    else:
        expected = torch.stack([nnf.cross_entropy(sample + prior, batch.y) for sample in logits]).mean()
    assert info["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_long_gradient_of_both_groups_together_is_shortened(toy: Toy) -> None:
    sent = message(toy, -4.0, kl_weight=1e4)
    algorithm = MetaVD(local_steps=1, lr=0.1, clip=0.01)
    upload, _, _ = algorithm.client_update(toy.task, sent, None, toy.train[0], generator(0))
    moved = trees.tree_map(lambda a, b: a - b, upload, sent)
    length = math.sqrt(sum(leaf.square().sum().item() for leaf in trees.leaves(moved)))
    assert length == pytest.approx(0.1 * 0.01, rel=1e-2)


def test_noise_that_hurts_is_trained_away_and_the_kl_brings_it_back(toy: Toy) -> None:
    def change(kl_weight: float) -> float:
        sent = message(toy, -1.0, kl_weight)
        upload, _, _ = MetaVD(local_steps=60).client_update(toy.task, sent, None, toy.train[0], generator(0))
        return (upload.log_variance["fc2.weight"] + 1.0).mean().item()

    assert change(0.0) < -1e-3 < 1e-3 < change(100.0)


def networks(sent: Message, log_variance: float) -> list[Params]:
    """The three networks that `hand.predict` draws."""
    rng, std = generator(0, "predict"), math.exp(log_variance / 2)
    noise = [std * torch.randn(CLASSES, 32, generator=rng) for _ in range(3)]
    return [{**sent.W, "fc2.weight": sent.W["fc2.weight"] + eps} for eps in noise]


@pytest.mark.parametrize("rates", ["own", "constant"])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_predictions_by_hand(
    toy: Toy, average: Literal["logits", "probabilities"], rates: Literal["own", "constant"]
) -> None:
    task, data, x = toy.task._replace(label_prior=2.0), toy.train[2], toy.test[2].x
    sent = message(toy, -2.0)
    logits = []
    for network in networks(sent, -2.0 if rates == "own" else -8.5):
        model = copy.deepcopy(toy.task.model)
        model.load_state_dict(network)
        logits.append(model(x).detach())
    prior = (torch.bincount(data.y, minlength=CLASSES) + 0.5) / (len(data.y) + 2)
    averaged = torch.stack(logits).mean(0)[None] if average == "logits" else torch.stack(logits)
    expected = torch.softmax(averaged, dim=-1) * prior
    got = predict(MetaVD(average=average, predict_rates=rates), task, sent, None, data, x)
    assert len(got) == (1 if average == "logits" else 3)
    torch.testing.assert_close(got, expected / expected.sum(-1, keepdim=True))


def test_nothing_is_trained_or_copied_for_a_personal_model(toy: Toy) -> None:
    sent = message(toy, -2.0)
    personal = SMALL.personalise(toy.task, sent, None, toy.train[0], generator(0))
    assert personal.W is sent.W and personal.log_variance is sent.log_variance


def test_traffic_and_server_of_the_papers_network() -> None:
    """P + |l| + 1 numbers down and up; 26,429,322 numbers in hypernetwork and embeddings of 50 clients."""
    task = Task(cnn(10), 10, num_clients=50)
    server = MetaVD().init_server(task, generator(0))
    assert trees.count(MetaVD().broadcast(task, server, 7)) == 1_276_234 + 131_072 + 1
    assert trees.count(MetaVD().broadcast(task, server, NEW)) == 1_276_234 + 131_072 + 1
    assert trees.count(server.hyper) == trees.count(server.momentum) == 26_429_322
    assert server.hyper.embeddings.shape == (50, 13)
    rows = log_variances(server.hyper, [0, 25, 49])
    assert bool((rows > -8.5).all()) and bool((rows < -7.5).all()), "no weight starts dead, and none with much noise"


def test_traffic_with_noise_on_every_weight() -> None:
    task, algorithm = Task(cnn(10), 10, num_clients=50), MetaVD(stochastic="all", hidden=1)
    server = algorithm.init_server(task, generator(0))
    sent = algorithm.broadcast(task, server, 0)
    size = trees.count(sent.log_variance)
    assert size == 1_275_232 and trees.count(sent) == 1_276_234 + size + 1
    assert {name: log_v.shape for name, log_v in sent.log_variance.items()} == {
        name: w.shape for name, w in server.theta.items() if name.endswith("weight")
    }

    def count(hidden: int) -> int:
        return 50 * 13 + 14 * hidden + 2 * (hidden + 1) * hidden + (hidden + 1) * size

    assert trees.count(server.hyper) == count(1) and count(200) == 256_405_482


def test_noise_on_every_weight_trains_every_log_variance(toy: Toy) -> None:
    algorithm = MetaVD(stochastic="all", hidden=8)
    run = play(algorithm, toy, start(algorithm, toy), range(2))
    sent = algorithm.broadcast(toy.task, run.server, 0)
    upload, _, _ = algorithm.client_update(toy.task, sent, None, toy.train[0], generator(0))
    assert list(sent.log_variance) == ["fc1.weight", "fc2.weight"]
    assert all(not torch.equal(upload.log_variance[name], log_v) for name, log_v in sent.log_variance.items())


def test_a_task_that_does_not_say_how_many_clients_there_are_is_refused(toy: Toy) -> None:
    with pytest.raises(BadInput, match=r"how many clients take part \(Task.num_clients\)"):
        MetaVD().init_server(toy.task._replace(num_clients=0), generator(0))


def test_a_model_without_a_linear_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())
    with pytest.raises(BadInput, match="no Linear layer"):
        MetaVD().init_server(Task(model, 4, num_clients=2), generator(0))


def test_one_client_is_enough(toy: Toy) -> None:
    task = toy.task._replace(num_clients=1)
    server = SMALL.init_server(task, generator(0))
    assert server.hyper.embeddings.shape == (1, 1)
    data = Data(x=toy.train[0].x[:1], y=toy.train[0].y[:1])
    upload, _, info = SMALL.client_update(task, SMALL.broadcast(task, server, 0), None, data, generator(0))
    assert math.isfinite(info["loss"])
    assert SMALL.server_aggregate(task, server, [Update(0, 1, upload)], generator(0)).rounds == 1
