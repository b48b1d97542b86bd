"""The server of MetaVD: the precision-weighted mean, and the hypernetwork against torch's own parts and optimiser."""

import math

import pytest
import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms.metavd import Hyper, MetaVD, Server, hypernetwork, log_variances
from lrbpfl.algorithms.protocol import Update
from lrbpfl.core.network import Params
from lrbpfl.rng import generator
from tests.algorithms.hand import ToyRun, play, start
from tests.algorithms.test_metavd import NEW, SMALL, alike, message
from tests.conftest import Toy


def aggregate(toy: Toy, uploads: list[tuple[float, float, int]]) -> Params:
    """The server's network after uploads of (every parameter, every log-variance, examples) from new clients."""
    server = start(SMALL, toy).server
    updates = []
    for k, (value, log_variance, n) in enumerate(uploads):
        W = {name: torch.full_like(p, value) for name, p in server.theta.items()}
        upload = message(toy, log_variance)._replace(W=W)
        updates.append(Update(client_id=NEW + k, num_examples=n, upload=upload))
    theta: Params = SMALL.server_aggregate(toy.task, server, iter(updates), generator(0)).theta
    return theta


def test_equal_variances_give_the_weighted_mean(toy: Toy) -> None:
    for p in aggregate(toy, [(1.0, -3.0, 30), (5.0, -3.0, 10)]).values():
        torch.testing.assert_close(p, torch.full_like(p, 2.0))


def test_noisy_weights_are_averaged_by_their_precision_and_others_by_examples(toy: Toy) -> None:
    """v = 1/2 and 1/4: weights 30 * 2 and 10 * 4, so (60 * 1 + 40 * 5) / 100 = 2.6."""
    theta = aggregate(toy, [(1.0, math.log(0.5), 30), (5.0, math.log(0.25), 10)])
    for name, p in theta.items():
        torch.testing.assert_close(p, torch.full_like(p, 2.6 if name == "fc2.weight" else 2.0))


def test_a_client_that_is_sure_dominates(toy: Toy) -> None:
    """Down to v = exp(-8.5), where it weighs 4915 times as much as at v = 1."""
    for log_variance in (-8.5, -17.0):
        weight = aggregate(toy, [(1.0, 0.0, 10), (5.0, log_variance, 10)])["fc2.weight"]
        torch.testing.assert_close(weight, torch.full_like(weight, 5 - 4 / (1 + math.exp(8.5))))


def identity(psi: Params, embeddings: Tensor) -> Tensor:
    return embeddings


def step(algorithm: MetaVD, before: Tensor, ids: list[int], shares: Tensor, after: Tensor) -> Tensor:
    """The log-variances after the server's step with the identity for a hypernetwork."""
    hyper = Hyper(network={}, embeddings=before + 8.5)
    hyper, _ = algorithm.step(hyper, trees.tree_map(torch.zeros_like, hyper), ids, shares, after, identity)
    return hyper.embeddings - 8.5


PLAIN = MetaVD(hyper_lr=0.9, hyper_decay=0.0, hyper_momentum=0.0, embedding_momentum=0.0)


def test_with_the_identity_as_hypernetwork_l_moves_by_the_clients_changes() -> None:
    """By lr * sum g_m (l_after - l_before), to an embedding's own clients."""
    rng = generator(0, "identity")
    before = torch.rand(3, 6, generator=rng) * 8 - 8.2
    after, shares = torch.randn(4, 6, generator=rng) - 4, torch.tensor([0.1, 0.2, 0.3, 0.15])
    moved = step(PLAIN, before, [2, 0, 2, 2], shares, after) - before
    torch.testing.assert_close(moved[0], 0.9 * 0.2 * (after[1] - before[0]))
    torch.testing.assert_close(moved[2], sum(0.9 * shares[i] * (after[i] - before[2]) for i in (0, 2, 3)))
    assert torch.equal(moved[1], torch.zeros(6))


