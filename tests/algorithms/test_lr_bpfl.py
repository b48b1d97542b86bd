"""LR-BPFL: what travels, what stays, one step of everything by hand, and what it is without its masks."""

import math
from dataclasses import asdict
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from lrbpfl import trees
from lrbpfl.algorithms import ballots
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.lr_bpfl import LRBPFL, Client, Message, PersonalMask
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.gates import rank
from lrbpfl.core.masks import Gates
from lrbpfl.core.network import LayerKind, Params, maskable
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from tests.algorithms.hand import ToyRun, accuracy, play, start
from tests.conftest import Toy, blobs

PRINTED = {
    "max_rank": 8,
    "ranks": "printed",
    "gate_penalty": 0.1,
    "prior_variance": 0.1,
    "temperature": 1.0,
    "samples": 4,
    "predict_samples": 4,
    "update": "coordinate",
    "mask_steps": 20,
    "model_steps": 1,
    "batch_size": 32,
    "mask_lr": 0.01,
    "mask_growth": 0.0,
    "gate_lr": 0.001,
    "model_lr": 0.001,
    "mask_optimiser": "sgd",
    "model_optimiser": "sgd",
    "mask_layers": "all",
    "class_rows": False,
    "label_prior": 0.0,
    "calibration": 0.0,
    "noise": 1.0,
}
UNPRINTED = {"weights", "init_spread", "init_std"}
PLAIN = LRBPFL(calibration=0.0, ranks="fixed")


def ranks(gates: Gates) -> dict[str, int]:
    return {name: rank(gamma) for name, gamma in gates.items()}


def message(run: ToyRun) -> Message:
    return Message(W=run.server.W, ballot=None)


def test_the_paper_preset_is_what_the_paper_prints() -> None:
    fields = asdict(LRBPFL(**LRBPFL.PRESETS["paper"]))
    assert {name: fields[name] for name in PRINTED} == PRINTED
    assert fields.keys() == PRINTED.keys() | UNPRINTED


def test_the_network_travels_and_a_ballot_and_nothing_else(toy: Toy) -> None:
    parameters = dict(toy.task.model.named_parameters())
    for algorithm, more in ((LRBPFL(max_rank=3), 3 * len(ballots.STEPS) * len(ballots.NOISES)), (PLAIN, 0)):
        run = start(algorithm, toy)
        down = algorithm.broadcast(toy.task, run.server, 0)
        up, _, _ = algorithm.client_update(toy.task, down, run.clients[0], toy.train[0], generator(0))
        assert list(up.W) == list(down.W) == list(parameters)
        assert trees.count(up) == trees.count(down) == trees.count(parameters) + more
        assert trees.fault(up, down) is None


def test_gates_and_a_seed_stay(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=3)
    run = play(algorithm, toy, start(algorithm, toy), range(1))
    expected = dict.fromkeys(maskable(toy.task.model), (3,))
    for client in run.clients.values():
        assert {name: tuple(gamma.shape) for name, gamma in client.gates.items()} == expected
        assert trees.count(client) == 3 * len(expected) + 1


def test_a_mask_goes_back_to_the_client_s_first_draw(toy: Toy) -> None:
    """The same start in every round and before prediction, another one at every client, whatever the generator."""
    algorithm = LRBPFL(mask_steps=0, calibration=0.0)
    run = start(algorithm, toy)

    def first(k: int, *path: str) -> PersonalMask:
        return algorithm.personalise(toy.task, message(run), run.clients[k], toy.train[0], generator(0, *path))

    assert trees.equal(first(0, "one"), first(0, "two"))
    assert not torch.equal(first(0).masks.mean, first(1).masks.mean)


def test_masks_of_a_new_client_begin_at_the_prior(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=4, mask_steps=0, init_spread=0.0, init_std=0.02, noise=3.0)
    run = start(algorithm, toy)
    personal = algorithm.personalise(toy.task, message(run), run.clients[0], toy.train[0], generator(0))
    assert bool((personal.masks.mean == 0.5).all())
    std = nn.functional.softplus(personal.masks.rho)
    torch.testing.assert_close(std, torch.full_like(std, 0.06))


