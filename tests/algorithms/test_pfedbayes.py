"""pFedBayes against rounds by hand, closed forms of its two steps, and plain SGD where its noise vanishes."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.pfedbayes import Client, Gaussians, PFedBayes
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data, OptimiserName, batches
from lrbpfl.core.gaussian import Gaussian
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from tests.algorithms.hand import play, predict, start
from tests.algorithms.hand_pfedbayes import Hand, assert_same, distribution, kept, moments
from tests.conftest import CLASSES, Toy, blobs

SMALL = Task(model=nn.Linear(3, 2), num_classes=2)
SMALL_DATA = Data(x=torch.randn(10, 3, generator=generator(0, "x")), y=torch.arange(10) % 2)


def rng(i: int) -> torch.Generator:
    return generator(0, str(i))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_round_by_hand(toy: Toy, samples: int) -> None:
    """Rates so large that a prior of an earlier step on w, or an Adam that forgets, would be far off."""
    algorithm = PFedBayes(
        samples=samples, local_steps=3, personal_steps=4, batch_size=16, personal_lr=0.03, global_lr=0.05
    )
    w, q, data = distribution(toy.task, "w"), distribution(toy.task, "q"), toy.train[1]
    upload, client, info = algorithm.client_update(toy.task, w, kept(q), data, generator(0, "round"))
    hand = Hand(algorithm, toy.task, data, q, w, "round")
    loss = hand.round()
    assert_same(upload, hand.w)
    assert_same(client.q, hand.q)
    assert info["loss"] == pytest.approx(loss, rel=1e-4)


def test_the_first_round_starts_at_the_message(toy: Toy) -> None:
    algorithm = PFedBayes(local_steps=2, personal_lr=0.02, global_lr=0.02)
    w, data = distribution(toy.task, "w"), toy.train[0]
    new = algorithm.init_client(toy.task, generator(0))
    upload, client, _ = algorithm.client_update(toy.task, w, new, data, generator(0, "round"))
    hand = Hand(algorithm, toy.task, data, w, w, "round")
    hand.round()
    assert_same(upload, hand.w)
    assert_same(client.q, hand.q)
    assert (new.started.item(), client.started.item()) == (0, 1)


def test_q_goes_on_from_round_to_round_whatever_arrives(toy: Toy) -> None:
    resting = PFedBayes(personal_lr=0.0)
    w, other, data = distribution(toy.task, "w"), distribution(toy.task, "other"), toy.train[0]
    upload, client, _ = resting.client_update(toy.task, w, resting.init_client(toy.task, generator(0)), data, rng(1))
    assert trees.equal(client.q, w)
    upload, again, _ = resting.client_update(toy.task, other, client, data, rng(2))
    assert trees.equal(again, client)
    assert not trees.equal(upload, other)
    moving = PFedBayes(local_steps=2)
    _, one, _ = moving.client_update(toy.task, w, client, data, rng(3))
    _, two, _ = moving.client_update(toy.task, other, one, data, rng(4))
    hand = Hand(moving, toy.task, data, one.q, other, "4")
    hand.round()
    assert_same(two.q, hand.q)


def test_the_step_on_w_rests_where_w_is_q() -> None:
    """m = a and r = s is the stationary point of KL(q || w) in w."""
    q = distribution(SMALL, "q")
    algorithm = PFedBayes(personal_lr=0.0, global_optimiser="sgd", global_lr=0.1)
    upload, _, _ = algorithm.client_update(SMALL, q, kept(q), SMALL_DATA, generator(0))
    assert_same(upload, q, tolerance=1e-5)


def test_steps_on_w_alone_bring_it_to_q() -> None:
    w, q = distribution(SMALL, "w", rho=-1.0), distribution(SMALL, "q")
    algorithm = PFedBayes(personal_lr=0.0, personal_steps=1, local_steps=500, global_lr=0.02)
    upload, client, _ = algorithm.client_update(SMALL, w, kept(q), SMALL_DATA, generator(0))
    assert trees.equal(client.q, q)
    assert_same(upload, q, tolerance=1e-3)
    assert max((w[name].mean - q[name].mean).abs().max().item() for name in w) > 0.1


def test_one_step_on_w_follows_its_closed_form() -> None:
    """d KL / d m = (m - a) / r^2 and d KL / d r = 1 / r - (s^2 + (a - m)^2) / r^3, with r = softplus(rho)."""
    zeta, lr, n = 3.0, 1e-3, len(SMALL_DATA.y)
    w, q = distribution(SMALL, "w"), distribution(SMALL, "q")
    algorithm = PFedBayes(
        zeta=zeta, personal_lr=0.0, personal_steps=1, local_steps=1, global_optimiser="sgd", global_lr=lr
    )
    upload, _, _ = algorithm.client_update(SMALL, w, kept(q), SMALL_DATA, generator(0))
    for name, (m, rho) in w.items():
        r, s, a = torch.log1p(rho.exp()), torch.log1p(q[name].rho.exp()), q[name].mean
        slope = (1 / r - (s**2 + (a - m) ** 2) / r**3) * torch.sigmoid(rho)
        torch.testing.assert_close(upload[name].mean, m - lr * zeta / n * (m - a) / r**2)
        torch.testing.assert_close(upload[name].rho, rho - lr * zeta / n * slope)


@pytest.mark.parametrize(("shift", "sign"), [(1.0, 1), (-1.0, -1)])
def test_the_variance_of_w_follows_that_of_q(toy: Toy, shift: float, sign: int) -> None:
    """In the public code of the LR-BPFL paper it is frozen."""
    w = distribution(toy.task, "w")
    q = {name: Gaussian(g.mean, g.rho + shift) for name, g in w.items()}
    upload, _, _ = PFedBayes(personal_lr=0.0).client_update(toy.task, w, kept(q), toy.train[0], generator(0))
    assert all(bool((sign * (upload[name].rho - g.rho) > 1e-3).all()) for name, g in w.items())


def test_the_variance_of_w_moves_in_a_run(toy: Toy) -> None:
    begin = start(PFedBayes(), toy)
    end = play(PFedBayes(), toy, begin, range(2)).server
    assert all(bool((end[name].rho != g.rho).float().mean() > 0.9) for name, g in begin.server.items())


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_without_zeta_the_global_distribution_never_moves(toy: Toy, optimiser: OptimiserName) -> None:
    algorithm = PFedBayes(zeta=0.0, global_optimiser=optimiser, local_steps=5)
    begin = start(algorithm, toy)
    end = play(algorithm, toy, begin, range(2))
    assert trees.equal(end.server, begin.server)
    assert all(not trees.equal(client.q, begin.server) for client in end.clients.values())


def test_without_zeta_and_noise_it_is_local_sgd_on_the_means(toy: Toy) -> None:
    """At softplus(-12) = 6e-6 the noise is gone; each batch serves five steps."""
    algorithm = PFedBayes(zeta=0.0, init_rho=-12.0, personal_optimiser="sgd", personal_lr=0.1, batch_size=16)
    w, data = start(algorithm, toy).server, toy.train[2]
    client = algorithm.init_client(toy.task, generator(0))
    _, client, _ = algorithm.client_update(toy.task, w, client, data, generator(0, "round"))
    model = copy.deepcopy(toy.task.model)
    model.load_state_dict({name: g.mean for name, g in w.items()})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(data, 16, 20, generator(0, "round")):
        for _ in range(5):
            sgd.zero_grad()
            nnf.cross_entropy(model(batch.x), batch.y).backward()
            sgd.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(client.q[name].mean, p.detach(), rtol=0, atol=2e-3)
        assert (p.detach() - w[name].mean).abs().max() > 0.1


def test_the_message_is_two_numbers_for_every_parameter() -> None:
    task = Task(model=cnn(10), num_classes=10)
    server = PFedBayes().init_server(task, generator(0))
    message = PFedBayes().broadcast(task, server, 3)
    assert trees.count(message) == 2_552_468
    assert trees.nbytes(message) == 4 * 2_552_468
    assert trees.count(PFedBayes().init_client(task, generator(0))) == 2_552_468 + 1


def aggregate(toy: Toy, server: Gaussians, uploads: list[tuple[Gaussians, int]], beta: float = 1.0) -> Gaussians:
    updates = [Update(client_id=k, num_examples=n, upload=upload) for k, (upload, n) in enumerate(uploads)]
    return PFedBayes(beta=beta).server_aggregate(toy.task, server, iter(updates), generator(0))


def test_identical_uploads_aggregate_to_themselves(toy: Toy) -> None:
    upload, server = distribution(toy.task, "upload"), distribution(toy.task, "server")
    assert trees.equal(aggregate(toy, server, [(upload, 7), (upload, 100), (upload, 13)]), upload)


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_the_server_mixes_means_and_rhos_by_the_clients_data(toy: Toy, beta: float) -> None:
    def constant(mean: float, rho: float) -> Gaussians:
        parameters = toy.task.model.named_parameters()
        return {name: Gaussian(torch.full(p.shape, mean), torch.full(p.shape, rho)) for name, p in parameters}

    mixed = aggregate(toy, constant(4.0, -4.0), [(constant(1.0, -1.0), 30), (constant(5.0, -3.0), 10)], beta)
    for g in mixed.values():
        assert bool((g.mean == (1 - beta) * 4.0 + beta * 2.0).all())
        assert bool((g.rho == (1 - beta) * -4.0 + beta * -1.5).all())


def test_a_client_that_took_part_predicts_with_what_it_kept(toy: Toy) -> None:
    q, data = distribution(toy.task, "q"), toy.train[0]
    for message in (distribution(toy.task, "one"), distribution(toy.task, "two")):
        personal = PFedBayes().personalise(toy.task, message, kept(q), data, generator(0, "any"))
        assert trees.equal(personal.q, q)


def test_a_client_that_never_took_part_adapts_the_message(toy: Toy) -> None:
    w, data = distribution(toy.task, "w"), toy.train[3]
    new = PFedBayes().init_client(toy.task, generator(0))
    assert trees.equal(PFedBayes(adapt_steps=0).personalise(toy.task, w, new, data, generator(0)).q, w)
    algorithm = PFedBayes(adapt_steps=6, personal_lr=0.05, batch_size=16)
    personal = algorithm.personalise(toy.task, w, new, data, generator(0, "adapt"))
    hand = Hand(algorithm, toy.task, data, w, w, "adapt")
    for batch in batches(data, 16, 6, hand.rng):
        hand.personal_step(batch)
    assert_same(personal.q, hand.q)


def test_predictions_are_those_of_networks_drawn_from_q(toy: Toy) -> None:
    q, data, x = distribution(toy.task, "q"), toy.train[2], blobs(torch.arange(1100) % CLASSES, "many").x
    task = toy.task._replace(label_prior=2.0)
    shift = ((torch.bincount(data.y, minlength=CLASSES) + 0.5) / (len(data.y) + 2)).log()
    got = predict(PFedBayes(predict_samples=3), task, q, kept(q), data, x)
    noise = torch.randn(3, trees.count(q) // 2, generator=generator(0, "predict"))
    for probs, row in zip(got, noise, strict=True):
        pieces = row.split([g.mean.numel() for g in q.values()])
        W = {
            name: normal.loc + normal.scale * eps.view(normal.loc.shape)
            for (name, normal), eps in zip(moments(q).items(), pieces, strict=True)
        }
        torch.testing.assert_close(probs, torch.softmax(functional_call(toy.task.model, W, (x,)) + shift, dim=-1))
    assert len(predict(PFedBayes(), task, q, kept(q), data, x[:5])) == 4


def test_the_label_prior_acts_like_a_bias_that_is_not_trained(toy: Toy) -> None:
    """Shifting the mean of the last bias in q and in w shifts the logits and leaves the KL alone."""
    data, w, algorithm = toy.train[2], distribution(toy.task, "w"), PFedBayes(local_steps=3)
    shift = ((torch.bincount(data.y, minlength=CLASSES) + 0.5) / (len(data.y) + 2)).log()
    bias = w["fc2.bias"]
    shifted = w | {"fc2.bias": Gaussian(bias.mean + shift, bias.rho)}
    new = algorithm.init_client(toy.task, generator(0))
    task = toy.task._replace(label_prior=2.0)
    _, got, info = algorithm.client_update(task, w, new, data, generator(0))
    _, expected, other = algorithm.client_update(toy.task, shifted, new, data, generator(0))
    back = Gaussian(expected.q["fc2.bias"].mean - shift, expected.q["fc2.bias"].rho)
    assert_same(got.q, expected.q | {"fc2.bias": back}, tolerance=1e-4)
    assert info["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_client_with_one_example_learns_it(toy: Toy) -> None:
    algorithm, data = PFedBayes(zeta=1e-3, personal_lr=0.01), blobs(torch.tensor([2]), "one example")
    w = start(algorithm, toy).server
    new = algorithm.init_client(toy.task, generator(0))
    upload, client, info = algorithm.client_update(toy.task, w, new, data, generator(0))
    assert math.isfinite(info["loss"]) and trees.fault(upload, w) is None

    def sure(client: Client, adapt_steps: int) -> float:
        probs = predict(PFedBayes(adapt_steps=adapt_steps), toy.task, w, client, data, data.x)
        return probs[:, 0, 2].mean().item()

    assert sure(client, 0) > 0.9 > sure(new, 0)


def test_vanishing_variances_stay_within_reach(toy: Toy) -> None:
    """Without a floor, log s is minus infinity and the gradients are not numbers."""
    w = {name: Gaussian(g.mean, torch.full_like(g.rho, -120.0)) for name, g in distribution(toy.task, "w").items()}
    algorithm = PFedBayes(local_steps=3)
    upload, client, info = algorithm.client_update(toy.task, w, kept(w), toy.train[0], generator(0))
    assert math.isfinite(info["loss"])
    for g in (*upload.values(), *client.q.values()):
        assert bool(g.mean.isfinite().all()) and bool((g.rho >= -12.1).all())
    probs = predict(algorithm, toy.task, w, algorithm.init_client(toy.task, generator(0)), toy.train[0], toy.test[0].x)
    assert bool(probs.isfinite().all())
    with pytest.raises(ValueError, match="init_rho"):
        PFedBayes(init_rho=-12.5)


def test_every_batch_serves_its_steps_and_then_w(toy: Toy) -> None:
    """Personal noise is fresh at every step: the round draws R K M vectors and the order of the data, no more."""
    algorithm, data, random = PFedBayes(local_steps=4, samples=2), toy.train[0], generator(0, "count")
    w = start(algorithm, toy).server
    algorithm.client_update(toy.task, w, algorithm.init_client(toy.task, random), data, random)
    other = generator(0, "count")
    list(batches(data, 32, 4, other))
    for _ in range(4 * 5):
        torch.randn(2, trees.count(w) // 2, generator=other)
    assert torch.equal(random.get_state(), other.get_state())
