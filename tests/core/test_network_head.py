"""The last layer of a network: which one it is, and what goes into it."""

import pytest
import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.core.network import embedding, forward, head, init_params, rows_of_classes
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from tests.core.networks import Residual, Tied, Transformer, kind


def test_the_head_is_the_last_linear_layer() -> None:
    assert head(cnn(10)) == ("fc3.weight", "fc3.bias")
    assert head(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 2, bias=False), nn.ReLU())) == ("1.weight",)
    assert head(nn.Linear(3, 2)) == ("weight", "bias")


def test_the_rows_of_classes_are_those_of_a_last_linear_layer_with_as_many() -> None:
    assert rows_of_classes(cnn(10), 10) == ("fc3.weight", "fc3.bias")
    assert rows_of_classes(cnn(10), 9) == ()
    assert rows_of_classes(nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 10, 1)), 10) == ()


class Backwards(nn.Module):
    """Its last layer is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(x))
        return logits


HEADLESS = {
    "a convolution": (nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 2, 1)), "'1' (Conv1d)"),
    "shared": (Tied(), "shares"),
    "computed": (nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))), "computes"),
    "none": (nn.ReLU(), "no Linear"),
}


@pytest.mark.parametrize("case", HEADLESS)
def test_a_model_whose_last_layer_cannot_be_taken_off_is_refused(case: str) -> None:
    model, reason = HEADLESS[case]
    with pytest.raises(BadInput) as caught:
        head(model)
    assert reason in str(caught.value)


def test_a_last_layer_that_does_not_give_the_logits_is_noticed() -> None:
    model = Backwards()
    W = {name: p for name, p in init_params(model, generator(0), "kaiming").items() if name not in head(model)}
    with pytest.raises(BadInput, match="'first'"):
        embedding(model, W, torch.randn(5, 4))


@pytest.mark.parametrize(
    ("model", "shape"), [(cnn(10), (2, 3, 32, 32)), (Residual(), (2, 3, 6, 6)), (Transformer(), (2, 7, 3))], ids=kind
)
def test_the_embedding_is_the_input_of_the_last_layer(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Seen by a hook of torch, bit for bit."""
    W, x = init_params(model, generator(0, "W"), "uniform"), torch.randn(shape, generator=generator(0, "x"))
    weight, bias = head(model)
    body = {name: p for name, p in W.items() if name not in (weight, bias)}
    before = trees.tree_map(torch.clone, dict(model.state_dict()))
    got = embedding(model, body, x)
    assert trees.equal(dict(model.state_dict()), before)
    seen: list[Tensor] = []
    hook = model.get_submodule(weight.removesuffix(".weight")).register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    logits = forward(model, W, x)
    hook.remove()
    assert torch.equal(got, seen[0])
    torch.testing.assert_close(got @ W[weight].T + W[bias], logits)


def test_the_embedding_passes_gradients_on() -> None:
    model, x = Residual(), torch.randn(2, 3, 6, 6, generator=generator(0, "x"))
    W = {
        name: p.requires_grad_()
        for name, p in init_params(model, generator(0), "kaiming").items()
        if "head" not in name
    }
    embedding(model, W, x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in W.values())


def test_the_embedding_of_a_bare_layer_is_its_input() -> None:
    x = torch.randn(4, 3)
    assert torch.equal(embedding(nn.Linear(3, 2), {}, x), x)