def test_printed_gates_close_one_by_one_and_stay_closed(toy: Toy) -> None:
    """Of a gate far above the threshold, one just above it and one that is closed, the second closes in one round."""
    algorithm = LRBPFL(max_rank=4, ranks="printed", gate_lr=1e-4, gate_penalty=1e5, mask_steps=5, model_steps=1)
    begin = start(algorithm, toy)
    gammas = torch.tensor([math.inf, 6.0, math.log(19) + 0.01, -math.inf])
    clients = {k: client._replace(gates=dict.fromkeys(client.gates, gammas)) for k, client in begin.clients.items()}
    run = begin._replace(clients=clients)
    for t in range(2):
        run = play(algorithm, toy, run, range(t, t + 1))
        for client in run.clients.values():
            for gamma in client.gates.values():
                assert [g for g in gamma.tolist() if math.isinf(g)] == [math.inf, -math.inf, -math.inf]
                assert math.log(19) < gamma[1] < 6.0


def test_a_printed_gate_step_by_hand(toy: Toy) -> None:
    """One SGD step under a penalty that outweighs the data: gamma - lr * penalty / n * 2 lambda^2 (1 - lambda)."""
    penalty = 1e4 * len(toy.train[0].y)
    fields: dict[str, Any] = {"mask_steps": 1, "model_steps": 0, "mask_optimiser": "sgd", "mask_lr": 0.0}
    algorithm = LRBPFL(ranks="printed", calibration=0.0, gate_lr=1e-4, gate_penalty=penalty, **fields)
    run = start(algorithm, toy)
    _, client, _ = algorithm.client_update(toy.task, message(run), run.clients[0], toy.train[0], generator(0))
    lam = 1 / (1 + math.exp(-3.5))
    for gamma in client.gates.values():
        assert gamma.tolist() == [math.inf, pytest.approx(3.5 - 2 * lam**2 * (1 - lam), abs=2e-4)]


def test_printed_gates_rest_while_a_client_makes_its_own_model(toy: Toy) -> None:
    """Steps on them would shrink the masks of clients that are seldom drawn, or new, towards 0."""
    algorithm = LRBPFL(max_rank=4, ranks="printed", gate_lr=6.0, gate_penalty=4.0)
    run = start(algorithm, toy)
    down = algorithm.broadcast(toy.task, run.server, 0)
    personal = algorithm.personalise(toy.task, down, run.clients[0], toy.train[0], generator(0))
    assert trees.equal(personal.gates, run.clients[0].gates)


def test_a_rank_that_held_out_examples_find_too_dear_is_closed_where_the_client_predicts(toy: Toy) -> None:
    """What was heard of it stays with the client, so that it may open again."""
    algorithm = LRBPFL(max_rank=3, mask_steps=1, model_steps=1)
    run = start(algorithm, toy)
    heard = torch.tensor([math.inf, 3.5, 1.0])
    client = run.clients[0]._replace(gates=dict.fromkeys(run.clients[0].gates, heard))
    personal = algorithm.personalise(toy.task, message(run), client, toy.train[0], generator(0))
    _, kept, info = algorithm.client_update(toy.task, message(run), client, toy.train[0], generator(0))
    for name in client.gates:
        assert personal.gates[name].tolist() == [math.inf, 3.5, -math.inf]
        assert torch.equal(kept.gates[name], heard)
    assert info["rank"] == 2.0


