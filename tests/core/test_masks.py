"""Masks against products by hand, closed-form moments, the rank-summed form, torch.distributions and torch's SVD."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from lrbpfl import trees
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.gaussian import Gaussian, sample
from lrbpfl.core.masks import Gates, Scales
from lrbpfl.core.network import Layer, Params, forward, init_params, maskable
from lrbpfl.core.objective import MaskedNetwork, free_energy, masked_network, nll
from lrbpfl.models import cnn
from lrbpfl.rng import generator

INF = math.inf
# Three layers that differ in everything: groups, ranks, and which of their ranks are open.
LAYERS = {"a": Layer(3, 2), "b": Layer(8, 4, groups=2), "c": Layer(4, 4, groups=4)}
GATES = {"a": torch.tensor([INF, 0.4, -INF]), "b": torch.tensor([INF, -INF, -30.0]), "c": torch.tensor([INF, -INF])}
OPEN = {"a": [0, 1], "b": [0, 2], "c": [0]}
NUMBERS = 2 * (3 + 2) + 2 * (8 + 4) + 1 * (4 + 4)  # of all factors of open ranks


def randn(*shape: int, at: str | int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test masks", at), dtype=torch.float64)


def random_masks(n: int) -> Gaussian:
    """Every mean and every standard deviation different."""
    return Gaussian(*randn(2, n, at="masks").unbind())


def normal(q: Gaussian) -> Normal:
    return Normal(q.mean, torch.log1p(torch.exp(q.rho)))


def scales_of(gates: Gates) -> Scales:
    return {name: torch.sigmoid(gamma[gamma > -INF]) for name, gamma in gates.items()}


def random_case(model: nn.Module, gamma: list[float], samples: int) -> tuple[MaskedNetwork, Params, Tensor, Gates]:
    """A masked network with draws of all its factors, in double precision."""
    layers = maskable(model.double())
    gates = {name: torch.tensor(gamma, dtype=torch.float64) for name in layers}
    network = masked_network(model, layers, gates)
    W = init_params(model, generator(0, "W"), "kaiming")
    W |= {name: randn(*p.shape, at=name) for name, p in W.items() if name.endswith("bias")}
    return network, W, randn(samples, sum(network.places.sizes), at="draws"), gates


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def test_every_entry_of_a_mask_comes_from_its_place_in_the_flat_vector() -> None:
    """M_oi = sum_r lambda_r Q_ro R_rj, j the i-th input of output o's group; Q before R, rank by rank, no gaps."""
    places, drawn = masking.layout(LAYERS, GATES), randn(NUMBERS, at="drawn")
    assert sum(places.sizes) == len(masking.prior_mean(places)) == NUMBERS
    found, scaled = masking.matrices(drawn, places), masking.matrices(drawn, places, scales_of(GATES))
    at = 0
    for name, (outputs, inputs, groups) in LAYERS.items():
        ranks = range(len(OPEN[name]))
        width = inputs // groups
        R_at = at + len(ranks) * outputs
        lam = [1 / (1 + math.exp(-GATES[name][r])) for r in OPEN[name]]
        assert found[name].shape == scaled[name].shape == (outputs, width)
        for o in range(outputs):
            for i in range(width):
                j = o // (outputs // groups) * width + i
                terms = [(drawn[at + r * outputs + o] * drawn[R_at + r * inputs + j]).item() for r in ranks]
                assert found[name][o, i].item() == pytest.approx(sum(terms))
                weighted = sum(by * term for by, term in zip(lam, terms, strict=True))
                assert scaled[name][o, i].item() == pytest.approx(weighted)
        at = R_at + len(ranks) * inputs
    assert at == NUMBERS


