"""The paper's CNN: its size and its order of operations; and what every model promises."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.core.checks import check_model
from lrbpfl.core.network import maskable
from lrbpfl.errors import BadInput
from lrbpfl.models import MODELS, cnn
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
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    x = torch.randn(3, 3, 32, 32, generator=generator(0, "x"), dtype=torch.float64)
    weights = torch.randn(3, 10, generator=generator(0, "weights"), dtype=torch.float64)
    ours, papers = model(x), paper_order(parameters, x)
    torch.testing.assert_close(ours, papers)
    gradients = [torch.autograd.grad((y * weights).sum(), list(parameters.values())) for y in (ours, papers)]
    for name, a, b in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(a, b)
        assert bool((a != 0).any()), name


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (1, 28, 28), (4, 17, 9)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_masks_and_images_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    model = MODELS[name](7, shape)
    check_model(model)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)


def test_vectors_go_to_the_mlp() -> None:
    for model in (MODELS["mlp"](3, (5,)), MODELS["auto"](3, (5,))):
        check_model(model)
        assert list(maskable(model)) == ["fc1.weight", "fc2.weight", "fc3.weight"]
        assert model(torch.zeros(2, 5)).shape == (2, 3)


def test_auto_is_the_paper_for_images_and_an_mlp_for_small_ones() -> None:
    assert trees.count(dict(MODELS["auto"](10, (3, 32, 32)).named_parameters())) == 1_276_234
    assert list(maskable(MODELS["auto"](10, (1, 15, 32)))) == ["fc1.weight", "fc2.weight", "fc3.weight"]


@pytest.mark.parametrize("shape", [(5,), (3, 7, 32), (3, 32, 7), (32, 32)], ids=str)
@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_what_is_no_image_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=re.escape(f"'{name}'")) as caught:
        MODELS[name](10, shape)
    assert str(shape) in str(caught.value)
