"""FedBE against FedAvg, NumPy's weighted moments, torch's own distributions, modules and optimiser."""

import copy
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Dirichlet, kl_divergence

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedbe import FLOOR, FedBE, dirichlet_draws, ensemble, gaussian_draws, sharpen
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data, batches
from lrbpfl.core.network import Params
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from tests.algorithms.hand import play, predict, start
from tests.conftest import CLASSES, Toy, blobs

# The teachers say what the student says already.
TAUGHT_BY_ITSELF = FedBE(members=0, clients_teach=False, temperature=1.0, distil_decay=0.0, distil_lr=0.1)
DISTRIBUTIONS = (FedBE(), FedBE(distribution="dirichlet"))
either = pytest.mark.parametrize("algorithm", DISTRIBUTIONS, ids=lambda algorithm: algorithm.distribution)


def loaded(task: Task, w: Params) -> nn.Module:
    model = copy.deepcopy(task.model)
    model.load_state_dict(w)
    return model


def said(task: Task, w: Params, x: Tensor) -> Tensor:
    """By torch's own modules, without anything of ours."""
    return torch.softmax(loaded(task, w)(x), dim=-1).detach()


def public(toy: Toy) -> Tensor:
    assert isinstance(toy.task.public, Tensor)
    return toy.task.public


def arrivals(toy: Toy) -> list[Update]:
    """Four unlike networks from clients of unlike sizes, whose ids are not their places."""
    sizes = {17: 10, 3: 80, 101: 25, 8: 40}
    return [Update(k, n, start(FedBE(), toy, seed=k).server) for k, n in sizes.items()]


def constants(sizes: list[int], values: list[list[float]]) -> list[Update]:
    """Clients whose networks are vectors."""
    pairs = zip(sizes, values, strict=True)
    return [Update(k, n, {"w": torch.tensor(value)}) for k, (n, value) in enumerate(pairs)]


def mean(updates: list[Update]) -> Params:
    weights = [u.num_examples for u in updates]
    return {
        name: torch.from_numpy(np.average([u.upload[name].numpy() for u in updates], axis=0, weights=weights)).float()
        for name in updates[0].upload
    }


def distance(a: Params, b: Params) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def aggregate(algorithm: FedBE, task: Task, updates: list[Update], seed: int = 0) -> Params:
    return algorithm.server_aggregate(task, updates[0].upload, iter(updates), generator(seed, "aggregate"))


def test_a_student_that_teaches_itself_is_fedavg(toy: Toy) -> None:
    begin = start(FedAvg(lr=0.01), toy)
    assert trees.equal(start(TAUGHT_BY_ITSELF, toy), begin)
    expected = play(FedAvg(lr=0.01), toy, begin, range(3)).server
    torch.testing.assert_close(play(TAUGHT_BY_ITSELF, toy, begin, range(3)).server, expected, rtol=0, atol=1e-5)
    changes: dict[str, Any] = {"members": 1, "clients_teach": True, "temperature": 0.5, "distil_decay": 0.1}
    for change in ({name: value} for name, value in changes.items()):
        other = play(replace(TAUGHT_BY_ITSELF, **change), toy, begin, range(3)).server
        assert distance(other, expected) > 1e-4, change


def test_clients_train_as_in_fedavg_bit_for_bit(toy: Toy) -> None:
    w, data = start(FedBE(), toy).server, toy.train[2]
    other = FedBE(local_steps=3, lr=0.2, batch_size=7), FedAvg(local_steps=3, lr=0.2, batch_size=7)
    for algorithm, fedavg in ((FedBE(), FedAvg(lr=0.01)), other):
        upload, _, info = algorithm.client_update(toy.task, w, None, data, generator(0))
        expected, _, told = fedavg.client_update(toy.task, w, None, data, generator(0))
        assert trees.equal(upload, expected) and info == told


