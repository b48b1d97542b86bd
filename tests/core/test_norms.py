"""Networks without batch statistics: the same outputs where they are folded in, GroupNorm elsewhere."""

import copy

import pytest
import torch
from torch import Tensor, nn

import lrbpfl
from lrbpfl import trees
from lrbpfl.core.checks import check_model
from lrbpfl.core.norms import ScaleShift
from lrbpfl.errors import BadInput


class Block(nn.Module):
    """One BatchNorm in two places, one frozen, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.again = self.twice
        self.deep = nn.Sequential(nn.Conv2d(12, 12, 1), nn.BatchNorm2d(12).requires_grad_(False))
        self.bare, self.head = nn.BatchNorm1d(12, affine=False), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(torch.relu(self.twice(self.conv(x))))
        logits: Tensor = self.head(self.bare(self.deep(h).mean((2, 3))))
        return logits


def seen() -> Block:
    """One that has seen batches, and whose scales and shifts are no longer 1 and 0."""
    model = Block()
    for name, p in model.named_parameters():
        if p.dim() == 1 and "head" not in name:
            nn.init.uniform_(p, 0.5, 2.0)
    for _ in range(20):
        model(2 + 3 * torch.randn(8, 3, 5, 5))
    return model


def test_folded_statistics_give_the_outputs_of_evaluation_mode() -> None:
    model, x = seen().eval(), torch.randn(6, 3, 5, 5)
    before = trees.tree_map(torch.clone, dict(model.state_dict()))
    folded = lrbpfl.without_batchnorm(model, fold=True)
    check_model(folded)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(folded.train()(x), model(x), rtol=1e-6, atol=1e-6)
    assert trees.equal(dict(model.state_dict()), before) and isinstance(model.twice, nn.BatchNorm2d)
    scales = {name: m for name, m in folded.named_modules(remove_duplicate=False) if isinstance(m, ScaleShift)}
    assert scales["twice"] is scales["again"] and scales["twice"].weight.requires_grad
    assert not scales["deep.1"].weight.requires_grad and not scales["bare"].bias.requires_grad


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (48, 16), (12, 4), (6, 2), (7, 1)])
def test_groups_divide_the_channels_and_scales_are_kept(channels: int, groups: int) -> None:
    norm = nn.BatchNorm2d(channels, eps=1e-3)
    nn.init.uniform_(norm.weight)
    norm.bias.requires_grad_(False)
    made = lrbpfl.without_batchnorm(nn.Sequential(nn.Conv2d(3, channels, 1), norm))[1]  # type: ignore[index]
    assert isinstance(made, nn.GroupNorm) and (made.num_groups, made.eps) == (groups, 1e-3)
    assert torch.equal(made.weight, norm.weight) and made.weight is not norm.weight
    assert made.weight.requires_grad and not made.bias.requires_grad


def test_a_network_with_groups_no_longer_cares_who_is_in_a_batch() -> None:
    model, x = lrbpfl.without_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))), torch.randn(5, 3, 2, 2)
    check_model(model)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize(
    ("norm", "fold", "words"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), True, "no running statistics"),
        (nn.SyncBatchNorm(4), False, "SyncBatchNorm.*only BatchNorm1d"),
        (nn.LazyBatchNorm2d(), True, "call the model once"),
    ],
)
def test_what_cannot_be_replaced_is_named(norm: nn.Module, fold: bool, words: str) -> None:
    with pytest.raises(BadInput, match=f"'1'.*{words}"):
        lrbpfl.without_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), norm), fold=fold)


def test_the_model_may_be_a_lone_layer_and_the_copy_is_one() -> None:
    norm = nn.BatchNorm1d(4)
    assert isinstance(lrbpfl.without_batchnorm(norm), nn.GroupNorm)
    plain = nn.Linear(2, 2)
    assert lrbpfl.without_batchnorm(plain) is not plain and trees.equal(
        dict(copy.deepcopy(plain).state_dict()), dict(lrbpfl.without_batchnorm(plain).state_dict())
    )
