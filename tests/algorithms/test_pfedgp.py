"""pFedGP against dense algebra, scikit-learn's regression, hand counts and its own limits."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import pfedgp
from lrbpfl.algorithms.pfedgp import PFedGP
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core import gp
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from tests.algorithms.hand import play, predict, start
from tests.conftest import CLASSES, FEATURES, Toy, blobs


def embed(w: Params, x: Tensor) -> Tensor:
    """The toy's hidden layer, scaled to length one, without anything of ours."""
    hidden = torch.relu(x @ w["fc1.weight"].T + w["fc1.bias"]).double()
    unit: Tensor = hidden / hidden.norm(dim=1, keepdim=True)
    return unit


def expect(mean: Any, std: Any) -> Any:
    """E[sigma(f)] of a Gaussian, by twenty points of the other Hermite polynomials."""
    points, weights = np.polynomial.hermite_e.hermegauss(20)
    return (1 / (1 + np.exp(-(mean[:, None] + std[:, None] * points)))) @ weights / weights.sum()


def two_classes(n: int = 30) -> Data:
    return blobs(torch.tensor([1, 3] * (n // 2)), "two classes", n)


@pytest.fixture(scope="module")
def w(toy: Toy) -> Params:
    network: Params = start(PFedGP(), toy).server
    return network


def test_the_last_layer_is_not_sent() -> None:
    task = Task(model=cnn(10), num_classes=10)
    server = PFedGP().init_server(task, generator(0))
    message = PFedGP().broadcast(task, server, 3)
    assert trees.count(message) == 1_273_664
    assert set(dict(task.model.named_parameters())) - set(message) == {"fc3.weight", "fc3.bias"}


def test_a_model_that_does_not_end_in_a_linear_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 2, 1), nn.Flatten())
    with pytest.raises(BadInput, match="Conv1d"):
        PFedGP().init_server(Task(model=model, num_classes=2), generator(0))


def test_a_last_layer_that_is_not_of_the_classes_is_refused(toy: Toy) -> None:
    with pytest.raises(BadInput, match="has 4 outputs, not one for each of 5 classes"):
        PFedGP().init_server(toy.task._replace(num_classes=5), generator(0))


def test_a_missing_sampler_is_found_out_at_the_start(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polyagamma", None)
    with pytest.raises(BadInput, match=r"install lrbpfl\[gp\]"):
        PFedGP().init_server(toy.task, generator(0))


def test_two_classes_are_one_gp(toy: Toy, w: Params) -> None:
    """Every chain predicts as scikit-learn's regression on kappa / omega, and nothing goes to the other classes."""
    data, x = two_classes(), toy.test[0].x
    personal = PFedGP().personalise(toy.task, w, None, data, generator(0))
    probs = PFedGP().predict(toy.task, personal, x, generator(0))
    assert probs.shape == (30, len(x), CLASSES) and probs.dtype == torch.float32
    assert not probs[..., [0, 2]].any()
    train, new, kappa = embed(w, data.x).numpy(), embed(w, x).numpy(), np.where(data.y == 1, 0.5, -0.5)
    for chain in (0, 7, 29):
        omega = personal.omega[chain].numpy()
        kernel = ConstantKernel(8.0, "fixed") * RBF(1.0, "fixed")
        regression = GaussianProcessRegressor(kernel, alpha=1e-3 + 1 / omega, optimizer=None)
        mean, std = regression.fit(train, kappa / omega).predict(new, return_std=True)
        expected = expect(mean, np.sqrt(std**2 + 1e-3))
        np.testing.assert_allclose(probs[chain, :, 1].numpy(), expected, atol=1e-6)
        np.testing.assert_allclose(probs[chain, :, 3].numpy(), 1 - expected, atol=1e-6)


def swapped(toy: Toy, w: Params, algorithm: PFedGP) -> float:
    """How far p moves from 1 - p when the two labels of the same posterior change places."""
    personal = algorithm.personalise(toy.task, w, None, two_classes(), generator(0))
    other = personal._replace(y=4 - personal.y)
    one, two = (algorithm.predict(toy.task, p, toy.test[0].x, generator(0)) for p in (personal, other))
    return (one[..., [1, 3]] - two[..., [3, 1]]).abs().max().item()


def test_swapping_the_labels_swaps_the_probabilities(toy: Toy, w: Params) -> None:
    assert swapped(toy, w, PFedGP()) < 1e-6
    assert swapped(toy, w, PFedGP(link="exp-log")) > 0.05


def test_the_tree_sums_to_one_over_the_clients_classes(toy: Toy, w: Params) -> None:
    data, x = blobs(torch.arange(45) % 3, "three classes"), toy.test[0].x
    assert PFedGP().personalise(toy.task, w, None, data, generator(0)).means.tolist() == [0.0, 0.0]
    for link in ("mean", "exp-log"):
        probs = predict(PFedGP(link=link), toy.task, w, None, data, x)
        assert not probs[..., 3].any()
        torch.testing.assert_close(probs.sum(-1), torch.ones(30, len(x)), rtol=0, atol=1e-6)


def three_chains(K: Tensor, kappa: Tensor, *, mean: Tensor, **_: Any) -> Tensor:
    """In the sampler's place: an omega that depends on nothing but the chain and the prior mean."""
    return (torch.tensor([[0.1], [0.2], [0.25]]).double() + mean / 10).expand(3, len(K))


def test_the_loss_is_the_predictive_likelihood_of_the_halves(w: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over nodes, by dense inverses; and its gradient, by differences."""
    monkeypatch.setattr(gp, "gibbs", three_chains)
    data = blobs(torch.tensor([0, 1, 2, 2, 1, 0, 0, 2, 2]), "halves")
    X, y = embed(w, data.x), data.y
    tree, means = torch.tensor([[1, -1, 1, 0], [1, 0, -1, 0]], dtype=torch.int8), torch.tensor([0.0, 0.3]).double()
    rng, expected = generator(0), 0.0
    kernel = 8 * torch.exp(-((X[:, None] - X) ** 2).sum(-1) / 2) + 1e-3 * torch.eye(len(y)).double()
    for side, m in zip(tree, means, strict=True):
        own = side[y].nonzero()[:, 0]
        given, held = (own[half] for half in pfedgp._halves(y[own], rng))
        k, target, p = kernel[given][:, held], side[y[given]].double() / 2, torch.zeros(len(held)).double()
        for omega in (0.1, 0.2, 0.25):
            noise = 1 / (omega + m / 10)
            A = torch.linalg.inv(kernel[given][:, given] + noise * torch.eye(len(given)).double())
            mean, variance = m + k.T @ A @ (noise * target - m), kernel[held, held] - (k * (A @ k)).sum(0)
            p += torch.from_numpy(expect(mean.numpy(), variance.sqrt().numpy())) / 3
        expected += -torch.where(side[y[held]] > 0, p, 1 - p).log().mean().item()
    assert PFedGP()._loss(X, y, tree, means, generator(0)).item() == pytest.approx(expected, rel=1e-8)
    X.requires_grad_()
    assert torch.autograd.gradcheck(lambda X: PFedGP()._loss(X, y, tree, means, generator(0)), (X,))


def test_halves_are_of_every_class_and_single_examples_are_given() -> None:
    y = torch.tensor([5, 2, 2, 2, 7, 7, 2, 2, 7, 7])
    given, held = pfedgp._halves(y, generator(0))
    assert sorted(torch.cat([given, held]).tolist()) == list(range(10))
    assert sorted(y[given].tolist()) == [2, 2, 2, 5, 7, 7] and sorted(y[held].tolist()) == [2, 2, 7, 7]
    others = [pfedgp._halves(y, generator(seed))[1].tolist() for seed in range(20)]
    assert {i for held in others for i in held} == set(range(1, 10))


def test_gradients_reach_the_whole_network(toy: Toy, w: Params) -> None:
    leaves = {name: p.clone().requires_grad_() for name, p in w.items()}
    algorithm, data = PFedGP(), toy.train[1]
    tree = torch.tensor([[1, -1, -1, -1], [0, 1, -1, -1], [0, 0, 1, -1]], dtype=torch.int8)
    X = algorithm._embed(toy.task, leaves, data.x)
    algorithm._loss(X, data.y, tree, torch.zeros(3).double(), generator(0)).backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype and bool(p.grad.any()) for p in leaves.values())


def test_a_step_is_clipped_and_decayed(toy: Toy, w: Params) -> None:
    """w_k = w - eta (g + decay w) with |g| = clip when that is short."""
    algorithm = PFedGP(local_steps=1, lr=0.5, decay=0.2, clip=0.01)
    upload, _, _ = algorithm.client_update(toy.task, w, None, toy.train[0], generator(0))
    g = {name: ((p - upload[name]) / 0.5 - 0.2 * p).double() for name, p in w.items()}
    assert math.sqrt(sum(p.square().sum().item() for p in g.values())) == pytest.approx(0.01, rel=1e-3)
    still, _, _ = PFedGP(lr=0.0).client_update(toy.task, w, None, toy.train[0], generator(0))
    assert trees.equal(still, w)


def test_the_steps_have_momentum(toy: Toy, w: Params) -> None:
    """With a decay and hardly any gradient: v_1 = d w, w_1 = w - eta v_1, v_2 = 0.9 v_1 + d w_1."""
    algorithm = PFedGP(local_steps=2, lr=0.5, decay=0.2, clip=1e-9)
    upload, _, _ = algorithm.client_update(toy.task, w, None, toy.train[0], generator(0))
    first = 1 - 0.5 * 0.2
    torch.testing.assert_close(upload, {name: p * (first - 0.5 * (0.9 * 0.2 + 0.2 * first)) for name, p in w.items()})


def test_training_lowers_the_loss(toy: Toy, w: Params) -> None:
    _, _, first = PFedGP(local_steps=1).client_update(toy.task, w, None, toy.train[2], generator(0))
    trained, _, _ = PFedGP(local_steps=30).client_update(toy.task, w, None, toy.train[2], generator(1))
    _, _, last = PFedGP(local_steps=1).client_update(toy.task, trained, None, toy.train[2], generator(0))
    assert last["loss"] < 0.8 * first["loss"]


def test_one_client_alone_is_local_training(toy: Toy, w: Params) -> None:
    alone = toy._replace(train={2: toy.train[2]})
    federated = play(PFedGP(), alone, start(PFedGP(), alone), range(2)).server
    local = w
    for t in range(2):
        local, _, _ = PFedGP().client_update(toy.task, local, None, toy.train[2], generator(0, "update", t, 2))
    assert trees.equal(federated, local) and not trees.equal(local, w)


def test_the_server_takes_the_plain_mean(toy: Toy, w: Params) -> None:
    updates = [
        Update(client_id=k, num_examples=n, upload={name: torch.full_like(p, c) for name, p in w.items()})
        for k, (n, c) in enumerate([(30, 1.0), (10, 5.0), (1, 0.0)])
    ]
    mean = PFedGP().server_aggregate(toy.task, w, iter(updates), generator(0))
    assert all(bool((p == 2.0).all()) for p in mean.values())


SINGLES = {"one class": [1] * 12, "one example": [2], "single examples": [0, 3, 1]}


@pytest.mark.parametrize("kind", SINGLES)
def test_where_nothing_can_be_held_out_nothing_is_trained(toy: Toy, w: Params, kind: str) -> None:
    data = blobs(torch.tensor(SINGLES[kind]), kind)
    upload, kept, info = PFedGP().client_update(toy.task, w, None, data, generator(0))
    assert trees.equal(upload, w) and kept is None and info == {"loss": 0.0}


def test_a_client_with_one_class_is_sure_of_it(toy: Toy, w: Params) -> None:
    data, x = blobs(torch.full((7,), 2), "one class"), toy.test[0].x
    assert torch.equal(predict(PFedGP(), toy.task, w, None, data, x), torch.eye(4)[2].expand(30, len(x), 4))
    got = predict(PFedGP(), toy.task._replace(label_prior=2.0), w, None, data, x)
    torch.testing.assert_close(got, (torch.tensor([0.5, 0.5, 7.5, 0.5]) / 9).expand(30, len(x), 4))


def test_a_class_with_one_example_takes_part(toy: Toy, w: Params) -> None:
    data = blobs(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), "a single one")
    upload, _, info = PFedGP().client_update(toy.task, w, None, data, generator(0))
    assert trees.fault(upload, w) is None and not trees.equal(upload, w) and info["loss"] > 0
    probs = predict(PFedGP(), toy.task, w, None, data, data.x).mean(0)
    assert probs[7, 2] > probs[:7, 2].max() and not probs[:, 3].any()


def test_classes_never_seen_get_their_smoothed_frequency(toy: Toy, w: Params) -> None:
    """And the tree shares out the rest; without a label prior they get nothing."""
    data, x = blobs(torch.tensor([0] * 6 + [3] * 4), "classes missing"), blobs(torch.tensor([1, 2, 0]), "unseen").x
    assert not predict(PFedGP(), toy.task, w, None, data, x)[..., 1:3].any()
    probs = predict(PFedGP(), toy.task._replace(label_prior=2.0), w, None, data, x)
    torch.testing.assert_close(probs[..., 1:3], torch.full((30, 3, 2), 0.5 / 12))
    torch.testing.assert_close(probs.sum(-1), torch.ones(30, 3))


def test_without_a_kernel_predictions_are_the_label_prior(toy: Toy, w: Params) -> None:
    """The prior means along the tree multiply to the smoothed frequencies, whatever the tree."""
    data = blobs(torch.tensor([0] * 20 + [1] * 3 + [2] * 9), "unequal")
    flat = PFedGP(output_scale=1e-9)
    got = predict(flat, toy.task._replace(label_prior=8.0), w, None, data, toy.test[0].x)
    expected = (torch.tensor([22.0, 5.0, 11.0, 2.0]) / 40).expand_as(got)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    even = predict(flat, toy.task, w, None, two_classes(), toy.test[0].x)
    torch.testing.assert_close(even, torch.tensor([0.0, 0.5, 0.0, 0.5]).expand_as(even), rtol=0, atol=1e-3)


def test_a_large_client_uses_a_part_with_every_class() -> None:
    y = torch.tensor([0] * 500 + [1] * 60 + [3])
    data = Data(x=torch.arange(561.0)[:, None], y=y)
    algorithm, rng = PFedGP(max_examples=50), generator(0)
    parts = [algorithm._part(data, rng) for _ in range(5)]
    for part in parts:
        assert part.x.unique().shape == (50,) and set(part.y.tolist()) == {0, 1, 3}
        assert torch.equal(y[part.x[:, 0].long()], part.y)
    assert not torch.equal(parts[0].x, parts[1].x)
    assert sorted(PFedGP(max_examples=2)._part(data, rng).y.tolist()) == [0, 1, 3]
    assert PFedGP(max_examples=561)._part(data, rng) is data


def test_a_part_is_enough_to_train_and_to_predict(toy: Toy, w: Params) -> None:
    algorithm, data = PFedGP(max_examples=10), toy.train[3]
    personal = algorithm.personalise(toy.task, w, None, data, generator(0))
    assert personal.X.shape == (10, 32) and set(personal.y.tolist()) == set(data.y.tolist())
    upload, _, info = algorithm.client_update(toy.task, w, None, data, generator(0))
    assert trees.fault(upload, w) is None and info["loss"] > 0 and not trees.equal(upload, w)
    still, _, _ = PFedGP(max_examples=1).client_update(toy.task, w, None, data, generator(0))
    assert trees.equal(still, w)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 3, 1], [2, 2]])
def test_a_personal_model_goes_through_a_file(toy: Toy, w: Params, labels: list[int]) -> None:
    """Tensors of the same names for every client; the network is the message's own."""
    x = toy.test[0].x
    data = blobs(torch.tensor(labels), "file")
    personal = PFedGP(predict_chains=3).personalise(toy.task, w, None, data, generator(0))
    assert all(personal.W[name] is p for name, p in w.items()) and len(personal.omega) == 3
    template = PFedGP().personalise(toy.task, w, None, toy.train[0], generator(1))
    named = {name: leaf.contiguous() for name, leaf in trees.named_leaves(personal)}
    again = trees.rebuild(template, load(save(named)))
    first, second = (PFedGP().predict(toy.task, p, x, generator(s)) for s, p in enumerate((personal, again)))
    assert torch.equal(first, second)  # with another generator: predictions draw nothing


def test_many_inputs_are_predicted_in_pieces(toy: Toy, w: Params) -> None:
    x = toy.test[0].x.repeat(6, 1)
    probs = predict(PFedGP(predict_chains=2), toy.task, w, None, toy.train[0], x)
    assert probs.shape == (2, 600, CLASSES)
    torch.testing.assert_close(probs[:, 500:], probs[:, :100])


def test_a_model_that_is_only_its_last_layer_leaves_a_gp_on_the_inputs(toy: Toy) -> None:
    task = toy.task._replace(model=nn.Linear(FEATURES, CLASSES))
    server = PFedGP().init_server(task, generator(0))
    assert PFedGP().client_update(task, server, None, toy.train[0], generator(0)) == ({}, None, {"loss": 0.0})
    probs = predict(PFedGP(), task, server, None, toy.train[0], toy.test[0].x).mean(0)
    assert (probs.argmax(1) == toy.test[0].y).float().mean() > 0.7