def test_the_gaussian_has_the_weighted_mean_and_variance_of_the_clients() -> None:
    """30 examples say 1, 10 say 5: the mean is 2, the variance (3 (1 - 2)^2 + (5 - 2)^2) / 4 = 3."""
    updates = constants([30, 10], [[1.0] * 20_000, [5.0] * 20_000])
    one, two = islice(gaussian_draws(mean(updates), updates, 1.0, generator(0)), 2)
    for draw in (one, two):
        assert abs(draw["w"].mean().item() - 2) < 0.05 and abs(draw["w"].var().item() - 3) < 0.1
    assert abs(torch.corrcoef(torch.stack([one["w"], two["w"]]))[0, 1].item()) < 0.03


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_gaussian_draws_element_by_element(toy: Toy, spread: float) -> None:
    updates, noise = arrivals(toy), generator(5)
    mu, weights = mean(updates), [u.num_examples for u in updates]
    for draw in islice(gaussian_draws(mu, updates, spread, generator(5)), 3):
        for name, m in mu.items():
            squares = [(u.upload[name] - m).numpy() ** 2 for u in updates]
            std = np.sqrt(np.average(squares, axis=0, weights=weights))
            expected = m.numpy() + spread * std * torch.randn(m.shape, generator=noise).numpy()
            np.testing.assert_allclose(draw[name], expected, rtol=1e-4, atol=1e-6)


@either
def test_with_one_client_every_teacher_is_its_network_and_so_is_the_student(toy: Toy, algorithm: FedBE) -> None:
    update = arrivals(toy)[0]
    teachers = list(algorithm.teachers(update.upload, [update], generator(0)))
    assert len(teachers) == 12 and all(trees.equal(teacher, update.upload) for teacher in teachers)
    plain = replace(algorithm, temperature=1.0, distil_decay=0.0, distil_lr=0.1)
    torch.testing.assert_close(aggregate(plain, toy.task, [update]), update.upload, rtol=0, atol=1e-5)
    assert distance(aggregate(replace(plain, temperature=0.5), toy.task, [update]), update.upload) > 1e-3


@either
def test_the_teachers_are_the_mean_the_draws_and_the_clients(toy: Toy, algorithm: FedBE) -> None:
    wbar = mean(updates := arrivals(toy))
    teachers = list(algorithm.teachers(wbar, updates, generator(0)))
    assert len(teachers) == 1 + 10 + 4 and teachers[0] is wbar
    assert [id(teacher) for teacher in teachers[11:]] == [id(u.upload) for u in updates]
    draws = [torch.cat([p.flatten() for p in teacher.values()]) for teacher in teachers[:11]]
    assert len(torch.unique(torch.stack(draws), dim=0)) == 11
    alone = replace(algorithm, clients_teach=False, members=3)
    assert len(list(alone.teachers(wbar, updates, generator(0)))) == 4
    nobody = replace(algorithm, clients_teach=False, members=0)
    assert [id(teacher) for teacher in nobody.teachers(wbar, updates, generator(0))] == [id(wbar)]


def test_dirichlet_draws_have_the_moments_of_torchs_dirichlet() -> None:
    """With clients of one size whose networks are unit vectors, a draw is gamma itself."""
    updates, expected = constants([20] * 3, torch.eye(3).tolist()), Dirichlet(torch.full((3,), 0.7))
    gammas = torch.stack([draw["w"] for draw in islice(dirichlet_draws(updates, 0.7, generator(0)), 4000)])
    torch.testing.assert_close(gammas.mean(0), expected.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(gammas.var(0), expected.variance, rtol=0, atol=0.005)


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 50.0])
def test_dirichlet_draws_weigh_clients_by_their_examples_within_the_convex_hull(alpha: float) -> None:
    """Without the sizes, a draw is the gamma that clients of one size would have got."""
    sizes, axes = [30, 10, 5, 300], torch.eye(4).tolist()
    gammas = islice(dirichlet_draws(constants([1] * 4, axes), alpha, generator(3)), 100)
    for gamma, draw in zip(gammas, dirichlet_draws(constants(sizes, axes), alpha, generator(3)), strict=False):
        assert bool((draw["w"] >= 0).all())
        torch.testing.assert_close(draw["w"].sum(), torch.tensor(1.0))
        expected = gamma["w"] * torch.tensor(sizes)
        torch.testing.assert_close(draw["w"], expected / expected.sum())


def test_a_large_alpha_draws_the_mean_and_a_small_one_a_client(toy: Toy) -> None:
    updates = arrivals(toy)
    for draw in islice(dirichlet_draws(updates, 1e9, generator(0)), 5):
        torch.testing.assert_close(draw, mean(updates), rtol=0, atol=1e-4)
    for draw in islice(dirichlet_draws(updates, 1e-6, generator(0)), 5):
        assert min(distance(draw, u.upload) for u in updates) < 1e-6