def test_a_closed_rank_plays_no_part(toy: Toy) -> None:
    """A client with ranks 2 to 4 closed predicts with a mask of rank one, whose prior mean is one."""
    algorithm = LRBPFL(max_rank=4, mask_steps=0, init_spread=0.0, init_std=1e-8)
    run = start(algorithm, toy)
    closed = {name: torch.tensor([math.inf, -math.inf, -math.inf, -math.inf]) for name in run.clients[0].gates}
    client = Client(gates=closed, seed=torch.tensor(7))
    personal = algorithm.personalise(toy.task, message(run), client, toy.train[0], generator(0))
    probs = algorithm.predict(toy.task, personal, toy.test[0].x, generator(0))
    plain = FedAvg().personalise(toy.task, run.server.W, None, toy.train[0], generator(0))
    expected = FedAvg().predict(toy.task, plain, toy.test[0].x, generator(0))
    torch.testing.assert_close(probs, expected.expand_as(probs))
    layers = maskable(toy.task.model).values()
    assert trees.count(personal.masks) == 2 * sum(layer.outputs + layer.inputs for layer in layers)


def test_a_fixed_rank_never_changes(toy: Toy) -> None:
    algorithm = LRBPFL(max_rank=3, ranks="fixed", mask_steps=3, model_steps=3)
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
        calibration=0.0,
        max_rank=1,
        mask_lr=0.0,
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
    assert accuracy(still, toy, ours) == pytest.approx(accuracy(fedavg, toy, ToyRun(theirs.server, theirs.clients)))


def test_the_network_stays_while_the_mask_adapts(toy: Toy) -> None:
    run = start(LRBPFL(), toy)
    down = LRBPFL().broadcast(toy.task, run.server, 0)
    up, client, _ = LRBPFL(model_steps=0).client_update(toy.task, down, run.clients[0], toy.train[0], generator(0))
    assert trees.equal(up.W, run.server.W) and not trees.equal(client, run.clients[0])


def test_the_joint_update_is_another_one_and_learns_too(toy: Toy) -> None:
    joint = LRBPFL(update="joint", mask_steps=20)
    begin = start(joint, toy)
    assert trees.equal(begin, start(LRBPFL(), toy))
    one, other = (play(algorithm, toy, begin, range(1)) for algorithm in (joint, LRBPFL()))
    assert not trees.equal(one.server.W, other.server.W)
    end = play(joint, toy, begin, range(6))
    assert accuracy(joint, toy, end) > accuracy(joint, toy, begin) + 0.15


def test_every_group_of_the_joint_update_has_its_own_rate(toy: Toy) -> None:
    run = start(LRBPFL(ranks="printed"), toy)
    args = (toy.task, message(run), run.clients[0], toy.train[0])
    fields: dict[str, Any] = {"update": "joint", "ranks": "printed", "calibration": 0.0}
    up, client, _ = LRBPFL(gate_lr=0.0, **fields).client_update(*args, generator(0))
    assert not trees.equal(up.W, run.server.W) and trees.equal(client, run.clients[0])
    up, client, _ = LRBPFL(model_lr=0.0, gate_lr=0.1, **fields).client_update(*args, generator(0))
    assert trees.equal(up.W, run.server.W) and not trees.equal(client, run.clients[0])
    one, other = (LRBPFL(mask_lr=lr, **fields).client_update(*args, generator(0))[0] for lr in (0.0, 0.1))
    assert not trees.equal(one, other)


def test_every_sample_is_another_mask(toy: Toy) -> None:
    algorithm = LRBPFL(predict_samples=5)
    run = start(algorithm, toy)
    personal = algorithm.personalise(toy.task, message(run), run.clients[0], toy.train[0], generator(0))
    probs = algorithm.predict(toy.task, personal, toy.test[0].x, generator(0))
    assert len(probs) == 5
    assert all(not torch.allclose(probs[i], probs[j]) for i in range(5) for j in range(i))


def test_adaptation_fits_the_client(toy: Toy) -> None:
    """Steps on the mask alone, under the same network, lower the loss on the client's own data."""
    run = start(LRBPFL(), toy)

    def loss(steps: int) -> float:
        algorithm = LRBPFL(mask_steps=steps)
        personal = algorithm.personalise(toy.task, message(run), run.clients[0], toy.train[0], generator(0))
        probs = algorithm.predict(toy.task, personal, toy.train[0].x, generator(0)).mean(0)
        return nn.functional.nll_loss(probs.log(), toy.train[0].y).item()

    assert loss(40) < 0.8 * loss(0)


