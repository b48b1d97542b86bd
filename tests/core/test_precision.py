"""Where networks compute in bfloat16, and where they must not."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.checks import check_precision
from lrbpfl.core.descent import Data, Rate, descend
from lrbpfl.core.modes import learning
from lrbpfl.core.network import Params, forward, init_params, maskable, through
from lrbpfl.core.objective import masked_network, nll
from lrbpfl.core.precision import computing
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.rng import generator

MODEL = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
X = torch.randn(4, 6, generator=generator(0, "x"))


def params(model: nn.Module = MODEL) -> Params:
    return init_params(model, generator(0, "W"), "kaiming")


def by_hand(W: Params, x: Tensor) -> Tensor:
    """The network with every number that goes into a product rounded, and what comes out of it."""
    W, x = {name: w.bfloat16() for name, w in W.items()}, x.bfloat16()
    h = torch.tanh(nnf.linear(x, W["0.weight"], W["0.bias"]))
    return nnf.linear(h, W["2.weight"], W["2.bias"]).float()


def test_a_network_learns_in_bf16_and_gives_float32() -> None:
    W = params()
    with computing("bf16"), learning():
        logits = forward(MODEL, W, X)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, by_hand(W, X))
    assert not torch.equal(logits, forward(MODEL, W, X))


def test_a_network_that_is_asked_computes_in_float32() -> None:
    exact = forward(MODEL, params(), X)
    with computing("bf16"):
        assert torch.equal(forward(MODEL, params(), X), exact)
    with computing("float32"), learning():
        assert torch.equal(forward(MODEL, params(), X), exact)


def test_steps_move_float32_parameters_by_less_than_bf16_can_tell() -> None:
    """A rate so small that parameters in bfloat16 would stand still."""
    W, y = params(), torch.tensor([0, 1, 2, 0])
    with computing("bf16"):
        (moved,), _ = descend(
            lambda W, batch: nll(forward(MODEL, W, batch.x)[None], batch.y), (W,), [Data(X, y)], (Rate("sgd", 1e-6),)
        )
    assert {w.dtype for w in moved.values()} == {torch.float32}
    assert not torch.equal(moved["0.weight"], W["0.weight"])
    assert torch.equal(moved["0.weight"].bfloat16(), W["0.weight"].bfloat16())


def test_masks_are_made_in_float32_and_rounded_once() -> None:
    """W o M of float32 factors, then the network of the product."""
    W, layers = params(), maskable(MODEL)
    network = masked_network(MODEL, layers, {name: gating.init(2) for name in layers})
    drawn = torch.randn(masking.init(network.places, spread=0.1, std=0.1, rng=generator(0)).mean.shape)
    M = masking.matrices(drawn, network.places)
    with computing("bf16"), learning():
        logits = network.under(W, M, network.before(W, X))
    assert torch.equal(logits, by_hand(W | {name: W[name] * M[name] for name in layers}, X))


def test_what_comes_before_masks_is_handed_on_in_float32() -> None:
    model = cnn(3, (1, 8, 8))
    with computing("bf16"), learning():
        h = through(model[:3])(params(model), torch.randn(2, 1, 8, 8))  # type: ignore[index] # a Sequential
    assert h.dtype == torch.float32
    assert torch.equal(h, h.bfloat16().float()), "it was not computed in bf16"


class Named(nn.Module):
    """Logits in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(x)}


def test_logits_in_a_dict_are_float32_too_and_double_stays_double() -> None:
    with computing("bf16"), learning():
        assert forward(Named(), params(Named()), X).dtype == torch.float32
        exact = {name: w.double() for name, w in params().items()}
        assert torch.equal(forward(MODEL, exact, X.double()), by_hand_in_double(exact))


def by_hand_in_double(W: Params) -> Tensor:
    return nnf.linear(torch.tanh(nnf.linear(X.double(), W["0.weight"], W["0.bias"])), W["2.weight"], W["2.bias"])


class Mixed(Named):
    """Adds to float32 in place, which takes no other dtype."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override] # not a dict this time
        return torch.zeros(len(x), 3).index_add(0, torch.arange(len(x)), self.fc(x))


def test_a_model_that_cannot_learn_in_bf16_is_refused_in_a_sentence() -> None:
    check_precision(Mixed(), X, 3, "float32")
    with pytest.raises(BadInput, match=r"with precision 'bf16', the model, called on 4 inputs \(6,\) float32, fails"):
        check_precision(Mixed(), X, 3, "bf16")
    check_precision(Named(), X, 3, "bf16")
