"""Likelihoods and the free energy by hand and against torch."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core import masks as masking
from lrbpfl.core.gaussian import Gaussian
from lrbpfl.core.masks import Gates, Mask, Masks
from lrbpfl.core.network import LayerKind, forward, init_params, maskable
from lrbpfl.core.objective import free_energy, mask_logits, nll, plain_logits, probabilities
from lrbpfl.models import cnn
from lrbpfl.rng import generator

SAMPLES, BATCH, CLASSES = 4, 9, 5
LOGITS = 3 * torch.randn(SAMPLES, BATCH, CLASSES, generator=generator(0, "logits"), dtype=torch.float64)
LABELS = torch.randint(CLASSES, (BATCH,), generator=generator(0, "labels"))


def test_elbo_is_the_mean_cross_entropy() -> None:
    expected = torch.stack([nnf.cross_entropy(LOGITS[c], LABELS) for c in range(SAMPLES)]).mean()
    torch.testing.assert_close(nll(LOGITS, LABELS), expected)
    torch.testing.assert_close(nll(LOGITS, LABELS, "elbo"), expected)


def test_mixture_is_the_cross_entropy_of_the_averaged_probability() -> None:
    averaged = torch.softmax(LOGITS, dim=-1).mean(0)
    torch.testing.assert_close(nll(LOGITS, LABELS, "mixture"), nnf.nll_loss(averaged.log(), LABELS))


def test_mixture_is_never_above_elbo() -> None:
    for seed in range(20):
        logits = 3 * torch.randn(SAMPLES, BATCH, CLASSES, generator=generator(seed, "jensen"))
        assert nll(logits, LABELS, "mixture") < nll(logits, LABELS, "elbo")


def test_one_sample_makes_them_equal() -> None:
    expected = nnf.cross_entropy(LOGITS[0], LABELS)
    for likelihood in ("elbo", "mixture"):
        torch.testing.assert_close(nll(LOGITS[:1], LABELS, likelihood), expected)


def test_improbable_labels_cost_a_finite_amount() -> None:
    logits = torch.tensor([[[0.0, 1e4]], [[0.0, 2e4]]])
    assert nll(logits, torch.tensor([0]), "elbo").item() == pytest.approx(1.5e4)
    assert nll(logits, torch.tensor([0]), "mixture").item() == pytest.approx(1e4 + math.log(2))


def case() -> tuple[Masks, Gates]:
    """Two layers, all posteriors N(1, 1), one of four gates closed: 2 + 1 ranks, (3 + 2) and (2 + 4) numbers each."""
    layers = maskable(nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2)))
    gates = {"0.weight": torch.tensor([math.inf, 0.0]), "1.weight": torch.tensor([math.inf, -math.inf])}
    return masking.init(layers, {name: torch.zeros(1) for name in layers}, spread=0.0, std=1.0, rng=generator(0)), gates


def widened(masks: Masks) -> Masks:
    return {name: Mask(*(Gaussian(*(part.repeat(1, 2) for part in q)) for q in mask)) for name, mask in masks.items()}


@pytest.mark.parametrize(("num_data", "temperature", "gate_penalty"), [(1, 1.0, 0.0), (50, 1.0, 0.1), (20, 0.25, 3.0)])
def test_the_free_energy_by_hand(num_data: int, temperature: float, gate_penalty: float) -> None:
    masks, gates = case()
    masks, prior_std = widened(masks), 0.5

    def kl(prior_mean: float) -> float:  # of N(1, 1) from N(prior_mean, 0.5^2)
        return math.log(0.5) + (1 + (1 - prior_mean) ** 2) / (2 * 0.25) - 0.5

    total_kl = (3 + 2) * 2 * kl(2**-0.5) + (2 + 4) * 1 * kl(1.0)
    expected = 1.7 + (temperature * total_kl + gate_penalty * 0.5**2) / num_data
    got = free_energy(
        torch.tensor(1.7),
        masks,
        gates,
        prior_std=prior_std,
        num_data=num_data,
        temperature=temperature,
        gate_penalty=gate_penalty,
    )
    assert got.shape == () and got.item() == pytest.approx(expected, rel=1e-5)


def test_plain_logits_are_one_sample() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    W = init_params(model, generator(0), "kaiming")
    logits = plain_logits(model, W, x)
    assert logits.shape == (1, 4, 2)
    torch.testing.assert_close(logits[0], x @ W["weight"].T + W["bias"])


def test_mask_logits_scale_images_once() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    W = init_params(model, generator(0), "kaiming")
    gates = {name: torch.full((1,), math.inf) for name in maskable(model)}
    masks = masking.init(maskable(model), gates, spread=0.1, std=0.1, rng=generator(0))
    noise = masking.draw(masks, 2, generator(0))
    images = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)
    scaled = images.float() / 127.5 - 1
    torch.testing.assert_close(
        mask_logits(model, W, masks, gates, noise, images), mask_logits(model, W, masks, gates, noise, scaled)
    )


@pytest.mark.parametrize(("kind", "passes"), [("dense", 1), ("all", 3)])
def test_what_comes_before_the_first_mask_is_computed_once(kind: LayerKind, passes: int) -> None:
    """With the same logits and gradients as the whole network under each mask."""
    model = cnn(3, (1, 8, 8))
    layers = maskable(model, kind)
    W = {name: w.requires_grad_() for name, w in init_params(model, generator(0), "kaiming").items()}
    gates = {name: torch.tensor([math.inf, 0.5]) for name in layers}
    masks = masking.init(layers, gates, spread=0.1, std=0.3, rng=generator(1))
    noise = masking.draw(masks, 3, generator(2))
    x = torch.randn(5, 1, 8, 8, generator=generator(3))
    calls: list[int] = []
    handle = model.get_submodule("conv1").register_forward_pre_hook(lambda module, args: calls.append(1))
    logits = mask_logits(model, W, masks, gates, noise, x)
    assert len(calls) == passes
    handle.remove()
    whole = []
    for c in range(3):
        M = {}
        for name in layers:
            Q, R = masking.factors(masks[name], gates[name], noise[name])
            M[name] = masking.matrix(Q[c], R[c])
        whole.append(forward(model, masking.masked(W, M), x))
    expected = torch.stack(whole)
    torch.testing.assert_close(logits, expected)
    slopes = (torch.autograd.grad(out.square().sum(), list(W.values())) for out in (logits, expected))
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("chunk", [1, 4, 9, 500])
def test_chunks_change_nothing(chunk: int) -> None:
    weights = torch.randn(SAMPLES, 3, CLASSES, generator=generator(0, "weights"))
    x = torch.randn(BATCH, 3, generator=generator(0, "x"))
    seen: list[int] = []

    def logits(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x @ weights

    got = probabilities(logits, x, chunk)
    assert got.shape == (SAMPLES, BATCH, CLASSES)
    assert max(seen) <= chunk and sum(seen) == BATCH
    torch.testing.assert_close(got, torch.softmax(torch.einsum("nf,sfc->snc", x, weights), dim=-1))
    torch.testing.assert_close(got.sum(-1), torch.ones(SAMPLES, BATCH))


def test_probabilities_carry_no_graph() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    assert not probabilities(lambda x: (x @ weight)[None], torch.ones(2, 3)).requires_grad
