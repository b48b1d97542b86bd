"""The paper's CNN: its size, and its order of operations."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.core.network import maskable
from lrbpfl.models import cnn
from lrbpfl.rng import generator

SIZES = {"conv1": 896, "conv2": 18_496, "conv3": 73_856, "fc1": 1_049_088, "fc2": 131_328}


@pytest.mark.parametrize(
    ("classes", "fc3", "total", "biases"), [(10, 2_570, 1_276_234, 1_002), (100, 25_700, 1_299_364, 1_092)]
)
def test_parameter_counts(classes: int, fc3: int, total: int, biases: int) -> None:
    parameters = dict(cnn(classes).named_parameters())
    for layer, size in (SIZES | {"fc3": fc3}).items():
        assert sum(p.numel() for name, p in parameters.items() if name.startswith(f"{layer}.")) == size
    assert trees.count(parameters) == total
    assert sum(p.numel() for name, p in parameters.items() if name.endswith("bias")) == biases


def test_every_layer_takes_a_mask() -> None:
    assert list(maskable(cnn(10))) == [f"{layer}.weight" for layer in [*SIZES, "fc3"]]


def paper_order(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Convolution, ReLU, max-pooling, three times; then three dense layers."""
    for i in (1, 2, 3):
        x = nnf.conv2d(x, parameters[f"conv{i}.weight"], parameters[f"conv{i}.bias"], padding=1)
        x = nnf.max_pool2d(nnf.relu(x), 2)
    x = x.flatten(1)
    for i in (1, 2):
        x = nnf.relu(nnf.linear(x, parameters[f"fc{i}.weight"], parameters[f"fc{i}.bias"]))
    return nnf.linear(x, parameters["fc3.weight"], parameters["fc3.bias"])


def test_pooling_first_changes_neither_outputs_nor_gradients() -> None:
    model = cnn(10).double()
    parameters = dict(model.named_parameters())
    x = torch.randn(3, 3, 32, 32, generator=generator(0, "x"), dtype=torch.float64)
    weights = torch.randn(3, 10, generator=generator(0, "weights"), dtype=torch.float64)
    ours, papers = model(x), paper_order(parameters, x)
    torch.testing.assert_close(ours, papers)
    gradients = [torch.autograd.grad((y * weights).sum(), list(parameters.values())) for y in (ours, papers)]
    for name, a, b in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        assert bool(a.abs().sum() > 0)


def test_other_channels() -> None:
    model = cnn(3, channels=1)
    assert isinstance(model, nn.Sequential)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
