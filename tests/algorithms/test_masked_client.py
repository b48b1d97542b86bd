"""Steps whose gradients are written down against those that torch records, with the same draws."""

import pytest
import torch
from torch import nn

from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.masked_client import MaskedClient
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.gaussian import Gaussian, widened
from lrbpfl.core.network import init_params
from lrbpfl.models import cnn
from lrbpfl.rng import generator

DENSE = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
DOUBLE = nn.Sequential(nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 3)).double()  # its masks are not


def at_work(model: nn.Module, shape: tuple[int, ...], method: LRBPFL) -> MaskedClient:
    x = torch.randn(15, *shape, generator=generator(0, "x"))
    data = Data(x.to(next(model.parameters())), torch.arange(15) % 3)
    task = Task(model, 3, label_prior=1.0)
    return MaskedClient.of(method, task, method.init_client(task, generator(0)).gates, data)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("model", "shape"), [(DENSE, (20,)), (DOUBLE, (20,)), (cnn(3, (1, 8, 8)), (1, 8, 8))])
def test_slopes_are_those_of_the_free_energy_under_the_same_draw(
    model: nn.Module, shape: tuple[int, ...], temperature: float
) -> None:
    own = at_work(model, shape, LRBPFL(temperature=temperature))
    W = init_params(model, generator(1), "kaiming")
    masks = Gaussian(*(part.requires_grad_() for part in own.fresh_masks(torch.tensor(5))))
    h, y = own.network.before(W, own.data.x), own.data.y
    expected = own.free_energy(W, masks, own.gates, h, y, generator(2))
    found = own.mask_slope(W, masks, h, y, generator(2)).gradients
    torch.testing.assert_close(tuple(found), torch.autograd.grad(expected, masks), rtol=1e-4, atol=1e-6)


def test_slopes_of_the_network_are_those_of_its_likelihood_under_the_same_draw() -> None:
    own = at_work(DENSE, (20,), LRBPFL())
    W = {name: w.requires_grad_() for name, w in init_params(DENSE, generator(1), "kaiming").items()}
    masks = widened(own.fresh_masks(torch.tensor(5)), 2.0)
    expected = own.nll(W, masks, None, *own.data, generator(2))
    value, found = own.weight_slope(W, masks, *own.data, generator(2))
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(tuple(found), torch.autograd.grad(expected, tuple(W.values())))