@either
def test_a_round_is_decided_by_its_seed_and_leaves_global_states_alone(toy: Toy, algorithm: FedBE) -> None:
    updates = arrivals(toy)
    torch.manual_seed(1)
    one = aggregate(algorithm, toy.task, updates)
    torch.manual_seed(2)
    before, numpy_before = torch.get_rng_state(), str(np.random.get_state(legacy=False))
    assert trees.equal(aggregate(algorithm, toy.task, updates), one)
    assert torch.equal(torch.get_rng_state(), before) and str(np.random.get_state(legacy=False)) == numpy_before
    assert not trees.equal(aggregate(algorithm, toy.task, updates, seed=1), one)
    draws = [list(algorithm.teachers(one, updates, generator(seed)))[1] for seed in (0, 0, 1)]
    assert trees.equal(draws[0], draws[1]) and not trees.equal(draws[0], draws[2])


def test_a_client_is_weighed_by_its_own_examples_wherever_it_stands(toy: Toy) -> None:
    """Ids are neither positions nor weights: only the order of a sum may change."""
    updates, algorithm = arrivals(toy), FedBE(distil_lr=0.05)
    shuffled = [updates[i]._replace(client_id=50 + i) for i in (2, 0, 3, 1)]
    expected = aggregate(algorithm, toy.task, updates)
    torch.testing.assert_close(aggregate(algorithm, toy.task, shuffled), expected, rtol=1e-4, atol=1e-5)
    swapped = [u._replace(num_examples=v.num_examples) for u, v in zip(updates, shuffled, strict=True)]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(aggregate(algorithm, toy.task, swapped), expected, rtol=1e-4, atol=1e-5)


def opinions() -> Tensor:
    return Dirichlet(torch.full((CLASSES,), 0.5)).sample((200,))


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_sharpening_is_a_power_and_changes_nothing_at_temperature_one(temperature: float) -> None:
    p = opinions()
    power = p.double().numpy() ** (1 / temperature)
    expected = power / power.sum(-1, keepdims=True)
    np.testing.assert_allclose(sharpen(p, temperature), expected, rtol=1e-4, atol=2 * FLOOR)
    assert torch.allclose(sharpen(p, temperature), p, atol=1e-6) == (temperature == 1.0)


@pytest.mark.parametrize("temperature", [1e-40, 1e-3, 0.5, 1.0, 10.0])
def test_sharpened_labels_keep_the_first_class_and_are_probabilities(temperature: float) -> None:
    p = torch.cat([opinions(), torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.3, 0.2, 0.0]])]).double()
    sharp = sharpen(p, temperature)
    assert torch.equal(sharp.argmax(-1), p.argmax(-1))
    assert sharp.min().item() > 0.9 * FLOOR
    torch.testing.assert_close(sharp.sum(-1), torch.ones(len(p)).double(), rtol=0, atol=1e-12)
    if temperature < 1e-2:
        torch.testing.assert_close(sharp[-2:], torch.eye(CLASSES).double()[[1, 0]], rtol=0, atol=1e-6)


def divergence(p: Tensor, logits: Tensor) -> Tensor:
    return kl_divergence(Categorical(probs=p), Categorical(logits=logits)).mean()


@pytest.mark.parametrize("n", [1, 3, 10])
def test_one_step_of_the_student_descends_the_divergence(toy: Toy, n: int) -> None:
    """w <- w - lr (grad mean KL(p || q) + decay w), on a public set smaller than a batch."""
    algorithm = FedBE(distil_epochs=1, distil_lr=0.1, distil_decay=0.3, temperature=0.5)
    task = toy.task._replace(public=public(toy)[:n])
    wbar = mean(updates := arrivals(toy))
    teachers = list(algorithm.teachers(wbar, updates, generator(0, "aggregate")))
    power = torch.stack([said(task, w, public(toy)[:n]) for w in teachers]).mean(0) ** 2
    model = loaded(task, wbar)
    kl = divergence(power / power.sum(-1, keepdim=True), model(public(toy)[:n]))
    slopes = torch.autograd.grad(kl, list(model.parameters()))
    expected = {name: w - 0.1 * (g + 0.3 * w) for (name, w), g in zip(wbar.items(), slopes, strict=True)}
    torch.testing.assert_close(aggregate(algorithm, task, updates), expected, rtol=1e-4, atol=1e-6)


