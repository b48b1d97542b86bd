"""Models of many kinds, with inputs for each: what people bring along."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.core.inputs import Inputs
from lrbpfl.models import cnn, mlp, resnet
from lrbpfl.rng import generator

CLASSES = 3


class Vision(nn.Module):
    """A small vision transformer: patches, positions, one layer of attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 4, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


class Basic(nn.Module):
    """Two convolutions beside a way past them, as ResNet-18 has them, with GroupNorm in the place of BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)
        past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(2, outputs))
        self.past = nn.Identity() if stride == 1 and inputs == outputs else past

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(h + self.past(x))


def resnet18() -> nn.Module:
    """Eighteen layers of weights, an eighth as wide as the original."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU()]
    for inputs, outputs in ((8, 8), (8, 16), (16, 32), (32, 64)):
        layers += [Basic(inputs, outputs, 1 if inputs == outputs else 2), Basic(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = 2 if dropout else 1
        self.lstm = nn.LSTM(4, 6, num_layers=layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids).mean(1))
        return logits


class Several(nn.Module):
    """Tokens, their mask and a picture; what it returns is wrapped in a dict, an object or nothing."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.wrap = wrap
        self.embed, self.conv, self.head = nn.Embedding(11, 6), nn.Conv2d(1, 6, 3), nn.Linear(12, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor, picture: Tensor) -> Any:
        words = (self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.wrap(self.head(torch.cat([words, self.conv(picture).mean((2, 3))], dim=1)))


class Functional(nn.Module):
    """Dropout as a function in its forward, which knows whether it trains (or not)."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always, self.fc1, self.fc2 = always, nn.Linear(5, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = nnf.dropout(self.fc1(x), 0.4, training=self.always or self.training)
        logits: Tensor = self.fc2(h)
        return logits


def frozen_body() -> nn.Module:
    model = mlp(CLASSES, (5,))
    model.get_submodule("fc1").requires_grad_(False)
    return model


def floats(*shape: int) -> Callable[[int, torch.Generator], Inputs]:
    return lambda n, rng: torch.randn(n, *shape, generator=rng)


def images(*shape: int) -> Callable[[int, torch.Generator], Inputs]:
    return lambda n, rng: torch.randint(256, (n, *shape), generator=rng, dtype=torch.uint8)


def several(n: int, rng: torch.Generator) -> dict[str, Tensor]:
    return {
        "ids": torch.randint(11, (n, 5), generator=rng),
        "mask": torch.ones(n, 5, dtype=torch.int64),
        "picture": torch.randint(256, (n, 1, 5, 5), generator=rng, dtype=torch.uint8),
    }


class Kind(NamedTuple):
    """How to make a model, and inputs for it."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]


ZOO: dict[str, Kind] = {
    "mlp": Kind(lambda: mlp(CLASSES, (5,)), floats(5)),
    "cnn": Kind(lambda: cnn(CLASSES, (1, 8, 8)), images(1, 8, 8)),
    "resnet": Kind(lambda: resnet(CLASSES, (3, 8, 8)), images(3, 8, 8)),
    "resnet18": Kind(resnet18, images(3, 8, 8)),
    "vision": Kind(Vision, images(1, 8, 8)),
    "conv1d": Kind(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)), floats(2, 6)
    ),
    "lstm": Kind(Recurrent, floats(4, 4)),
    "tokens": Kind(Words, lambda n, rng: torch.randint(11, (n, 5), generator=rng)),
    "frozen": Kind(frozen_body, floats(5)),
    "tuple": Kind(Several, lambda n, rng: tuple(several(n, rng).values())),
    "dict": Kind(lambda: Several(lambda logits: {"logits": logits}), several),
    "object": Kind(lambda: Several(lambda logits: SimpleNamespace(logits=logits)), several),
    "dropout": Kind(Functional, floats(5)),
    "attention dropout": Kind(lambda: Vision(dropout=0.3), images(1, 8, 8)),
    "recurrent dropout": Kind(lambda: Recurrent(dropout=0.3), floats(4, 4)),
    "early dropout": Kind(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Dropout(0.4), nn.Flatten(), nn.Linear(16, CLASSES)), floats(2, 6)
    ),
}


def made(name: str, n: int = 6) -> tuple[nn.Module, Inputs]:
    """The model and inputs of this name, always the same."""
    torch.manual_seed(0)
    return ZOO[name].model(), ZOO[name].inputs(n, generator(0, name))
