"""LR-BPFL: what travels, what stays, how gates close, and what it is without its masks."""

import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.lr_bpfl import LRBPFL, Client, examples_per_class
from lrbpfl.core.descent import Data
from lrbpfl.core.gates import rank
from lrbpfl.core.masks import Gates, Masks
from lrbpfl.core.network import Params, maskable
from lrbpfl.core.objective import Likelihood
from lrbpfl.rng import generator
from tests.algorithms.hand import Run, accuracy, play, start
from tests.conftest import Toy, blobs

PRINTED = {
    "max_rank": 8,
    "adaptive_rank": True,
    "threshold": 0.95,
    "gate_init": 3.5,
    "gate_penalty": 0.1,
    "prior_variance": 0.1,
    "mask_mean": 1.0,
    "temperature": 1.0,
    "likelihood": "elbo",
    "samples": 4,
    "predict_samples": 4,
    "update": "coordinate",
    "mask_steps": 20,
    "model_steps": 1,
    "batch_size": 32,
    "mask_lr": 0.01,
    "gate_lr": 0.001,
    "model_lr": 0.001,
    "mask_optimiser": "sgd",
    "gate_optimiser": "sgd",
    "model_optimiser": "sgd",
    "mask_layers": "all",
    "warm_start": False,
    "server_optimiser": "mean",
    "server_lr": 1.0,
    "class_rows": False,
    "label_prior": 0.0,
}
UNPRINTED = {
    "adapt_steps",
    "adapt_lr",
    "adapt_holdout",
    "mask_bias",
    "weights",
    "init_spread",
    "init_std",
    "init_precision",
    "model_decay",
}


def ranks(gates: Gates) -> dict[str, int]:
    return {name: rank(gamma) for name, gamma in gates.items()}


def test_the_paper_preset_is_what_the_paper_prints() -> None:
    fields = asdict(LRBPFL(**LRBPFL.PRESETS["paper"]))
    assert {name: fields[name] for name in PRINTED} == PRINTED
    assert fields.keys() == PRINTED.keys() | UNPRINTED


def test_only_the_network_travels(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=3)
    run = start(algorithm, toy)
    message = algorithm.broadcast(toy.task, run.server, 0)
    upload, _, _ = algorithm.client_update(toy.task, message, run.clients[0], toy.train[0], generator(0))
    parameters = dict(toy.task.model.named_parameters())
    assert list(upload) == list(message) == list(parameters)
    assert trees.count(upload) == trees.count(parameters)


def test_only_the_gates_stay(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=3)
    run = play(algorithm, toy, start(algorithm, toy), range(1))
    for client in run.clients.values():
        assert client.masks is None
        assert {name: tuple(gamma.shape) for name, gamma in client.gates.items()} == dict.fromkeys(
            maskable(toy.task.model), (3,)
        )


def test_masks_start_anew_every_time(toy: Toy) -> None:
    """The same gates and the same seed give the same result, whatever the client did in between."""
    algorithm = LRBPFL()
    run = start(algorithm, toy)
    args = (toy.task, run.server.W, run.clients[0], toy.train[0])
    first = algorithm.client_update(*args, generator(0, "one"))
    personal = algorithm.personalise(*args, generator(0, "two"))
    play(algorithm, toy, run, range(1))
    assert trees.equal(algorithm.client_update(*args, generator(0, "one"))[:2], first[:2])
    assert trees.equal(algorithm.personalise(*args, generator(0, "two")), personal)


