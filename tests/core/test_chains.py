"""Dense layers under many masks without a matrix for each: the same as with one."""

import pytest
import torch
from torch import Tensor, nn

from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.chains import FEW, Chain
from lrbpfl.core.masks import Scales
from lrbpfl.core.network import Params, forward, maskable
from lrbpfl.core.objective import MaskedNetwork, masked_network
from lrbpfl.models import cnn
from lrbpfl.rng import generator

RANK, SAMPLES = 2, 5
PLAIN = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
ODD = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Tanh(), nn.Unflatten(1, (2, 4)), nn.Linear(4, 5), nn.Flatten())


def network(model: nn.Module) -> MaskedNetwork:
    layers = maskable(model, "dense")
    return masked_network(model, layers, {name: gating.init(RANK) for name in layers})


def parts(net: MaskedNetwork, model: nn.Module, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    rng = generator(0, "chain")
    W = {name: torch.randn(p.shape, generator=rng) / p.shape[-1] ** 0.5 for name, p in model.named_parameters()}
    masks = masking.init(net.places, spread=0.3, std=0.3, rng=rng)
    draws = masks.mean + 0.3 * masking.draw(masks, SAMPLES, rng)
    return W, draws.requires_grad_(), net.before(W, torch.randn(7, *shape, generator=rng))


@pytest.mark.parametrize(("model", "shape"), [(PLAIN, (20,)), (ODD, (12,)), (cnn(10), (3, 32, 32))])
@pytest.mark.parametrize("scaled", [False, True])
def test_logits_and_gradients_are_those_of_materialised_masks(
    model: nn.Module, shape: tuple[int, ...], scaled: bool
) -> None:
    net = network(model)
    W, draws, h = parts(net, model, shape)
    W = {name: p.requires_grad_() for name, p in W.items()}
    scales: Scales | None = {name: torch.tensor([1.0, 0.6]) for name in net.places.layers} if scaled else None
    assert net.chain is not None and net.chain.suits(W, h, RANK)
    results = []
    for way in (net, net._replace(chain=None)):
        logits = way.logits(W, draws, h, scales)
        wanted = (draws, *(W[name] for name in net.places.layers))
        results.append((logits, *torch.autograd.grad(logits.square().mean(), wanted)))
    for few, loop in zip(*results, strict=True):
        torch.testing.assert_close(few, loop, rtol=1e-5, atol=1e-5 * loop.abs().max().item())


def test_many_rows_and_layers_that_are_watched_go_the_long_way() -> None:
    chain, x = Chain.of(PLAIN), torch.zeros(FEW, 20)
    W: Params = {name: p.detach() for name, p in PLAIN.named_parameters()}
    assert chain is not None and not chain.suits(W, x, RANK) and chain.suits(W, x, 1)
    handle = PLAIN[0].register_forward_hook(lambda *_: None)
    assert not chain.suits(W, x[:1], RANK)
    handle.remove()


@pytest.mark.parametrize(
    "model",
    [
        PLAIN,
        nn.Sequential(nn.Linear(20, 9, bias=False), nn.Tanh(), nn.Identity(), nn.Linear(9, 9), nn.Linear(9, 4)),
        nn.Sequential(nn.Linear(20, 8), nn.ReLU(inplace=True), nn.Linear(8, 5), nn.Tanh()),
    ],
)
def test_slopes_are_those_of_autograd(model: nn.Module) -> None:
    chain, rng = Chain.of(model), generator(0, "slopes")
    W = {name: torch.randn(p.shape, generator=rng, dtype=torch.float64) for name, p in model.named_parameters()}
    W = {name: p.requires_grad_() for name, p in W.items()}
    x, classes = torch.randn(7, 20, generator=rng, dtype=torch.float64), len(list(W.values())[-1])
    y, log_prior = torch.arange(7) % classes, torch.randn(classes, generator=rng, dtype=torch.float64)
    assert chain is not None and chain.goes_back(W, x)
    with torch.no_grad():
        value, found = chain.slopes(W, x, y, log_prior, W.keys())
        assert chain.slopes(W, x, y, log_prior, {"0.weight"})[1].keys() == {"0.weight"}
    expected = nn.functional.cross_entropy(forward(model, W, x) + log_prior, y)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(tuple(found[name] for name in W), torch.autograd.grad(expected, tuple(W.values())))


def test_layers_whose_slopes_nobody_wrote_down_do_not_go_back() -> None:
    for model in (nn.Sequential(nn.Linear(3, 2), nn.GELU()), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))):
        chain = Chain.of(model)
        assert chain is not None and not chain.goes_back(dict(model.named_parameters()), torch.zeros(1, 3))


def test_what_is_no_chain_of_dense_layers_is_none() -> None:
    shared = nn.Linear(4, 4)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight

    class Own(nn.Sequential):
        """May do anything in forward."""

    others = (nn.Sequential(shared, shared), tied, Own(shared), nn.Sequential(nn.LayerNorm(4), shared), shared)
    assert all(Chain.of(model) is None for model in others)
