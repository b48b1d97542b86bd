"""pFedMe against FedAvg, closed forms on quadratics, and the gradient of the Moreau envelope."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.pfedme import PFedMe
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params
from lrbpfl.rng import generator
from tests.algorithms.hand import gradient, loaded, play, predict, start
from tests.conftest import CLASSES, FEATURES, Toy, blobs

EVERYTHING = 1000  # a batch size beyond every client's data
NOTHING = Data(x=torch.zeros(0), y=torch.zeros(0))
TARGET, W = torch.tensor([1.0, -3.0]).double(), torch.tensor([4.0, 2.0]).double()


def quadratic(theta: Params, batch: Data) -> Tensor:
    """|theta - a|^2 / 2, where a batch may bring its own a."""
    a = batch.x if len(batch.x) else TARGET
    return 0.5 * (theta["w"] - a).square().sum()


def distance(a: Params, b: Params) -> float:
    return math.sqrt(sum((a[name] - b[name]).square().sum().item() for name in a))


@pytest.mark.parametrize("lam", [0.0, 0.5, 15.0])
def test_the_inner_problem_of_a_quadratic(lam: float) -> None:
    """theta* = (a + lambda w) / (1 + lambda), approached at the rate 1 - eta_p (1 + lambda) from any theta_0."""
    algorithm, theta_0 = PFedMe(lam=lam, personal_lr=0.05), torch.tensor([7.0, 7.0]).double()
    best, rate = (TARGET + lam * W) / (1 + lam), 1 - 0.05 * (1 + lam)
    for steps in (0, 1, 5, 400):
        theta, _ = algorithm.approach(quadratic, {"w": theta_0}, {"w": W}, [NOTHING] * steps)
        torch.testing.assert_close(theta["w"], best + rate**steps * (theta_0 - best))
    torch.testing.assert_close(theta["w"], best)


def test_weight_decay_pulls_theta_to_zero() -> None:
    algorithm = PFedMe(lam=2.0, decay=0.5, personal_lr=0.1)
    theta, _ = algorithm.approach(quadratic, {"w": W}, {"w": W}, [NOTHING] * 200)
    torch.testing.assert_close(theta["w"], (TARGET + 2 * W) / 3.5)


@pytest.mark.parametrize("restart", [True, False])
def test_the_outer_step_of_a_quadratic(restart: bool) -> None:
    """With the inner problem solved, w <- w - eta lambda / (1 + lambda) (w - a)."""
    lam, eta, steps = 3.0, 0.2, 4
    algorithm = PFedMe(lam=lam, personal_lr=0.2, inner_steps=100, global_lr=eta, restart=restart)
    w, _ = algorithm.descend_envelope(quadratic, {"w": W}, [NOTHING] * steps)
    torch.testing.assert_close(w["w"], TARGET + (1 - eta * lam / (1 + lam)) ** steps * (W - TARGET))


@pytest.mark.parametrize("restart", [True, False])
def test_a_round_by_hand(restart: bool) -> None:
    """K steps on the same batch, then one on w; theta goes on from where it was, or from w."""
    lam, eta_p, eta, K = 3.0, 0.1, 0.2, 2
    algorithm = PFedMe(lam=lam, personal_lr=eta_p, inner_steps=K, global_lr=eta, restart=restart)
    targets = torch.tensor([[1.0, 0.0], [-2.0, 5.0], [3.0, 3.0]]).double()
    theta = w = W
    losses = []
    for a in targets:
        theta = w if restart else theta
        for _ in range(K):
            losses.append(0.5 * (theta - a).square().sum() + 0.5 * lam * (theta - w).square().sum())
            theta = theta - eta_p * ((theta - a) + lam * (theta - w))
        w = w - eta * lam * (w - theta)
    got, loss = algorithm.descend_envelope(quadratic, {"w": W}, [Data(x=a, y=NOTHING.y) for a in targets])
    torch.testing.assert_close(got["w"], w)
    assert loss == pytest.approx(torch.stack(losses).mean().item())


def test_the_step_is_along_the_gradient_of_the_moreau_envelope() -> None:
    """F(w) = min_theta f + lambda / 2 |theta - w|^2 by another solver; its slope by differences."""
    rng, lam = generator(0, "envelope"), 2.0
    x, y = torch.randn(12, 3, dtype=torch.float64, generator=rng), torch.arange(12) % 4
    w, direction = torch.randn(2, 4, 3, dtype=torch.float64, generator=rng)

    def f(theta: Params, batch: Data) -> Tensor:
        return nnf.cross_entropy(torch.tanh(x) @ theta["w"].T, y)

    def envelope(w: Tensor) -> float:
        theta = w.clone().requires_grad_()
        solver = torch.optim.LBFGS([theta], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16)

        def closure() -> Tensor:
            solver.zero_grad()
            value = f({"w": theta}, NOTHING) + lam / 2 * (theta - w).square().sum()
            value.backward()
            return value

        solver.step(closure)
        return closure().item()

    slope = (envelope(w + 1e-4 * direction) - envelope(w - 1e-4 * direction)) / 2e-4
    algorithm = PFedMe(lam=lam, personal_lr=0.2, inner_steps=300, global_lr=0.1)
    after, _ = algorithm.descend_envelope(f, {"w": w}, [NOTHING])
    assert ((w - after["w"]) / 0.1 * direction).sum().item() == pytest.approx(slope, rel=1e-6)


def test_one_inner_step_of_the_right_length_is_fedavg(toy: Toy) -> None:
    """theta = w - grad f(w) / lambda, so that eta lambda (w - theta) = eta grad f(w)."""
    algorithm = PFedMe(
        lam=4.0, inner_steps=1, personal_lr=0.25, global_lr=0.1, restart=True, batch_size=16, local_steps=7
    )
    fedavg = FedAvg(lr=0.1, batch_size=16, local_steps=7)
    begin = start(fedavg, toy)
    assert trees.equal(start(algorithm, toy), begin)
    end = play(fedavg, toy, begin, range(3)).server
    torch.testing.assert_close(play(algorithm, toy, begin, range(3)).server, end)
    two_steps = PFedMe(
        lam=4.0, inner_steps=2, personal_lr=0.25, global_lr=0.1, restart=True, batch_size=16, local_steps=7
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(play(two_steps, toy, begin, range(3)).server, end)


@pytest.mark.parametrize(("lam", "beta"), [(0.0, 1.0), (0.0, 0.3), (15.0, 0.0)])
def test_without_lambda_or_beta_the_server_stays_where_it_is(toy: Toy, lam: float, beta: float) -> None:
    algorithm = PFedMe(lam=lam, beta=beta)
    begin = start(algorithm, toy)
    assert trees.equal(play(algorithm, toy, begin, range(3)).server, begin.server)
    assert not trees.equal(play(PFedMe(), toy, begin, range(1)).server, begin.server)


def test_without_lambda_theta_is_trained_as_if_alone(toy: Toy) -> None:
    w, data, x = start(PFedMe(), toy).server, toy.train[1], toy.test[1].x
    algorithm = PFedMe(lam=0.0, personal_lr=0.1, personal_steps=9)
    alone, _, _ = FedAvg(lr=0.1, local_steps=9).client_update(toy.task, w, None, data, generator(0, "personalise"))
    expected = torch.softmax(loaded(toy.task, alone)(x), dim=-1).detach()[None]
    torch.testing.assert_close(predict(algorithm, toy.task, w, None, data, x), expected)


def test_with_a_large_lambda_theta_is_one_small_step_from_w(toy: Toy) -> None:
    """theta(w) = w - grad f(w) / lambda + O(1 / lambda^2)."""
    w, data, lam = start(PFedMe(), toy).server, toy.train[0], 1000.0
    algorithm = PFedMe(lam=lam, personal_lr=0.5 / lam, personal_steps=60, batch_size=EVERYTHING)
    theta = algorithm.personalise(toy.task, w, None, data, generator(0)).W
    slope = {name: lam * (p - theta[name]) for name, p in w.items()}
    torch.testing.assert_close(slope, gradient(toy.task, w, data), rtol=0.01, atol=1e-3)


def test_the_personal_network_solves_the_inner_problem(toy: Toy) -> None:
    """grad f(theta) + lambda (theta - w) = 0 on all of the client's data, for a network without kinks."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    task, algorithm, data, x = Task(model, CLASSES), PFedMe(batch_size=EVERYTHING), toy.train[2], toy.test[2].x
    w = algorithm.init_server(task, generator(0))
    theta = algorithm.personalise(task, w, None, data, generator(0, "personalise")).W
    pull = {name: 15.0 * (w[name] - p) for name, p in theta.items()}
    torch.testing.assert_close(pull, gradient(task, theta, data), rtol=1e-3, atol=1e-4)
    expected = torch.softmax(loaded(task, theta)(x), dim=-1).detach()[None]
    torch.testing.assert_close(predict(algorithm, task, w, None, data, x), expected)