def test_closed_ranks_have_no_numbers() -> None:
    """A network with closed ranks is the one that never had them; a gate that is merely small is open."""
    model, x = tiny(), randn(4, 2, 4, 4, at="x")
    pruned, W, draws, _ = random_case(model, [INF, -INF, 0.3, -INF], samples=2)
    smaller, *_ = random_case(model, [INF, 0.3], samples=2)
    assert pruned.places.sizes == smaller.places.sizes and pruned.places.ranks == smaller.places.ranks
    assert torch.equal(pruned.logits(W, draws, x), smaller.logits(W, draws, x))
    assert torch.equal(masking.prior_mean(pruned.places), masking.prior_mean(smaller.places))
    assert set(random_case(model, [INF, -30.0, -INF], samples=1)[0].places.ranks.values()) == {2}


def test_ranks_start_apart_in_the_same_way_whichever_others_are_open() -> None:
    """What they are spread by adds up to nothing over the open ranks, and is else the same."""
    full = {name: torch.full_like(gamma, INF) for name, gamma in GATES.items()}

    def noise(gates: Gates) -> dict[str, masking.Factors]:
        places = masking.layout(LAYERS, gates)
        masks = masking.init(places, spread=1.0, std=0.1, rng=generator(0))
        return masking.factors(masks.mean - masking.prior_mean(places), places)

    some, every = noise(GATES), noise(full)
    for name, kept in OPEN.items():
        for got, expected in zip(some[name], every[name], strict=True):
            torch.testing.assert_close(got, expected[kept] - expected[kept].mean(0))


def test_fresh_masks_have_the_asked_moments_around_a_mask_of_ones() -> None:
    """The prior mean of a layer's factors is one over the root of its own rank."""
    layers = {"a": Layer(2000, 3000), "b": Layer(1000, 1000)}
    places = masking.layout(layers, {"a": torch.tensor([INF, 3.5, -INF, 3.5, 3.5]), "b": torch.tensor([INF, -INF])})
    mean = masking.prior_mean(places)
    assert mean.tolist() == [0.5] * 4 * 5000 + [1.0] * 2000
    assert all(bool((M == 1).all()) for M in masking.matrices(mean, places).values())
    masks = masking.init(places, spread=0.1, std=0.05, rng=generator(0))
    torch.testing.assert_close(nn.functional.softplus(masks.rho), torch.full_like(mean, 0.05))
    *rank_4, Q, R = (masks.mean - mean).split(places.sizes)
    assert not Q.any() and not R.any()  # a single rank has nobody to part from
    for part in rank_4:  # less the mean of four: three quarters of the variance
        torch.testing.assert_close(part.view(4, -1).sum(0), torch.zeros(len(part) // 4), atol=1e-5, rtol=0)
        assert part.std().item() == pytest.approx(0.1 * 0.75**0.5, rel=0.03)
    (M, one) = masking.matrices(masks.mean, places).values()
    assert bool((one == 1).all()) and (M - 1).std().item() == pytest.approx(3**0.5 * 0.1**2, rel=0.05)


def test_mask_moments() -> None:
    """E[M_ij] = sum lambda mq mr; Var[M_ij] = sum lambda^2 (mq^2 sr^2 + mr^2 sq^2 + sq^2 sr^2)."""
    gates = {"w": torch.tensor([INF, 0.4, -INF], dtype=torch.float64)}
    places, samples = masking.layout({"w": Layer(3, 2)}, gates), 200_000
    masks = random_masks(sum(places.sizes))
    draws = sample(masks, masking.draw(masks, samples, generator(0, "moments")))
    M = torch.vmap(lambda drawn: masking.matrices(drawn, places, scales_of(gates))["w"])(draws)

    lam = scales_of(gates)["w"][:, None, None]
    mq, mr = masks.mean[:6].view(2, 3, 1), masks.mean[6:].view(2, 1, 2)  # (ranks, outputs, 1), (ranks, 1, inputs)
    variances = torch.log1p(torch.exp(masks.rho)) ** 2
    vq, vr = variances[:6].view(2, 3, 1), variances[6:].view(2, 1, 2)
    mean = (lam * mq * mr).sum(0)
    variance = (lam**2 * (mq**2 * vr + mr**2 * vq + vq * vr)).sum(0)
    assert M.shape == (samples, 3, 2)
    assert bool(((M.mean(0) - mean).abs() < 4.5 * (variance / samples).sqrt()).all())
    torch.testing.assert_close(M.var(0), variance, rtol=0.03, atol=0)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear over a sequence": (lambda: nn.Linear(5, 4), (7, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "non-square, strided, dilated": (lambda: nn.Conv2d(3, 4, (1, 3), stride=2, dilation=2), (3, 9, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "depthwise, multiplied": (lambda: nn.Conv1d(3, 6, 3, groups=3), (3, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_equals_the_rank_summed_form(kind: str) -> None:
    """(W o M) x = sum_r lambda_r q_r o (W (r_r o x)), and the bias stays outside."""
    build, shape = KINDS[kind]
    model, samples = build(), 2
    network, W, draws, gates = random_case(model, [INF, 0.3, -1.0, -INF], samples)
    x = randn(5, *shape, at="x")
    got = network.logits(W, draws, x, scales_of(gates))

    channel = -1 if isinstance(model, nn.Linear) else 1
    no_bias = {"weight": W["weight"], "bias": torch.zeros_like(W["bias"])}

    def along_channels(v: Tensor, like: Tensor) -> Tensor:
        view = [1] * like.dim()
        view[channel] = -1
        return v.reshape(view)

    for c in range(samples):
        Q, R = masking.factors(draws[c], network.places)["weight"]
        branches = []
        for r, lam in enumerate([1.0, 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(1.0))]):
            y = forward(model, no_bias, along_channels(R[r], x) * x)
            branches.append(lam * along_channels(Q[r], y) * y)
        y = torch.stack(branches).sum(0)
        torch.testing.assert_close(got[c], y + along_channels(W["bias"], y))


def test_masking_leaves_its_arguments_and_all_other_parameters_alone() -> None:
    W = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2), "norm.weight": torch.ones(2)}
    G = masking.masked(W, {"fc.weight": torch.full((2, 3), 5.0)})
    assert torch.equal(G["fc.weight"], torch.full((2, 3), 5.0)) and torch.equal(W["fc.weight"], torch.ones(2, 3))
    assert G["fc.bias"] is W["fc.bias"] and G["norm.weight"] is W["norm.weight"] and G.keys() == W.keys()