def test_masks_of_a_new_client_begin_at_the_prior(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=4, adapt_steps=0, init_spread=0.0, init_std=0.02, init_precision=0.0)
    run = start(algorithm, toy)
    personal = algorithm.personalise(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    for mask in personal.masks.values():
        for q in mask:
            assert bool((q.mean == 0.5).all())
            torch.testing.assert_close(torch.nn.functional.softplus(q.rho), torch.full_like(q.rho, 0.02))


PRUNING = LRBPFL(max_rank=4, gate_lr=6.0, gate_penalty=4.0, mask_steps=5, model_steps=5)


def test_gates_that_earn_nothing_close_and_stay_closed(toy: Toy) -> None:
    run = start(PRUNING, toy)
    history = [run]
    for t in range(5):
        history.append(play(PRUNING, toy, history[-1], range(t, t + 1)))
    for k in toy.train:
        for name in maskable(toy.task.model):
            gammas = [run.clients[k].gates[name] for run in history]
            assert rank(gammas[0]) == 4 and 1 <= rank(gammas[-1]) < 4
            for before, after in pairwise(gammas):
                assert bool((after[before == -math.inf] == -math.inf).all())
            assert all(gamma[0] == math.inf for gamma in gammas)


def test_no_gate_below_the_threshold_survives_a_round(toy: Toy) -> None:
    run = start(PRUNING, toy)
    for t in range(4):
        run = play(PRUNING, toy, run, range(t, t + 1))
        for client in run.clients.values():
            gammas = torch.cat(list(client.gates.values()))
            assert all(gamma == -math.inf or torch.sigmoid(gamma) >= 0.95 for gamma in gammas)


def test_without_the_penalty_useful_gates_stay(toy: Toy) -> None:
    """The counterpart: it is the penalty that closes them."""
    algorithm = LRBPFL(max_rank=4, mask_steps=5, model_steps=5, gate_lr=0.01, gate_penalty=0.0)
    run = play(algorithm, toy, start(algorithm, toy), range(3))
    assert all(set(ranks(client.gates).values()) == {4} for client in run.clients.values())
    assert any(gamma[1] != 3.5 for client in run.clients.values() for gamma in client.gates.values())


def test_ranks_fall_where_data_are_few(toy: Toy) -> None:
    """The same examples, once and fifty times over: the same likelihood, weighed differently against the penalty."""
    algorithm = LRBPFL(max_rank=4, mask_steps=20, model_steps=0, gate_lr=0.5, gate_penalty=40.0)
    run = start(algorithm, toy)
    few = toy.train[0]
    many = Data(x=few.x.repeat(50, 1), y=few.y.repeat(50))
    kept = [
        ranks(algorithm.client_update(toy.task, run.server.W, run.clients[0], data, generator(0))[1].gates)
        for data in (few, many)
    ]
    assert set(kept[0].values()) == {1} and set(kept[1].values()) == {4}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([3] * 7, 7.0), ([0, 0, 0, 2, 2, 2], 3.0), ([0, 1, 2, 5], 1.0), ([0, 0, 0, 1], 4 / (4 * 3**-0.75))],
)
def test_examples_per_class(labels: list[int], expected: float) -> None:
    """Equal classes count whole; for frequencies 3/4 and 1/4, exp(entropy) = (4/3)^(3/4) 4^(1/4) = 4 * 3^(-3/4)."""
    assert examples_per_class(torch.tensor(labels)) == pytest.approx(expected)


def test_a_fresh_mask_is_as_sure_as_its_data_make_it(toy: Toy) -> None:
    algorithm = LRBPFL(adapt_steps=0, init_std=0.5, init_precision=0.3)
    run = start(algorithm, toy)
    for repeats in (1, 4):
        y = torch.tensor([0, 1]).repeat(10 * repeats)
        data = Data(x=torch.zeros(len(y), *toy.train[0].x.shape[1:]), y=y)
        personal = algorithm.personalise(toy.task, run.server.W, run.clients[0], data, generator(0))
        for mask in personal.masks.values():
            for q in mask:
                std = torch.nn.functional.softplus(q.rho)
                torch.testing.assert_close(std, torch.full_like(std, 1 / math.sqrt(4 + 0.3 * 10 * repeats)))