def test_the_info_tells_the_rank_and_the_choice(toy: Toy) -> None:
    pruning = LRBPFL(max_rank=4, ranks="printed", gate_lr=6.0, gate_penalty=4.0, mask_steps=5, model_steps=5)
    run = play(pruning, toy, start(pruning, toy), range(5))
    down = Message(W=run.server.W, ballot=ballots.asking((3, 0)))
    _, client, info = pruning.client_update(toy.task, down, run.clients[0], toy.train[0], generator(0))
    assert info["rank"] == sum(ranks(client.gates).values()) / len(client.gates)
    assert math.isfinite(info["loss"])
    assert (info["mask_steps"], info["mask_noise"]) == (5 * ballots.STEPS[3], 2.0 * ballots.NOISES[0])


def copies(n: int) -> Data:
    """The same example n times, so that every batch is the same."""
    example = blobs(torch.tensor([1]), "example")
    return Data(x=example.x.expand(n, -1).clone(), y=example.y.expand(n).clone())


def masked_nll(W: Params, mean: Tensor, gates: Gates | None, r: int, data: Data) -> Tensor:
    """The loss of the toy's network under the mean of its mask, layer by layer, without anything of ours."""
    x, place = data.x, 0
    for layer in ("fc1", "fc2"):
        outputs, inputs = W[f"{layer}.weight"].shape
        Q = mean[place : place + r * outputs].view(r, outputs)
        R = mean[place + r * outputs : place + r * (outputs + inputs)].view(r, inputs)
        place += r * (outputs + inputs)
        scale = torch.ones(r) if gates is None else torch.sigmoid(gates[f"{layer}.weight"])
        x = x @ (W[f"{layer}.weight"] * (Q.T @ torch.diag(scale) @ R)).T + W[f"{layer}.bias"]
        x = torch.relu(x) if layer == "fc1" else x
    return nn.functional.cross_entropy(x, data.y)