def test_a_mask_of_ones_changes_no_bit() -> None:
    model = cnn(4)
    network = masked_network(model, maskable(model), {name: gating.init(4) for name in maskable(model)})
    W, x = init_params(model, generator(0, "W"), "kaiming"), torch.randn(3, 3, 32, 32, generator=generator(0, "x"))
    mean = masking.prior_mean(network.places)
    got = network.logits(W, torch.stack([mean, mean]), network.before(W, x))
    assert got.shape == (2, 3, 4)
    assert torch.equal(got[0], forward(model, W, x)) and torch.equal(got[1], got[0])


def test_noise_is_standard_normal_and_decided_by_its_generator() -> None:
    masks = Gaussian(torch.zeros(5000, dtype=torch.float64), torch.zeros(5000, dtype=torch.float64))
    noise = masking.draw(masks, 3, generator(0, "a"))
    assert noise.shape == (3, 5000) and noise.dtype == torch.float64
    assert abs(noise.mean()) < 4 / 15_000**0.5 and noise.std().item() == pytest.approx(1, abs=0.03)
    assert bool((torch.corrcoef(noise) - torch.eye(3)).abs().max() < 4 / 5000**0.5)
    assert torch.equal(noise, masking.draw(masks, 3, generator(0, "a")))
    assert not torch.equal(noise, masking.draw(masks, 3, generator(0, "b")))


