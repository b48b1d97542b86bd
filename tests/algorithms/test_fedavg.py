"""FedAvg against centralised SGD, the mean gradient and closed forms."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedavg_ft import FedAvgFT
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data, Rate, batches, descend
from lrbpfl.core.network import Params
from lrbpfl.rng import generator
from tests.algorithms.hand import ToyRun, play, predict, start
from tests.conftest import Toy, blobs


def loaded(task: Task, W: Params) -> torch.nn.Module:
    model = copy.deepcopy(task.model)
    model.load_state_dict(W)
    return model


def gradient(task: Task, W: Params, data: Data) -> Params:
    """By torch's own modules, without anything of ours."""
    model = loaded(task, W)
    nnf.cross_entropy(model(data.x), data.y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_round(algorithm: FedAvg, toy: Toy) -> tuple[Params, Params]:
    begin = start(algorithm, toy)
    return begin.server, play(algorithm, toy, begin, range(1)).server


def test_one_client_is_centralised_sgd_bit_for_bit(toy: Toy) -> None:
    algorithm, alone = FedAvg(batch_size=16, local_steps=7), toy._replace(train={0: toy.train[0]})
    begin = start(algorithm, alone)
    federated = play(algorithm, alone, begin, range(3)).server

    model = loaded(toy.task, begin.server)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for t in range(3):
        for batch in batches(toy.train[0], 16, 7, generator(0, "update", t, 0)):
            optimiser.zero_grad()
            nnf.cross_entropy(model(batch.x), batch.y).backward()
            optimiser.step()
    assert trees.equal(federated, {name: p.detach() for name, p in model.named_parameters()})


def test_one_full_step_descends_the_mean_objective(toy: Toy) -> None:
    """Equal clients: w <- w - eta mean_k grad f_k(w)."""
    equal = toy._replace(train={k: Data(*(part[:40] for part in data)) for k, data in toy.train.items()})
    before, after = one_round(FedAvg(local_steps=1, batch_size=40, lr=0.1), equal)
    gradients = [gradient(toy.task, before, data) for data in equal.train.values()]
    expected = {name: w - 0.1 * sum(g[name] for g in gradients) / len(gradients) for name, w in before.items()}
    torch.testing.assert_close(after, expected)


def test_one_full_step_of_unequal_clients_is_a_step_on_all_data(toy: Toy) -> None:
    """Weights n_k / n make the mean of the clients' gradients that of the pooled data."""
    sizes = {len(data.y) for data in toy.train.values()}
    assert len(sizes) > 1
    before, after = one_round(FedAvg(local_steps=1, batch_size=max(sizes), lr=0.1), toy)
    pooled = Data(*(torch.cat(parts) for parts in zip(*toy.train.values(), strict=True)))
    step = gradient(toy.task, before, pooled)
    torch.testing.assert_close(after, {name: w - 0.1 * step[name] for name, w in before.items()})


def aggregate(toy: Toy, uploads: list[tuple[Params, int]]) -> Params:
    updates = [Update(client_id=k, num_examples=n, upload=upload) for k, (upload, n) in enumerate(uploads)]
    return FedAvg().server_aggregate(toy.task, uploads[0][0], updates, generator(0))


def test_identical_models_aggregate_to_themselves(toy: Toy) -> None:
    W = start(FedAvg(), toy).server
    W = trees.tree_map(lambda p: p + 0.1, W)  # no signed zeros
    assert trees.equal(aggregate(toy, [(W, 7), (W, 100), (W, 13)]), W)


def test_the_order_of_clients_does_not_matter(toy: Toy) -> None:
    uploads = [(start(FedAvg(), toy, seed).server, 10 + 7 * seed) for seed in range(4)]
    torch.testing.assert_close(aggregate(toy, uploads[::-1]), aggregate(toy, uploads))


def test_weights_are_shares_of_the_data(toy: Toy) -> None:
    a, b = (trees.tree_map(lambda p, c=c: torch.full_like(p, c), start(FedAvg(), toy).server) for c in (1.0, 5.0))
    assert all(bool((p == 2.0).all()) for p in aggregate(toy, [(a, 30), (b, 10)]).values())


def test_quadratics_in_closed_form() -> None:
    """f_k = |w - a_k|^2 / 2: after R steps w_k = a_k + (1 - eta)^R (w - a_k), and w moves to their weighted mean."""
    targets = torch.tensor([[1.0, 0.0], [-3.0, 2.0], [0.5, 0.5]], dtype=torch.float64)
    sizes, eta, steps = torch.tensor([10.0, 30.0, 60.0], dtype=torch.float64), 0.1, 20
    shares, w = sizes / sizes.sum(), torch.tensor([4.0, -4.0], dtype=torch.float64)
    no_data = Data(x=torch.zeros(0), y=torch.zeros(0))

    def local(w: Tensor, target: Tensor) -> Tensor:
        def f(w: Tensor, batch: Data) -> Tensor:
            return 0.5 * ((w - target) ** 2).sum()

        (w,), _ = descend(f, (w,), [no_data] * steps, (Rate("sgd", eta),))
        torch.testing.assert_close(w, target + (1 - eta) ** steps * (before - target))
        return w

    for _ in range(3):
        before = w
        w = trees.mean((local(before, a), n) for a, n in zip(targets, sizes.tolist(), strict=True))
        centre = shares @ targets
        torch.testing.assert_close(w, centre + (1 - eta) ** steps * (before - centre))


def test_every_client_predicts_with_the_global_network(toy: Toy) -> None:
    run = ToyRun(server=start(FedAvg(), toy).server, clients={})
    x = toy.test[0].x
    for data in (toy.train[0], toy.train[3], blobs(torch.tensor([1]), "new")):
        probs = predict(FedAvg(), toy.task, run.server, None, data, x)
        torch.testing.assert_close(probs, torch.softmax(loaded(toy.task, run.server)(x), dim=-1).detach()[None])


def test_the_label_prior_reweights_the_softmax(toy: Toy) -> None:
    """p(y | x) of the client is proportional to p(y | x) of the network times the client's smoothed frequencies."""
    W, data, x = start(FedAvg(), toy).server, toy.train[2], toy.test[2].x
    plain = predict(FedAvg(), toy.task, W, None, data, x)
    frequencies = (torch.bincount(data.y, minlength=4) + 0.5) / (len(data.y) + 2)
    expected = plain * frequencies
    got = predict(FedAvg(), toy.task._replace(label_prior=2.0), W, None, data, x)
    torch.testing.assert_close(got, expected / expected.sum(-1, keepdim=True))


@pytest.mark.parametrize("algorithm", [FedAvg(class_rows=True), FedAvgFT(class_rows=True)])
def test_a_class_that_one_client_trained_keeps_its_row(toy: Toy, algorithm: FedAvg | FedAvgFT) -> None:
    """By plain means one of two clients with as many data would get half of its way; other layers still do."""
    w = algorithm.init_server(toy.task, generator(0))
    moved = {**w, "fc1.bias": w["fc1.bias"] + 1, "fc2.bias": w["fc2.bias"] + torch.tensor([0.0, 1.0, 0.0, 0.0])}
    updates = [Update(0, 5, moved), Update(1, 5, w)]
    after = algorithm.server_aggregate(toy.task, w, updates, generator(0))
    assert trees.equal(after["fc2.bias"], moved["fc2.bias"]) and trees.equal(after["fc2.weight"], w["fc2.weight"])
    torch.testing.assert_close(after["fc1.bias"], w["fc1.bias"] + 0.5)