def test_a_gate_step_by_hand(toy: Toy) -> None:
    """One SGD step under a penalty that outweighs the data: gamma - lr * penalty / n * 2 lambda^2 (1 - lambda)."""
    penalty = 1e4 * len(toy.train[0].y)
    algorithm = LRBPFL(
        max_rank=2, mask_steps=1, model_steps=0, mask_optimiser="sgd", mask_lr=0.0, gate_lr=1e-4, gate_penalty=penalty
    )
    run = start(algorithm, toy)
    _, client, _ = algorithm.client_update(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    lam = 1 / (1 + math.exp(-3.5))
    for gamma in client.gates.values():
        assert gamma.tolist() == [math.inf, pytest.approx(3.5 - 2 * lam**2 * (1 - lam), abs=2e-4)]


def test_a_closed_rank_plays_no_part(toy: Toy) -> None:
    """A client with ranks 2 to 4 closed predicts with a mask of rank one, whose prior mean is one."""
    algorithm = LRBPFL(max_rank=4, adapt_steps=0, init_spread=0.0, init_std=1e-8)
    run = start(algorithm, toy)
    closed = {name: torch.tensor([math.inf, -math.inf, -math.inf, -math.inf]) for name in run.clients[0].gates}
    client = Client(gates=closed, masks=None)
    personal = algorithm.personalise(toy.task, run.server.W, client, toy.train[0], generator(0))
    probs = algorithm.predict(toy.task, personal, toy.test[0].x, generator(0))
    plain = FedAvg().personalise(toy.task, run.server.W, None, toy.train[0], generator(0))
    expected = FedAvg().predict(toy.task, plain, toy.test[0].x, generator(0))
    torch.testing.assert_close(probs, expected.expand_as(probs))


def test_a_fixed_rank_never_changes(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=3, adaptive_rank=False, gate_lr=1.0, mask_steps=3, model_steps=3)
    run = play(algorithm, toy, start(algorithm, toy), range(2))
    for client in run.clients.values():
        assert all(torch.sigmoid(gamma).tolist() == [1.0] * 3 for gamma in client.gates.values())


@pytest.mark.parametrize("class_rows", [False, True])
@pytest.mark.parametrize("label_prior", [0.0, 1.0])
def test_without_masks_it_is_fedavg(toy: Toy, label_prior: float, class_rows: bool) -> None:
    """Rank one, factors of one, nothing to learn about them: FedAvg at the rate of W."""
    toy = toy._replace(task=toy.task._replace(label_prior=label_prior))
    n = max(len(data.y) for data in toy.train.values())
    still = LRBPFL(
        max_rank=1,
        samples=1,
        mask_lr=0.0,
        gate_lr=0.0,
        adapt_lr=0.0,
        init_spread=0.0,
        init_std=1e-8,
        model_steps=5,
        model_lr=0.05,
        model_optimiser="sgd",
        batch_size=n,
        class_rows=class_rows,
    )
    fedavg = FedAvg(local_steps=5, lr=0.05, batch_size=n, weights="kaiming", class_rows=class_rows)
    ours, theirs = (play(algorithm, toy, start(algorithm, toy), range(3)) for algorithm in (still, fedavg))
    torch.testing.assert_close(ours.server.W, theirs.server)
    assert not trees.equal(ours.server.W, start(fedavg, toy).server)
    assert accuracy(still, toy, ours) == pytest.approx(accuracy(fedavg, toy, Run(theirs.server, theirs.clients)))


@pytest.mark.parametrize("update", ["coordinate", "joint"])
def test_weight_decay_pulls_the_network_to_zero(toy: Toy, update: Literal["coordinate", "joint"]) -> None:
    """In one plain step, by the rate times the decay times W."""
    run = start(LRBPFL(), toy)
    args = (toy.task, run.server.W, run.clients[0], toy.train[0])
    free, pulled = (
        LRBPFL(update=update, mask_steps=1, model_steps=1, model_optimiser="sgd", model_lr=0.1, model_decay=decay)
        for decay in (0.0, 0.5)
    )
    W, _, _ = free.client_update(*args, generator(0))
    expected = trees.tree_map(lambda w, start: w - 0.1 * 0.5 * start, W, run.server.W)
    torch.testing.assert_close(pulled.client_update(*args, generator(0))[0], expected)


def test_the_network_stays_while_the_mask_adapts_and_the_other_way_round(toy: Toy) -> None:
    run = start(LRBPFL(), toy)
    args = (toy.task, run.server.W, run.clients[0], toy.train[0])
    W, client, _ = LRBPFL(model_steps=0).client_update(*args, generator(0))
    assert trees.equal(W, run.server.W) and not trees.equal(client, run.clients[0])
    W, client, _ = LRBPFL(mask_steps=0).client_update(*args, generator(0))
    assert not trees.equal(W, run.server.W) and trees.equal(client, run.clients[0])


def test_the_joint_update_is_another_one_and_learns_too(toy: Toy) -> None:
    joint = LRBPFL(update="joint", mask_steps=20)
    begin = start(joint, toy)
    assert trees.equal(begin, start(LRBPFL(), toy))
    one, other = (play(algorithm, toy, begin, range(1)) for algorithm in (joint, LRBPFL()))
    assert not trees.equal(one.server, other.server)
    end = play(joint, toy, begin, range(6))
    assert accuracy(joint, toy, end) > accuracy(joint, toy, begin) + 0.15


def test_the_joint_update_works_for_mask_steps_not_model_steps(toy: Toy) -> None:
    run = start(LRBPFL(), toy)
    args = (toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    W, client, _ = LRBPFL(update="joint", mask_steps=0, model_steps=9).client_update(*args)
    assert trees.equal((W, client), (run.server.W, run.clients[0]))


def test_the_mixture_likelihood_learns_too(toy: Toy) -> None:
    mixture = LRBPFL(likelihood="mixture", samples=2)
    begin = start(mixture, toy)
    assert accuracy(mixture, toy, play(mixture, toy, begin, range(5))) > accuracy(mixture, toy, begin) + 0.15


def test_every_sample_is_another_mask(toy: Toy) -> None:
    algorithm = LRBPFL(predict_samples=5)
    run = start(algorithm, toy)
    personal = algorithm.personalise(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    probs = algorithm.predict(toy.task, personal, toy.test[0].x, generator(0))
    assert len(probs) == 5
    assert all(not torch.allclose(probs[i], probs[j]) for i in range(5) for j in range(i))


def test_adaptation_fits_the_client(toy: Toy) -> None:
    """Steps on the mask alone, under the same network, lower the loss on the client's own data."""
    run = start(LRBPFL(), toy)

    def loss(steps: int) -> float:
        algorithm = LRBPFL(adapt_steps=steps)
        personal = algorithm.personalise(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
        probs = algorithm.predict(toy.task, personal, toy.train[0].x, generator(0)).mean(0)
        return torch.nn.functional.nll_loss(probs.log(), toy.train[0].y).item()

    assert loss(40) < 0.8 * loss(0)


def test_the_info_tells_the_rank(toy: Toy) -> None:
    run = play(PRUNING, toy, start(PRUNING, toy), range(5))
    _, client, info = PRUNING.client_update(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    assert info["rank"] == sum(ranks(client.gates).values()) / len(client.gates)
    assert math.isfinite(info["loss"])


def copies(n: int) -> Data:
    """The same example n times, so that every batch is the same."""
    example = blobs(torch.tensor([1]), "example")
    return Data(x=example.x.expand(n, -1).clone(), y=example.y.expand(n).clone())


def masked_nll(W: Params, masks: Masks, gates: Gates, data: Data) -> Tensor:
    """The loss of the toy's network under the mean of its mask, layer by layer, without anything of ours."""
    x = data.x
    for layer in ("fc1", "fc2"):
        Q, R = masks[f"{layer}.weight"]
        M = Q.mean @ torch.diag(torch.sigmoid(gates[f"{layer}.weight"])) @ R.mean.T
        x = x @ (W[f"{layer}.weight"] * M).T + W[f"{layer}.bias"]
        x = torch.relu(x) if layer == "fc1" else x
    return torch.nn.functional.cross_entropy(x, data.y)


def test_a_mask_step_by_hand(toy: Toy) -> None:
    """phi, psi and gamma after one step of gradient descent on Eq. (8), by torch.distributions and autograd."""
    n, lr, gate_lr = 40, 0.3, 0.7
    fields: dict[str, Any] = {
        "max_rank": 3,
        "adapt_lr": lr,
        "gate_lr": gate_lr,
        "mask_optimiser": "sgd",
        "batch_size": 8,
    }
    fields |= {"temperature": 2.5, "prior_variance": 0.04, "gate_penalty": 20.0, "init_spread": 0.2, "init_std": 1e-7}
    fields["mask_mean"] = 0.8
    data, run = copies(n), start(LRBPFL(max_rank=3), toy)
    before, after = (
        LRBPFL(adapt_steps=steps, **fields).personalise(toy.task, run.server.W, run.clients[0], data, generator(0))
        for steps in (0, 1)
    )
    masks, gates = trees.tree_map(lambda p: p.clone().requires_grad_(), (before.masks, before.gates))
    prior = Normal(math.sqrt(0.8 / 3), math.sqrt(0.04))
    posteriors = [Normal(q.mean, torch.nn.functional.softplus(q.rho)) for mask in masks.values() for q in mask]
    kl = sum(kl_divergence(q, prior).sum() for q in posteriors)
    penalty = sum((torch.sigmoid(gamma[1:]) ** 2).sum() for gamma in gates.values())
    F = masked_nll(run.server.W, masks, gates, data) + (2.5 * kl + 20.0 * penalty) / n
    F.backward()
    for mask, stepped in zip(masks.values(), after.masks.values(), strict=True):
        for q, moved in zip(mask, stepped, strict=True):
            torch.testing.assert_close(moved.mean, (q.mean - lr * q.mean.grad).detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moved.rho, (q.rho - lr * q.rho.grad).detach(), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(moved.mean, q.mean, atol=1e-3) and not torch.allclose(moved.rho, q.rho, atol=1e-3)
    for gamma, new in zip(gates.values(), after.gates.values(), strict=True):
        torch.testing.assert_close(new[1:], (gamma - gate_lr * gamma.grad).detach()[1:], rtol=1e-4, atol=1e-5)
        assert new[0] == math.inf and not torch.allclose(new[1:], gamma[1:], atol=1e-4)


def test_the_network_steps_under_the_adapted_mask(toy: Toy) -> None:
    """W - eta grad_W NLL(W o M) with the mask after its own steps, which are not differentiated through."""
    still: dict[str, Any] = {"max_rank": 2, "init_spread": 0.0, "init_std": 1e-7, "mask_optimiser": "sgd"}
    data, run = copies(12), start(LRBPFL(max_rank=2), toy)
    args = (toy.task, run.server.W, run.clients[0], data, generator(0))
    personal = LRBPFL(adapt_steps=3, adapt_lr=0.5, **still).personalise(*args)
    algorithm = LRBPFL(mask_steps=3, mask_lr=0.5, model_steps=1, model_lr=0.1, **still)
    W, _, info = algorithm.client_update(*args)
    expected = trees.tree_map(lambda p: p.clone().requires_grad_(), run.server.W)
    loss = masked_nll(expected, personal.masks, personal.gates, data)
    loss.backward()
    assert info["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, w in expected.items():
        torch.testing.assert_close(W[name], (w - 0.1 * w.grad).detach(), rtol=1e-4, atol=1e-6)


def test_every_group_of_the_joint_update_has_its_own_rate(toy: Toy) -> None:
    run = start(LRBPFL(), toy)
    args = (toy.task, run.server.W, run.clients[0], toy.train[0])
    W, client, _ = LRBPFL(update="joint", gate_lr=0.0).client_update(*args, generator(0))
    assert not trees.equal(W, run.server.W) and trees.equal(client, run.clients[0])
    W, client, _ = LRBPFL(update="joint", model_lr=0.0).client_update(*args, generator(0))
    assert trees.equal(W, run.server.W) and not trees.equal(client, run.clients[0])
    one, other = (LRBPFL(update="joint", mask_lr=lr).client_update(*args, generator(0))[0] for lr in (0.0, 0.1))
    assert not trees.equal(one, other)


@pytest.mark.parametrize("update", ["coordinate", "joint"])
def test_the_network_has_its_own_optimiser(toy: Toy, update: Literal["coordinate", "joint"]) -> None:
    """Adam's first step is as long as its rate, whatever the gradient."""
    algorithm = LRBPFL(update=update, mask_steps=1, model_steps=1, model_optimiser="adam", model_lr=0.03)
    run = start(algorithm, toy)
    W, _, _ = algorithm.client_update(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    steps = torch.cat([(W[name] - w).abs().flatten() for name, w in run.server.W.items()])
    moved = steps[steps > 0]
    assert len(moved) > 0.5 * len(steps)
    assert moved.median().item() == pytest.approx(0.03, rel=1e-3)


def test_the_likelihood_counts_from_the_second_sample_on(toy: Toy) -> None:
    run = start(LRBPFL(), toy)

    def upload(likelihood: Likelihood, samples: int) -> Params:
        algorithm = LRBPFL(likelihood=likelihood, samples=samples, init_std=0.3, mask_steps=2, model_steps=2)
        W, _, _ = algorithm.client_update(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
        return W

    torch.testing.assert_close(upload("mixture", 1), upload("elbo", 1))
    mixture, elbo = upload("mixture", 3), upload("elbo", 3)
    assert max((mixture[name] - w).abs().max() for name, w in elbo.items()) > 1e-3
