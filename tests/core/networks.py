"""Small networks that differ in how their parameters are laid out."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A small residual network with group normalisation and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.depthwise(torch.relu(self.norm(x)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return logits


class Tied(nn.Module):
    """One weight under two names, and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.again(self.b(self.a(x)))
        return logits


def kind(value: object) -> str:
    return type(value).__name__ if isinstance(value, nn.Module) else ""