def test_a_mask_step_by_hand(toy: Toy) -> None:
    """phi, psi and gamma after one step of gradient descent on Eq. (8), by torch.distributions and autograd."""
    n, lr, gate_lr = 40, 0.3, 0.7
    fields: dict[str, Any] = {"max_rank": 3, "mask_lr": lr, "gate_lr": gate_lr, "mask_optimiser": "sgd", "noise": 1.0}
    fields |= {"temperature": 2.5, "prior_variance": 0.04, "gate_penalty": 20.0, "init_spread": 0.2, "init_std": 1e-7}
    fields |= {"ranks": "printed", "calibration": 0.0, "batch_size": 8, "model_steps": 0}
    algorithm, data, run = LRBPFL(mask_steps=1, **fields), copies(n), start(LRBPFL(max_rank=3), toy)
    client = run.clients[0]
    before = LRBPFL(mask_steps=0, **fields).personalise(toy.task, message(run), client, data, generator(0))
    after = algorithm.personalise(toy.task, message(run), client, data, generator(0))
    _, kept, _ = algorithm.client_update(toy.task, message(run), client, data, generator(0))
    masks, gates = trees.tree_map(lambda p: p.clone().requires_grad_(), (before.masks, before.gates))
    posterior = Normal(masks.mean, nn.functional.softplus(masks.rho))
    kl = kl_divergence(posterior, Normal(math.sqrt(1 / 3), math.sqrt(0.04))).sum()
    penalty = sum((torch.sigmoid(gamma[1:]) ** 2).sum() for gamma in gates.values())
    F = masked_nll(run.server.W, masks.mean, gates, 3, data) + (2.5 * kl + 20.0 * penalty) / n
    F.backward()
    for part, stepped in zip(masks, after.masks, strict=True):
        torch.testing.assert_close(stepped, (part - lr * part.grad).detach(), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(stepped, part, atol=1e-3)
    for gamma, new in zip(gates.values(), kept.gates.values(), strict=True):
        moved = (gamma - gate_lr * gamma.grad).detach()[1:]
        expected = torch.where(torch.sigmoid(moved) >= 0.95, moved, torch.full_like(moved, -math.inf))
        torch.testing.assert_close(new[1:], expected, rtol=1e-4, atol=1e-5)


def test_the_network_steps_under_the_adapted_mask(toy: Toy) -> None:
    """W - eta grad_W NLL(W o M) with the mask after its own steps, which are not differentiated through."""
    fields: dict[str, Any] = {"init_spread": 0.0, "init_std": 1e-7, "mask_optimiser": "sgd", "mask_lr": 0.5}
    algorithm = LRBPFL(
        mask_steps=3, model_steps=1, model_lr=0.1, calibration=0.0, ranks="fixed", model_optimiser="sgd", **fields
    )
    data, run = copies(12), start(algorithm, toy)
    args = (toy.task, message(run), run.clients[0], data, generator(0))
    personal = algorithm.personalise(*args)
    up, _, info = algorithm.client_update(*args)
    expected = trees.tree_map(lambda p: p.clone().requires_grad_(), run.server.W)
    loss = masked_nll(expected, personal.masks.mean, None, 2, data)
    loss.backward()
    assert info["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, w in expected.items():
        torch.testing.assert_close(up.W[name], (w - 0.1 * w.grad).detach(), rtol=1e-4, atol=1e-6)


class Whole(nn.Module):
    """A model that cannot be parted before its masked layer."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def test_what_comes_before_the_masks_is_computed_once_and_changes_nothing(toy: Toy) -> None:
    """The same mask as in a model of one piece, whose first layers run again in every step."""
    net = nn.Sequential(nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(30, 4))
    data = Data(x=toy.train[0].x[:, None], y=toy.train[0].y)
    algorithm = LRBPFL(mask_steps=6, calibration=0.0)
    calls: list[int] = []
    net[0].register_forward_hook(lambda module, args, out: calls.append(len(args[0])))

    def adapted(model: nn.Module) -> PersonalMask:
        task = Task(model, num_classes=4, label_prior=0.0)
        server = algorithm.init_server(task, generator(0))
        client = algorithm.init_client(task, generator(0, "client"))
        return algorithm.personalise(task, algorithm.broadcast(task, server, 0), client, data, generator(0, "steps"))

    parted = adapted(net)
    assert calls == [len(data.y)]
    whole = adapted(Whole(net))
    assert len(calls) == 1 + 6
    torch.testing.assert_close(parted.masks, whole.masks)


@pytest.mark.parametrize("update", ["coordinate", "joint"])
def test_the_network_has_its_own_optimiser(toy: Toy, update: Literal["coordinate", "joint"]) -> None:
    """Adam's first step is as long as its rate, whatever the gradient."""
    algorithm = LRBPFL(update=update, mask_steps=1, model_steps=1, model_optimiser="adam", model_lr=0.03)
    run = start(algorithm, toy)
    up, _, _ = algorithm.client_update(toy.task, message(run), run.clients[0], toy.train[0], generator(0))
    steps = torch.cat([(up.W[name] - w).abs().flatten() for name, w in run.server.W.items()])
    moved = steps[steps > 0]
    assert len(moved) > 0.5 * len(steps)
    assert moved.median().item() == pytest.approx(0.03, rel=1e-3)


@pytest.mark.parametrize(("kind", "expected"), [("auto", [3]), ("all", [0, 3]), ("dense", [3]), ("conv", [0])])
def test_masks_go_where_they_are_asked_for(kind: LayerKind, expected: list[int]) -> None:
    model = nn.Sequential(nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(30, 4))
    client = LRBPFL(mask_layers=kind).init_client(Task(model, 4), generator(0))
    assert list(client.gates) == [f"{layer}.weight" for layer in expected]


def test_a_model_without_such_a_layer_is_refused(toy: Toy) -> None:
    with pytest.raises(BadInput, match="no layer of the kind that mask_layers = 'conv'"):
        LRBPFL(mask_layers="conv").init_server(toy.task, generator(0))