@pytest.mark.parametrize("steps", [0, 1, 100])
def test_theta_is_a_copy_that_no_later_round_reaches(toy: Toy, steps: int) -> None:
    """In the authors' code theta is the live model: it becomes w_k, and with the next broadcast w_{t+1}."""
    algorithm, data = PFedMe(personal_steps=steps), toy.train[0]
    begin = start(algorithm, toy)
    w = begin.server
    theta = algorithm.personalise(toy.task, w, None, data, generator(0)).W
    kept = trees.tree_map(torch.clone, theta)
    upload, _, _ = algorithm.client_update(toy.task, w, None, data, generator(0))
    server = play(algorithm, toy, begin, range(2)).server
    for other in (w, upload, server):
        assert all(p.untyped_storage().data_ptr() != theta[n].untyped_storage().data_ptr() for n, p in other.items())
        for p in other.values():
            p.add_(1.0)  # whoever owns these may do as they like
    assert trees.equal(theta, kept)


def test_theta_is_neither_the_global_network_nor_the_upload(toy: Toy) -> None:
    algorithm, data = PFedMe(), toy.train[0]
    w = play(algorithm, toy, start(algorithm, toy), range(2)).server
    before = trees.tree_map(torch.clone, w)
    theta = algorithm.personalise(toy.task, w, None, data, generator(0)).W
    upload, _, _ = algorithm.client_update(toy.task, w, None, data, generator(0))
    assert trees.equal(w, before)
    assert min(distance(theta, w), distance(theta, upload), distance(upload, w)) > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0, 2.0])