def test_a_pseudo_gradient_that_is_too_long_is_shortened() -> None:
    before, far = torch.full((1, 4), -4.0), torch.full((1, 4), 996.0)
    moved = step(PLAIN, before, [0], torch.ones(1), far) - before
    torch.testing.assert_close(moved, torch.full((1, 4), 0.9 * 50))  # 0.9 * 100 / sqrt(4) each
    moved = step(PLAIN, before, [0], torch.ones(1), torch.full((1, 4), 45.9)) - before
    torch.testing.assert_close(moved, torch.full((1, 4), 0.9 * 49.9))


def test_where_the_hypernetworks_output_is_cut_off_it_does_not_move() -> None:
    before = torch.tensor([[-17.5, -16.5, -0.5, 0.5]])  # outputs -9, -8, 8 and 9
    moved = step(PLAIN, before, [0], torch.ones(1), torch.full((1, 4), -4.0)) - before
    assert (moved != 0).tolist() == [[False, True, True, False]]


class Reference(nn.Module):
    """The hypernetwork and its embeddings from torch's parts, with the server's numbers."""

    def __init__(self, hyper: Hyper) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            weight, bias = hyper.network[f"{i}.weight"], hyper.network[f"{i}.bias"]
            layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.LeakyReLU(0.1)]
            layers[-2].load_state_dict({"weight": weight, "bias": bias})
        self.network = nn.Sequential(*layers[:-1])
        self.embeddings = nn.Embedding.from_pretrained(hyper.embeddings.clone(), freeze=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.network(self.embeddings(ids)).clamp(-8.5, 8.5) - 8.5
        return out


@pytest.mark.parametrize("clip", [100.0, 0.3])
def test_the_servers_steps_are_those_of_torch(toy: Toy, clip: float) -> None:
    """On sum_m g_m |l_m - after_m|^2 / 2, whose gradient is the pseudo-gradient, by torch's SGD with momentum."""
    algorithm = MetaVD(hidden=8, hyper_clip=clip)
    hyper = start(algorithm, toy).server.hyper
    momentum, reference = trees.tree_map(torch.zeros_like, hyper), Reference(hyper)
    groups = [
        {"params": list(reference.network.parameters()), "momentum": 0.6},
        {"params": list(reference.embeddings.parameters()), "momentum": 0.3},
    ]
    optimiser = torch.optim.SGD(groups, lr=0.9, weight_decay=5e-4)
    rng = generator(0, "after")
    for ids, shares in (([0, 2], [0.25, 0.75]), ([1], [1.0]), ([3, 0, 1], [0.2, 0.5, 0.1])):
        g, rows = torch.tensor(shares), torch.tensor(ids)
        torch.testing.assert_close(log_variances(hyper, ids), reference(rows).detach())
        after = log_variances(hyper, ids) + 0.1 * torch.randn(len(ids), 128, generator=rng)
        hyper, momentum = algorithm.step(hyper, momentum, ids, g, after, hypernetwork)
        optimiser.zero_grad()
        (0.5 * g[:, None] * (reference(rows) - after).square()).sum().backward()
        length = nn.utils.clip_grad_norm_(reference.parameters(), clip)
        assert (length > clip) == (clip < 1)
        optimiser.step()
    linear = [layer for layer in reference.network if isinstance(layer, nn.Linear)]
    expected = {f"{i}.{name}": p.detach() for i, layer in enumerate(linear) for name, p in layer.named_parameters()}
    torch.testing.assert_close(hyper.network, expected)
    torch.testing.assert_close(hyper.embeddings, reference.embeddings.weight.detach())


def wishes(toy: Toy, server: Server, changes: dict[int, float], n: int = 10) -> list[Update]:
    """Clients that return their message with all log-variances changed."""
    updates = []
    for k, change in changes.items():
        sent = SMALL.broadcast(toy.task, server, k)
        wanted = {name: log_v + change for name, log_v in sent.log_variance.items()}
        updates.append(Update(client_id=k, num_examples=n, upload=sent._replace(log_variance=wanted)))
    return updates


def test_the_hypernetwork_learns_whose_weights_want_how_much_noise(toy: Toy) -> None:
    """From equal embeddings, which only the clients' changes can tell apart, at a rate that lets it settle."""
    algorithm, wanted = MetaVD(hidden=8, hyper_lr=0.01, hyper_decay=0.0), {0: -6.0, 1: -7.5}
    server = alike(algorithm, toy)
    for _ in range(300):
        updates = [Update(k, 10, message(toy, log_variance)) for k, log_variance in wanted.items()]
        server = algorithm.server_aggregate(toy.task, server, updates, generator(0))
    for k, log_variance in wanted.items():
        row = log_variances(server.hyper, [k])
        torch.testing.assert_close(row, torch.full_like(row, log_variance), atol=0.1, rtol=0)


def test_training_makes_clients_with_equal_embeddings_differ(toy: Toy) -> None:
    algorithm = MetaVD(warmup=0)
    begin = ToyRun(server=alike(algorithm, toy), clients=dict.fromkeys(toy.train))
    hyper = play(algorithm, toy, begin, range(4)).server.hyper
    rows = log_variances(hyper, [0, 1, 2, 3])
    assert all((rows[i] - rows[j]).abs().max() > 0.01 for i in range(4) for j in range(i))


def test_clients_that_change_nothing_leave_the_hypernetwork_alone(toy: Toy) -> None:
    algorithm = MetaVD(hidden=8, hyper_decay=0.0)
    server = start(algorithm, toy).server
    updates = wishes(toy, server, {0: 0.0, 2: 0.0})
    torch.testing.assert_close(algorithm.server_aggregate(toy.task, server, updates, generator(0)).hyper, server.hyper)


def test_the_embedding_of_a_client_that_is_not_sampled_only_decays(toy: Toy) -> None:
    server = start(SMALL, toy).server
    after = SMALL.server_aggregate(toy.task, server, wishes(toy, server, {3: 1.0}), generator(0)).hyper.embeddings
    others = [0, 1, 2]
    torch.testing.assert_close(after[others], server.hyper.embeddings[others] * (1 - 0.9 * 5e-4))
    assert not torch.allclose(after[3], server.hyper.embeddings[3] * (1 - 0.9 * 5e-4))


def test_a_new_client_gets_the_constant_and_moves_theta_only(toy: Toy) -> None:
    server = start(SMALL, toy).server
    for k in (4, NEW):
        sent = SMALL.broadcast(toy.task, server, k)
        assert bool((sent.log_variance["fc2.weight"] == -8.5).all())
    assert not bool((SMALL.broadcast(toy.task, server, 3).log_variance["fc2.weight"] == -8.5).any())
    upload, _, _ = SMALL.client_update(toy.task, sent, None, toy.train[0], generator(0))
    assert not trees.equal(upload.log_variance, sent.log_variance)
    after = SMALL.server_aggregate(toy.task, server, [Update(4, 10, upload)], generator(0))
    assert trees.equal((after.hyper, after.momentum), (server.hyper, server.momentum))
    torch.testing.assert_close(after.theta, upload.W)
    assert after.rounds == 1


def test_new_clients_count_in_the_weights_of_the_others(toy: Toy) -> None:
    """g_m = n_m / n over all of the round: with as much data at a new client, half the pseudo-gradient."""
    algorithm = MetaVD(hidden=8, hyper_decay=0.0, hyper_momentum=0.0, embedding_momentum=0.0)
    server = start(algorithm, toy).server
    alone = algorithm.server_aggregate(toy.task, server, wishes(toy, server, {1: 0.5}), generator(0))
    joined = algorithm.server_aggregate(toy.task, server, wishes(toy, server, {NEW: 3.0, 1: 0.5}), generator(0))
    torch.testing.assert_close(joined.momentum, trees.tree_map(lambda m: m / 2, alone.momentum))


def test_without_a_positive_bias_about_half_the_weights_would_start_dead(toy: Toy) -> None:
    server = start(MetaVD(output_bias=0.0), toy).server
    dead = (log_variances(server.hyper, [0, 1, 2, 3]) < -8.5).float().mean().item()
    assert 0.3 < dead < 0.7
