"""What is refused before anything trains, and the sentence that says why."""

import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lrbpfl import trees
from lrbpfl.core.checks import check_call, check_gradients, check_model, check_noise
from lrbpfl.core.inputs import Inputs
from lrbpfl.errors import BadInput
from lrbpfl.models import mlp
from tests.core.zoo import CLASSES, ZOO, Functional, Recurrent, Several, made, several


@pytest.mark.parametrize("name", ZOO)
def test_what_people_bring_is_accepted(name: str) -> None:
    model, x = made(name, n=2)
    check_model(model)
    check_call(model, x, CLASSES)
    check_noise(model, x)
    check_gradients(model, x)
    assert all(p.grad is None for p in model.parameters())


def refused(model: nn.Module, x: Inputs, classes: int = CLASSES) -> str:
    with pytest.raises(BadInput) as caught:
        check_call(model, x, classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_call_that_fails_is_told_with_the_inputs_and_the_error() -> None:
    told = refused(mlp(CLASSES, (5,)), torch.zeros(2, 7))
    assert "2 inputs (7,) float32" in told and "RuntimeError" in told and "2x7" in told
    missing = {name: part for name, part in several(2, torch.Generator()).items() if name != "mask"}
    assert "mask" in refused(Several(), missing) and "TypeError" in refused(Several(), missing)


def test_double_precision_is_told_apart() -> None:
    assert "float32" in refused(mlp(CLASSES, (5,)), torch.zeros(2, 5, dtype=torch.float64))
    check_call(mlp(CLASSES, (5,)).double(), torch.zeros(2, 5, dtype=torch.float64), CLASSES)


def test_outputs_that_are_no_logits_are_told() -> None:
    assert "gives 3 outputs for 7 classes" in refused(mlp(CLASSES, (5,)), torch.zeros(2, 5), 7)
    assert "(2, 4, 6) float32" in refused(nn.Linear(5, 6), torch.zeros(2, 4, 5))
    assert "returns a tuple" in refused(nn.LSTM(4, CLASSES), torch.zeros(2, 4))
    x = several(2, torch.Generator())
    assert "(2,) int64" in refused(Several(lambda logits: logits.argmax(1)), x)
    assert "returns a dict" in refused(Several(lambda logits: {"scores": logits}), x)


def test_a_model_of_which_nothing_trains_is_refused() -> None:
    with pytest.raises(BadInput, match="nothing to train"):
        check_model(mlp(CLASSES, (5,)).requires_grad_(False))


class Rolling(nn.Module):
    """Noise from elsewhere: Python's own generator, in training or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.fc = always, nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x)
        return logits * (1 + random.random() if self.always or self.training else 1)


class Counting(nn.Module):
    """A mean of all it has seen, as batch statistics are, without saying so."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, CLASSES)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        logits: Tensor = self.fc(x - self.mean)
        return logits


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Functional(always=True), "training=self.training"),
        (Rolling(always=True), "from call to call"),
        (Rolling(always=False), "does not follow torch's seed"),
        (Counting(), "buffer 'mean'"),
        (nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, CLASSES))), "buffer '0.weight_u'"),
    ],
)
def test_hidden_noise_and_hidden_memory_are_found(model: nn.Module, words: str) -> None:
    x = torch.randn(2, 5)
    before, state = trees.tree_map(torch.clone, dict(model.named_buffers())), torch.get_rng_state()
    with pytest.raises(BadInput, match=words):
        check_noise(model, x)
    assert trees.equal(dict(model.named_buffers()), before) and torch.equal(torch.get_rng_state(), state)


def test_rare_noise_is_found_too() -> None:
    """Two calls would agree more often than not."""
    model = Functional(always=True)
    model.fc1 = nn.Linear(5, 1)
    model.fc2 = nn.Linear(1, CLASSES)
    with pytest.raises(BadInput, match="from call to call"):
        check_noise(model, torch.randn(1, 5))


class Again(nn.Module):
    """Spares memory: a part is computed once more on the way back, with the weights it finds there."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(checkpoint(self.fc1, x, use_reentrant=False))
        return logits


class Shut(Again):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(self.fc1(x)).detach()
        return logits


@pytest.mark.parametrize(
    ("model", "words"),
    [(Again(), "gradient checkpointing"), (Again().requires_grad_(False), "Linear"), (Shut(), "detach")],
)
def test_a_way_back_that_would_go_wrong_is_found(model: nn.Module, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        check_gradients(model, torch.randn(2, 5))


def test_dropout_of_layers_is_none_of_it() -> None:
    check_model(Recurrent(dropout=0.3))


def test_images_with_channels_last_are_explained() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(BadInput, match=r"\(n, channels, height, width\)"):
        check_call(model, torch.zeros(2, 8, 8, 3), 2)