def test_the_server_mixes_its_network_with_the_weighted_mean(toy: Toy, beta: float) -> None:
    w = {name: torch.full_like(p, 4.0) for name, p in start(PFedMe(), toy).server.items()}
    updates = [
        Update(client_id=k, num_examples=n, upload={name: torch.full_like(p, c) for name, p in w.items()})
        for k, (n, c) in enumerate([(30, 1.0), (10, 5.0)])
    ]
    mixed = PFedMe(beta=beta).server_aggregate(toy.task, w, iter(updates), generator(0))
    assert all(bool((p == (1 - beta) * 4.0 + beta * 2.0).all()) for p in mixed.values())


CLIENTS = {"one example": [2], "two examples": [2, 0], "one class": [1] * 40, "fewer than a batch": [0, 1, 1, 3, 0]}


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_small_client_takes_real_steps(toy: Toy, restart: bool, kind: str) -> None:
    data, w = blobs(torch.tensor(CLIENTS[kind]), kind), start(PFedMe(), toy).server
    algorithm = PFedMe(restart=restart)
    upload, _, info = algorithm.client_update(toy.task, w, None, data, generator(0))
    theta = algorithm.personalise(toy.task, w, None, data, generator(0)).W
    assert math.isfinite(info["loss"])
    before = nnf.cross_entropy(loaded(toy.task, w)(data.x), data.y).item()
    for network in (upload, theta):
        assert trees.fault(network, w) is None
        assert nnf.cross_entropy(loaded(toy.task, network)(data.x), data.y).item() < before


def test_the_label_prior_is_in_both_problems(toy: Toy) -> None:
    """With logits shifted by a constant of the client, as if by a bias that is not trained."""
    data, task = toy.train[2], toy.task._replace(label_prior=2.0)
    shift = ((torch.bincount(data.y, minlength=CLASSES) + 0.5) / (len(data.y) + 2)).log()
    w, x = start(PFedMe(), toy).server, toy.test[2].x
    shifted = {name: p + shift if name == "fc2.bias" else p for name, p in w.items()}
    expected, _, _ = PFedMe().client_update(toy.task, shifted, None, data, generator(0))
    got, _, _ = PFedMe().client_update(task, w, None, data, generator(0))
    torch.testing.assert_close(got, expected | {"fc2.bias": expected["fc2.bias"] - shift})
    torch.testing.assert_close(
        predict(PFedMe(), task, w, None, data, x), predict(PFedMe(), toy.task, shifted, None, data, x)
    )
