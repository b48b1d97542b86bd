"""Masks against their closed-form moments, the rank-summed form, torch.distributions and numerical gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from lrbpfl import trees
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data, OptimiserName, Rate, descend
from lrbpfl.core.gaussian import Gaussian, gaussian
from lrbpfl.core.masks import Gates, Mask, Masks, Noise, Noises
from lrbpfl.core.network import Params, forward, init_params, maskable
from lrbpfl.core.objective import free_energy, mask_logits, nll
from lrbpfl.models import cnn
from lrbpfl.rng import generator

INF = math.inf
EMPTY = Data(x=torch.zeros(0), y=torch.zeros(0))


def randn(*shape: int, at: str | int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test masks", at), dtype=torch.float64)


def random_masks(model: nn.Module, gates: Gates) -> Masks:
    """Posteriors with every mean and every standard deviation different."""
    masks = {}
    for name, layer in maskable(model).items():
        rank = len(gates[name])
        q, r = randn(2, layer.outputs, rank, at=f"{name} Q"), randn(2, layer.inputs, rank, at=f"{name} R")
        masks[name] = Mask(Q=Gaussian(*q.unbind()), R=Gaussian(*r.unbind()))
    return masks


def random_case(model: nn.Module, gamma: list[float], samples: int) -> tuple[Params, Masks, Gates, Noises]:
    """Everything that a masked network is made of, in double precision."""
    gates = {name: torch.tensor(gamma, dtype=torch.float64) for name in maskable(model)}
    W = {name: p.double() for name, p in init_params(model.double(), generator(0, "W"), "kaiming").items()}
    W |= {name: randn(*p.shape, at=name) for name, p in W.items() if name.endswith("bias")}
    masks = random_masks(model, gates)
    return W, masks, gates, masking.draw(masks, samples, generator(0, "noise"))


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def test_mask_moments() -> None:
    """E[M_ij] = sum lambda mq mr; Var[M_ij] = sum lambda^2 (mq^2 sr^2 + mr^2 sq^2 + sq^2 sr^2)."""
    outputs, inputs, samples = 3, 2, 200_000
    gamma = torch.tensor([INF, 0.4, -INF], dtype=torch.float64)
    mask = Mask(Q=Gaussian(*randn(2, outputs, 3, at="Q").unbind()), R=Gaussian(*randn(2, inputs, 3, at="R").unbind()))
    noise = masking.draw({"w": mask}, samples, generator(0, "moments"))["w"]
    M = torch.vmap(masking.matrix)(*masking.factors(mask, gamma, noise))

    lam = torch.tensor([1.0, 1 / (1 + math.exp(-0.4)), 0.0], dtype=torch.float64)
    mq, mr = mask.Q.mean[:, None], mask.R.mean[None]  # (outputs, 1, ranks), (1, inputs, ranks)
    vq, vr = (torch.log1p(torch.exp(rho)) ** 2 for rho in (mask.Q.rho[:, None], mask.R.rho[None]))
    mean = (lam * mq * mr).sum(-1)
    variance = (lam**2 * (mq**2 * vr + mr**2 * vq + vq * vr)).sum(-1)
    assert M.shape == (samples, outputs, inputs)
    assert bool(((M.mean(0) - mean).abs() < 4.5 * (variance / samples).sqrt()).all())
    torch.testing.assert_close(M.var(0), variance, rtol=0.03, atol=0)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear over a sequence": (lambda: nn.Linear(5, 4), (7, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "non-square": (lambda: nn.Conv2d(3, 4, (1, 3), padding=(0, 1)), (3, 5, 6)),
    "strided, dilated": (lambda: nn.Conv2d(3, 4, 3, stride=2, dilation=2), (3, 9, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
    "depthwise, multiplied": (lambda: nn.Conv1d(3, 6, 3, groups=3), (3, 8)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_mask_equals_the_rank_summed_form(kind: str) -> None:
    """(W o M) x = sum_r lambda_r q_r o (W (r_r o x)), and the bias stays outside."""
    build, shape = LAYERS[kind]
    model, samples = build(), 2
    W, masks, gates, noise = random_case(model, [INF, 0.3, -1.0, -INF], samples)
    x = randn(5, *shape, at="x")
    got = mask_logits(model, W, masks, gates, noise, x)

    channel = -1 if isinstance(model, nn.Linear) else 1
    no_bias = {"weight": W["weight"], "bias": torch.zeros_like(W["bias"])}

    def along_channels(v: Tensor, like: Tensor) -> Tensor:
        view = [1] * like.dim()
        view[channel] = -1
        return v.reshape(view)

    mask, lam = masks["weight"], torch.sigmoid(gates["weight"])
    for c in range(samples):
        Q = mask.Q.mean + torch.log1p(torch.exp(mask.Q.rho)) * noise["weight"].Q[c].T
        R = mask.R.mean + torch.log1p(torch.exp(mask.R.rho)) * noise["weight"].R[c].T
        branches = []
        for r in range(len(lam)):
            y = forward(model, no_bias, along_channels(R[:, r], x) * x)
            branches.append(lam[r] * along_channels(Q[:, r], y) * y)
        y = torch.stack(branches).sum(0)
        torch.testing.assert_close(got[c], y + along_channels(W["bias"], y))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_mask_is_one_number_per_weight_matrix_entry(groups: int) -> None:
    Q, R = randn(3, 8, at="Q"), randn(3, 4, at="R")  # (ranks, outputs), (ranks, inputs)
    M = masking.matrix(Q, R, groups)
    assert M.shape == (8, 4 // groups)
    for o in range(8):
        for i in range(4 // groups):
            j = o // (8 // groups) * (4 // groups) + i  # the i-th input of output o's group
            torch.testing.assert_close(M[o, i], sum((Q[r, o] * R[r, j] for r in range(3)), torch.tensor(0.0)))


def test_masking_leaves_its_arguments_and_all_other_parameters_alone() -> None:
    W = {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2), "norm.weight": torch.ones(2)}
    G = masking.masked(W, {"fc.weight": torch.full((2, 3), 5.0)})
    assert torch.equal(G["fc.weight"], torch.full((2, 3), 5.0)) and torch.equal(W["fc.weight"], torch.ones(2, 3))
    assert G["fc.bias"] is W["fc.bias"] and G["norm.weight"] is W["norm.weight"] and G.keys() == W.keys()


def poisoned(masks: Masks, noise: Noises, rank: int, mean: float, rho: float, draw: float) -> tuple[Masks, Noises]:
    """The same masks and noise, except for what this rank holds."""

    def factor(q: Gaussian) -> Gaussian:
        q = Gaussian(mean=q.mean.clone(), rho=q.rho.clone())
        q.mean[:, rank], q.rho[:, rank] = mean, rho
        return q

    def normal(noise: Tensor) -> Tensor:
        noise = noise.clone()
        noise[:, rank] = draw
        return noise

    return (
        {name: Mask(Q=factor(mask.Q), R=factor(mask.R)) for name, mask in masks.items()},
        {name: Noise(Q=normal(n.Q), R=normal(n.R)) for name, n in noise.items()},
    )


def loss(model: nn.Module, W: Params, masks: Masks, gates: Gates, noise: Noises, data: Data) -> Tensor:
    likelihood = nll(mask_logits(model, W, masks, gates, noise, data.x), data.y)
    return free_energy(likelihood, masks, gates, prior_std=0.3, num_data=7, temperature=0.8, gate_penalty=0.1)


@pytest.mark.parametrize(
    "rubbish", [(7.0, 2.0, -3.0), (math.nan, math.nan, math.nan), (INF, -INF, INF), (-INF, INF, 0)]
)
def test_a_closed_gate_hides_whatever_its_factors_hold(rubbish: tuple[float, float, float]) -> None:
    model, data = tiny(), Data(x=randn(4, 2, 4, 4, at="x"), y=torch.tensor([0, 1, 2, 1]))
    W, masks, gates, noise = random_case(model, [INF, -INF, 0.3], samples=2)
    other_masks, other_noise = poisoned(masks, noise, 1, *rubbish)
    clean = mask_logits(model, W, masks, gates, noise, data.x)
    assert trees.equal(mask_logits(model, W, other_masks, gates, other_noise, data.x), clean)
    assert trees.equal(loss(model, W, other_masks, gates, other_noise, data), loss(model, W, masks, gates, noise, data))

    leaves = trees.tree_map(lambda p: p.clone().requires_grad_(), (W, other_masks, gates))
    loss(model, leaves[0], leaves[1], leaves[2], other_noise, data).backward()
    for mask in leaves[1].values():
        for q in mask:
            for part in q:
                assert bool((part.grad[:, 1] == 0).all()) and bool((part.grad[:, [0, 2]] != 0).all())
    for gamma in leaves[2].values():
        assert gamma.grad[0] == gamma.grad[1] == 0 and math.isfinite(gamma.grad[2]) and gamma.grad[2] != 0
    assert all(bool(torch.isfinite(w.grad).all()) for w in leaves[0].values())


def test_a_closed_gate_equals_a_smaller_mask() -> None:
    model = tiny()
    W, masks, gates, noise = random_case(model, [INF, -INF, 0.3], samples=2)
    x, kept = randn(4, 2, 4, 4, at="x"), [0, 2]
    small = trees.tree_map(lambda part: part[:, kept], masks)
    fewer = trees.tree_map(lambda part: part[:, kept], noise)
    open_gates = {name: gamma[kept] for name, gamma in gates.items()}
    assert trees.equal(
        mask_logits(model, W, small, open_gates, fewer, x), mask_logits(model, W, masks, gates, noise, x)
    )
    torch.testing.assert_close(masking.kl_divergence(small, open_gates, 0.3), masking.kl_divergence(masks, gates, 0.3))


def test_an_all_but_closed_gate_counts() -> None:
    """The counterpart: what is small but not pruned is still part of the mask and of the rank."""
    model = tiny()
    W, masks, gates, noise = random_case(model, [INF, -30.0, 0.3], samples=2)
    other_masks, other_noise = poisoned(masks, noise, 1, 7.0, 2.0, -3.0)
    assert masking.kl_divergence(other_masks, gates, 0.3) > masking.kl_divergence(masks, gates, 0.3)
    x = randn(4, 2, 4, 4, at="x")
    assert not trees.equal(
        mask_logits(model, W, other_masks, gates, other_noise, x), mask_logits(model, W, masks, gates, noise, x)
    )


@pytest.mark.parametrize(
    ("gamma", "rank"), [([INF, 3.5, 3.5, 3.5], 4), ([INF, -INF, 0.0, -INF], 2), ([INF, -INF, -INF, -INF], 1)]
)
def test_kl_matches_torch_over_layers_ranks_and_factors(gamma: list[float], rank: int) -> None:
    model, prior_std = tiny(), 0.1**0.5
    _, masks, gates, _ = random_case(model, gamma, samples=1)
    prior = Normal(torch.tensor(1 / math.sqrt(rank), dtype=torch.float64), prior_std)
    total = torch.tensor(0.0, dtype=torch.float64)
    for mask in masks.values():
        for q in (mask.Q, mask.R):
            for r in range(len(gamma)):
                if gamma[r] > -INF:
                    total += kl_divergence(Normal(q.mean[:, r], torch.log1p(torch.exp(q.rho[:, r]))), prior).sum()
    torch.testing.assert_close(masking.kl_divergence(masks, gates, prior_std), total)


def test_each_layer_has_the_prior_of_its_own_rank() -> None:
    model = tiny()
    first, second = maskable(model)
    gates = {first: torch.tensor([INF, -INF]), second: torch.tensor([INF, 3.5])}
    masks = masking.init(maskable(model), gates, spread=0.0, std=0.3, rng=generator(0))
    assert bool((masks[first].Q.mean == 1).all()) and bool((masks[second].R.mean == 2**-0.5).all())
    assert masking.kl_divergence(masks, gates, 0.3).item() == pytest.approx(0, abs=1e-4)
    swapped = dict(zip(gates, reversed(gates.values()), strict=True))
    assert masking.kl_divergence(masks, swapped, 0.3) > 1


@pytest.mark.parametrize("rank", [1, 2, 8])
def test_the_prior_mask_is_one_on_average(rank: int) -> None:
    gamma = torch.full((rank,), INF)
    assert masking.prior_mean(gamma) == pytest.approx(rank**-0.5)
    assert masking.prior_mean(torch.cat([gamma, torch.full((3,), -INF)])) == pytest.approx(rank**-0.5)
    means = torch.full((rank, 5), masking.prior_mean(gamma))
    torch.testing.assert_close(masking.matrix(means, means), torch.ones(5, 5))


@pytest.mark.parametrize("mask_mean", [0.5, 1.0, 2.0])
def test_the_prior_mask_has_the_asked_mean(mask_mean: float) -> None:
    model, gates = tiny(), {name: torch.tensor([INF, 3.5, -INF]) for name in maskable(tiny())}
    masks = masking.init(maskable(model), gates, spread=0.0, std=0.3, rng=generator(0), mask_mean=mask_mean)
    for mask in masks.values():
        M = masking.matrix(mask.Q.mean.T[:2], mask.R.mean.T[:2])
        torch.testing.assert_close(M, torch.full_like(M, mask_mean))
    assert masking.kl_divergence(masks, gates, 0.3, mask_mean).item() == pytest.approx(0, abs=1e-4)
    distance = 2**-0.5 * (math.sqrt(mask_mean) - 1)
    open_numbers = sum(2 * len(q.mean) for mask in masks.values() for q in mask)
    expected = open_numbers * kl_divergence(Normal(distance, 0.3), Normal(0.0, 0.3)).item()
    assert masking.kl_divergence(masks, gates, 0.3).item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_fresh_masks_have_the_asked_moments() -> None:
    gates = {"w": torch.tensor([INF, 3.5, 3.5, 3.5])}
    layer = maskable(nn.Linear(3000, 2000))["weight"]
    mask = masking.init({"w": layer}, gates, spread=0.1, std=0.05, rng=generator(0))["w"]
    assert mask.Q.mean.shape == (2000, 4) and mask.R.mean.shape == (3000, 4)
    for q in mask:
        assert q.mean.mean().item() == pytest.approx(0.5, abs=4 * 0.1 / 8000**0.5)
        assert q.mean.std().item() == pytest.approx(0.1, rel=0.05)
        torch.testing.assert_close(nn.functional.softplus(q.rho), torch.full_like(q.rho, 0.05))


def test_noise_is_standard_normal_and_decided_by_its_generator() -> None:
    model = cnn(10)
    gates = {name: torch.full((2,), INF) for name in maskable(model)}
    masks = masking.init(maskable(model), gates, spread=0.1, std=0.05, rng=generator(0))
    noise = masking.draw(masks, 3, generator(0, "a"))
    assert noise["conv2.weight"].Q.shape == (3, 2, 64) and noise["conv2.weight"].R.shape == (3, 2, 32)
    values = torch.cat([leaf.flatten() for leaf in trees.leaves(noise)])
    assert abs(values.mean()) < 4 / len(values) ** 0.5 and values.std().item() == pytest.approx(1, abs=0.03)
    assert len(set(values.tolist())) > 0.99 * len(values)
    assert trees.equal(noise, masking.draw(masks, 3, generator(0, "a")))
    assert not trees.equal(noise, masking.draw(masks, 3, generator(0, "b")))


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_kl_pulls_the_current_means_at_every_step(optimiser: OptimiserName) -> None:
    """The gradient is (mean - prior mean) / prior variance of the means as they are now, not as they began."""
    model, prior_std = tiny(), 0.5
    _, masks, gates, _ = random_case(model, [INF, 3.5], samples=1)
    steps = []

    def F(masks: Masks, batch: Data) -> Tensor:
        kl = masking.kl_divergence(masks, gates, prior_std)
        means = [q.mean for mask in masks.values() for q in mask]
        for mean, gradient in zip(means, torch.autograd.grad(kl, means, retain_graph=True), strict=True):
            expected = (mean.detach() - 2**-0.5) / prior_std**2
            torch.testing.assert_close(gradient, expected)
            assert bool((gradient != 0).all())
        steps.append(kl.item())
        return kl

    descend(F, (masks,), [EMPTY] * 10, (Rate(optimiser, 0.01),))
    assert len(steps) == 10 and steps == sorted(steps, reverse=True)


def test_gradients_of_the_free_energy_match_finite_differences() -> None:
    model, data = tiny(), Data(x=randn(3, 2, 4, 4, at="x"), y=torch.tensor([0, 2, 1]))
    W, masks, gates, noise = random_case(model, [INF, 0.8, -0.4, -INF], samples=2)
    first = {name: gamma[:1] for name, gamma in gates.items()}
    between = {name: gamma[1:3] for name, gamma in gates.items()}
    last = {name: gamma[3:] for name, gamma in gates.items()}
    template = (W, masks, between)
    names = [name for name, _ in trees.named_leaves(template)]

    def F(*leaves: Tensor) -> Tensor:
        W, masks, between = trees.rebuild(template, dict(zip(names, leaves, strict=True)))
        gates = {name: torch.cat([first[name], between[name], last[name]]) for name in first}
        return loss(model, W, masks, gates, noise, data)

    assert torch.autograd.gradcheck(F, [leaf.clone().requires_grad_() for leaf in trees.leaves(template)])


@pytest.mark.parametrize(("rank", "value"), [(1, 1.0), (4, 0.5)])
def test_a_mask_of_ones_changes_no_bit(rank: int, value: float) -> None:
    model = cnn(4)
    gates = {name: torch.full((rank,), INF) for name in maskable(model)}
    masks = trees.tree_map(
        lambda mean: Gaussian(mean=torch.full_like(mean, value), rho=torch.full_like(mean, -1e4)),
        {name: (torch.zeros(la.outputs, rank), torch.zeros(la.inputs, rank)) for name, la in maskable(model).items()},
    )
    masks = {name: Mask(*factors) for name, factors in masks.items()}
    noise = masking.draw(masks, 2, generator(0, "noise"))
    W, x = init_params(model, generator(0, "W"), "kaiming"), torch.randn(3, 3, 32, 32, generator=generator(0, "x"))
    got = mask_logits(model, W, masks, gates, noise, x)
    assert got.shape == (2, 3, 4)
    assert torch.equal(got[0], forward(model, W, x)) and torch.equal(got[1], got[0])


def test_samples_differ_and_the_examples_of_a_batch_share_them() -> None:
    model = tiny()
    W, masks, gates, noise = random_case(model, [INF, 0.5], samples=3)
    x = randn(4, 2, 4, 4, at="x")
    logits = mask_logits(model, W, masks, gates, noise, x)
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(logits[1], logits[2])
    one_by_one = torch.cat([mask_logits(model, W, masks, gates, noise, x[i : i + 1]) for i in range(4)], dim=1)
    torch.testing.assert_close(one_by_one, logits)


def test_gaussian_prior_is_the_one_of_the_formula() -> None:
    """At q = N(0, 1), p = N(1, 0.5^2): log 0.5 + (1 + 1) / (2 * 0.25) - 0.5 per number."""
    gates, q = {"w": torch.tensor([INF])}, gaussian(torch.zeros(3, 1), 1.0)
    got = masking.kl_divergence({"w": Mask(Q=q, R=q)}, gates, 0.5)
    assert got.item() == pytest.approx(6 * (math.log(0.5) + 4 - 0.5), rel=1e-5)


def test_a_wider_mask_masks_the_bias_with_its_last_column() -> None:
    W = {
        "a.weight": torch.randn(3, 2),
        "a.bias": torch.randn(3),
        "b.weight": torch.randn(4, 3, 5, 5),
        "b.bias": torch.ones(4),
    }
    M = {"a.weight": torch.randn(3, 3), "b.weight": torch.randn(4, 4)}
    G = masking.masked(W, M)
    assert torch.equal(G["a.weight"], W["a.weight"] * M["a.weight"][:, :2])
    assert torch.equal(G["a.bias"], W["a.bias"] * M["a.weight"][:, 2])
    assert torch.equal(G["b.weight"], W["b.weight"] * M["b.weight"][:, :3, None, None])
    assert torch.equal(G["b.bias"], M["b.weight"][:, 3])


def test_only_layers_with_a_bias_and_no_groups_get_a_column_for_it() -> None:
    model = nn.Sequential(
        nn.Linear(3, 2), nn.Linear(2, 4, bias=False), nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 5, 1)
    )
    layers = masking.with_bias(maskable(model), dict(model.named_parameters()))
    assert [layer.inputs for layer in layers.values()] == [4, 2, 4, 5]