def test_the_next_network_is_the_mean_of_snapshots_of_torchs_sgd(toy: Toy) -> None:
    algorithm = FedBE(distil_epochs=4, distil_batch=24, swa_start=0.25, swa_every=4, distil_lr=0.05, distil_decay=0.01)
    updates = arrivals(toy)
    wbar, marks = mean(updates), [7, 11, 12]
    assert algorithm.marks(64) == marks
    rng = generator(0, "aggregate")
    p = sharpen(ensemble(toy.task, algorithm.teachers(wbar, updates, rng), public(toy)), 0.5)

    model, snapshots = loaded(toy.task, wbar), []
    for step, batch in enumerate(batches(Data(x=public(toy), y=p), 24, 12, rng)):
        if step in (0, *marks):
            optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        optimiser.zero_grad()
        divergence(batch.y, model(batch.x)).backward()
        optimiser.step()
        if step + 1 in marks:
            snapshots.append({name: w.detach().clone() for name, w in model.named_parameters()})
    expected = {name: torch.stack([w[name] for w in snapshots]).mean(0) for name in wbar}
    torch.testing.assert_close(aggregate(algorithm, toy.task, updates), expected, rtol=1e-4, atol=1e-5)


def test_the_mean_of_a_student_that_stands_still_is_where_it_stands(toy: Toy) -> None:
    updates = arrivals(toy)
    expected = FedAvg().server_aggregate(toy.task, updates[0].upload, updates, generator(0))
    still = FedBE(distil_lr=0.0, distil_batch=4, swa_every=3)
    assert len(still.marks(64)) > 50
    assert trees.equal(aggregate(still, toy.task, updates), expected)
    assert trees.equal(aggregate(FedBE(distil_epochs=0), toy.task, updates), expected)
    assert not trees.equal(aggregate(FedBE(), toy.task, updates), expected)


def test_snapshots_come_after_a_share_of_the_steps_and_at_the_last() -> None:
    """10,000 inputs: the 43 of the authors' code and the last of 1580 steps."""
    assert FedBE().marks(10_000) == [*range(525, 1576, 25), 1580]
    assert FedBE().marks(240) == [38, 40]
    assert FedBE().marks(10) == [20]
    assert FedBE(swa_start=1.0).marks(240) == [40]
    assert FedBE(swa_start=0.0, swa_every=10).marks(240) == [10, 20, 30, 40]
    assert FedBE(distil_epochs=0).marks(240) == [0]


@pytest.mark.parametrize("public", [None, torch.zeros(0, 12)])
def test_without_public_inputs_the_server_refuses(toy: Toy, public: Tensor | None) -> None:
    task = toy.task._replace(public=public)
    with pytest.raises(BadInput, match=r"unlabelled inputs at the server.*data\.public_fraction.*0\.04.*Task\.public"):
        FedBE().init_server(task, generator(0))
    with pytest.raises(BadInput, match="unlabelled"):
        aggregate(FedBE(), task, arrivals(toy))


def test_uint8_public_images_are_seen_as_the_clients_see_theirs() -> None:
    images = torch.randint(0, 256, (20, 1, 6, 6), generator=generator(0), dtype=torch.uint8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))
    task, algorithm = Task(model, CLASSES, public=images), FedBE(distil_lr=0.05)
    updates = [Update(k, 10 + k, algorithm.init_server(task, generator(k))) for k in range(3)]
    scaled = task._replace(public=images.double().div(255).mul(2).sub(1).float())
    expected = aggregate(algorithm, scaled, updates)
    torch.testing.assert_close(aggregate(algorithm, task, updates), expected, rtol=1e-4, atol=1e-5)


def test_every_client_predicts_with_the_global_network(toy: Toy) -> None:
    w, x = aggregate(FedBE(), toy.task, arrivals(toy)), toy.test[0].x
    for data in (toy.train[0], toy.train[3], blobs(torch.tensor([1]), "new")):
        torch.testing.assert_close(predict(FedBE(), toy.task, w, None, data, x), said(toy.task, w, x)[None])