def test_the_kl_and_its_gradients_match_torch() -> None:
    places, prior_std = masking.layout(LAYERS, GATES), 0.1**0.5
    parts = [part.requires_grad_() for part in random_masks(NUMBERS)]
    got = masking.kl_divergence(Gaussian(*parts), masking.prior_mean(places).double(), prior_std)
    means = [2**-0.5] * (2 * (3 + 2) + 2 * (8 + 4)) + [1.0] * (4 + 4)  # ranks 2, 2 and 1
    prior = Normal(torch.tensor(means, dtype=torch.float64), prior_std)
    expected = kl_divergence(normal(Gaussian(*parts)), prior).sum()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, parts), torch.autograd.grad(expected, parts))


def test_gradients_of_the_free_energy_match_finite_differences() -> None:
    """In W, in the masks, and in the gates that can move; those at both ends have none."""
    model, x, y = tiny(), randn(3, 2, 4, 4, at="x"), torch.tensor([0, 2, 1])
    network, W, noise, gates = random_case(model, [INF, 0.8, -0.4, -INF], samples=2)
    masks, prior_mean = random_masks(noise.shape[1]), masking.prior_mean(network.places).double()
    template = (W, masks, gates)
    names = [name for name, _ in trees.named_leaves(template)]

    def F(W: Params, masks: Gaussian, gates: Gates) -> Tensor:
        scales = {name: gating.gate_values(gamma)[gating.is_open(gamma)] for name, gamma in gates.items()}
        logits = network.logits(W, sample(masks, noise), x, scales)
        kl = masking.kl_divergence(masks, prior_mean, 0.3)
        return free_energy(nll(logits, y), kl, temperature=0.8, num_data=7)

    leaves = trees.tree_map(lambda p: p.clone().requires_grad_(), template)
    F(*leaves).backward()
    for gamma in leaves[2].values():
        assert gamma.grad[0] == gamma.grad[3] == 0 and bool((gamma.grad[1:3] != 0).all())

    def inner(*between: Tensor) -> Tensor:
        W, masks, moved = trees.rebuild(template, dict(zip(names, between, strict=True)))
        fixed = {name: torch.where(gamma.isfinite(), moved[name], gamma) for name, gamma in gates.items()}
        return F(W, masks, fixed)

    points = [torch.nan_to_num(leaf, posinf=0.0, neginf=0.0).requires_grad_() for leaf in trees.leaves(template)]
    assert torch.autograd.gradcheck(inner, points)


def test_samples_differ_and_the_examples_of_a_batch_share_them() -> None:
    network, W, draws, _ = random_case(tiny(), [INF, 0.5], samples=3)
    x = randn(4, 2, 4, 4, at="x")
    logits = network.logits(W, draws, x)
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(logits[1], logits[2])
    one_by_one = torch.cat([network.logits(W, draws, x[i : i + 1]) for i in range(4)], dim=1)
    torch.testing.assert_close(one_by_one, logits)


@pytest.mark.parametrize(
    ("outputs", "inputs", "rank"), [(7, 5, 3), (5, 7, 1), (10, 3, 8), (3, 10, 8), (2, 3, 4), (6, 1, 2)]
)
def test_truncated_masks_are_torchs_truncated_svd(outputs: int, inputs: int, rank: int) -> None:
    """Wide, tall and narrower than their rank: a layer has no more ranks than its shorter side."""
    Q, R = randn(rank, outputs, at="Q"), randn(rank, inputs, at="R")
    U, values, V = torch.linalg.svd(Q.T @ R, full_matrices=False)
    found = masking.truncated(Q, R)
    assert len(found) == min(outputs, inputs, rank)
    for r, (left, right) in enumerate(found, start=1):
        assert left.shape == (r, outputs) and right.shape == (r, inputs)
        torch.testing.assert_close(left.T @ right, U[:, :r] * values[:r] @ V[:r])
    torch.testing.assert_close(masking.matrix(*found[-1]), Q.T @ R)
