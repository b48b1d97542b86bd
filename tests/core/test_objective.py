"""Masked networks against whole ones, likelihoods and the free energy by hand and against torch."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core import masks as masking
from lrbpfl.core.network import LayerKind, forward, init_params, maskable
from lrbpfl.core.objective import free_energy, masked_network, nll, plain_logits, probabilities
from lrbpfl.models import cnn
from lrbpfl.rng import generator

SAMPLES, BATCH, CLASSES = 4, 9, 5
LOGITS = 3 * torch.randn(SAMPLES, BATCH, CLASSES, generator=generator(0, "logits"), dtype=torch.float64)
LABELS = torch.randint(CLASSES, (BATCH,), generator=generator(0, "labels"))


@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_the_likelihood_is_the_mean_cross_entropy_over_the_masks(samples: int) -> None:
    expected = torch.stack([nnf.cross_entropy(LOGITS[c], LABELS) for c in range(samples)]).mean()
    torch.testing.assert_close(nll(LOGITS[:samples], LABELS), expected)


def test_improbable_labels_cost_a_finite_amount() -> None:
    logits = torch.tensor([[[0.0, 1e4]], [[0.0, 2e4]]])
    assert nll(logits, torch.tensor([0])).item() == pytest.approx(1.5e4)


def test_the_free_energy_by_hand() -> None:
    got = free_energy(torch.tensor(1.7), torch.tensor(6.0), temperature=0.25, num_data=20)
    assert got.item() == pytest.approx(1.7 + 0.25 * 6 / 20)


def test_plain_logits_are_one_sample() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    W = init_params(model, generator(0), "kaiming")
    logits = plain_logits(model, W, x)
    assert logits.shape == (1, 4, 2)
    torch.testing.assert_close(logits[0], x @ W["weight"].T + W["bias"])


class Skip(nn.Module):
    """No sequence: its convolution's output goes two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x)
        logits: Tensor = self.fc((h + torch.relu(h)).mean((2, 3)))
        return logits


@pytest.mark.parametrize(
    ("model", "kind", "passes"),
    [(cnn(3, (1, 8, 8)), "dense", 1), (cnn(3, (1, 8, 8)), "all", 3), (Skip(), "dense", 3), (Skip(), "all", 3)],
    ids=["what comes before is shared", "nothing comes before", "no sequence", "no sequence, all"],
)
def test_before_and_after_are_the_whole_network_under_each_mask(model: nn.Module, kind: LayerKind, passes: int) -> None:
    """The same logits and gradients of W and masks; what a sequence computes before its first mask is computed once."""
    layers = maskable(model, kind)
    W = {name: w.requires_grad_() for name, w in init_params(model, generator(0), "kaiming").items()}
    network = masked_network(model, layers, {name: torch.tensor([math.inf, 0.5]) for name in layers})
    draws = masking.init(network.places, spread=0.3, std=0.1, rng=generator(1)).mean
    draws = torch.stack([draws, draws.flip(0), 1.1 * draws]).requires_grad_()
    x = torch.randint(0, 256, (5, 1, 8, 8), generator=generator(2), dtype=torch.uint8)
    calls: list[int] = []
    handle = model.get_submodule("conv1").register_forward_pre_hook(lambda module, args: calls.append(1))
    logits = network.logits(W, draws, network.before(W, x))
    handle.remove()
    assert len(calls) == passes
    scaled = x.float() / 127.5 - 1
    masks = [masking.masked(W, masking.matrices(drawn, network.places)) for drawn in draws]
    expected = torch.stack([forward(model, G, scaled) for G in masks])
    torch.testing.assert_close(logits, expected)
    slopes = (torch.autograd.grad(out.square().sum(), [*W.values(), draws]) for out in (logits, expected))
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)  # sums in another order


class Idle(Skip):
    """Has a layer that it never asks."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


FROZEN = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
FROZEN[2].requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,)),
        (nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)), (4,)),
        (FROZEN, (4,)),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 9, 3)), (4, 5, 5)),
        (cnn(3, (1, 8, 8)), (1, 8, 8)),
        (Idle(), (1, 5, 5)),
    ],
    ids=["by hand", "by torch", "frozen", "grouped", "convolutions", "idle"],
)
def test_slopes_in_the_draw_and_in_the_weights_are_those_of_autograd(model: nn.Module, shape: tuple[int, ...]) -> None:
    model, layers = model.double(), maskable(model)
    W = {name: w.requires_grad_() for name, w in init_params(model, generator(0), "template").items()}
    network = masked_network(model, layers, {name: torch.tensor([math.inf, 0.5]) for name in layers})
    drawn = masking.init(network.places, spread=0.3, std=0.1, rng=generator(1)).mean.double().requires_grad_()
    h = network.before(W, torch.randn(5, *shape, generator=generator(2), dtype=torch.float64)).detach()
    y, log_prior = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([0.1, -0.4, 0.3], dtype=torch.float64)
    expected = nll(network.logits(W, drawn[None], h) + log_prior, y)
    by_draw, *by_W = torch.autograd.grad(expected, (drawn, *W.values()), allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        value, found = network.by_draw(W, drawn, h, y, log_prior)
        torch.testing.assert_close((value, found), (expected.detach(), by_draw))
        assert network.whole(W) == (len(W) == 4 and len(shape) == 1)
        if network.whole(W):
            value, slopes = network.by_weights(W, drawn, h, y, log_prior)
            torch.testing.assert_close((value, *slopes.values()), (expected.detach(), *by_W))


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


def test_probabilities_carry_no_graph() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    assert not probabilities(lambda x: (x @ weight)[None], torch.ones(2, 3)).requires_grad
