"""Plain networks, no Bayes inside. None uses batch statistics or dropout, so each takes masks as it is."""

from collections import OrderedDict
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from lrbpfl import plugins
from lrbpfl.errors import BadInput, plain

Shape = tuple[int, ...]  # of one input
LARGEST = 2**27  # parameters of a network that is made because data, or a file, ask for it


def cnn(num_classes: int, shape: Shape = (3, 32, 32)) -> nn.Module:
    """The paper's CNN: three 3x3 convolutions and three dense layers.

    The paper's ReLU and 2x2 max-pooling commute; pooling first leaves the ReLU a quarter of the work.
    """
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise BadInput(f"model 'cnn' takes images of at least 8 x 8, channels first, not inputs of shape {shape}")
    channels, height, width = shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    widths = [channels, 32, 64, 128]
    for i in range(3):
        layers[f"conv{i + 1}"] = nn.Conv2d(widths[i], widths[i + 1], 3, padding=1)
        layers[f"pool{i + 1}"] = nn.MaxPool2d(2)
        layers[f"relu{i + 1}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["relu4"] = nn.Linear(128 * (height // 8) * (width // 8), 512), nn.ReLU()
    layers["fc2"], layers["relu5"] = nn.Linear(512, 256), nn.ReLU()
    layers["fc3"] = nn.Linear(256, num_classes)
    return nn.Sequential(layers)


def mlp(num_classes: int, shape: Shape) -> nn.Module:
    """Two hidden layers, for inputs of any shape."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(prod(shape), 128),
            relu1=nn.ReLU(),
            fc2=nn.Linear(128, 64),
            relu2=nn.ReLU(),
            fc3=nn.Linear(64, num_classes),
        )
    )


class Residual(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), after a convolution that halves the image and sets the width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.body = nn.Sequential(
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) -> (batch, outputs, h / 2, w / 2)."""
        x = self.down(x)
        out: Tensor = x + self.body(x)
        return out


def resnet(num_classes: int, shape: Shape) -> nn.Module:
    """A small residual net with GroupNorm, for images of at least 8 x 8."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise BadInput(f"model 'resnet' takes images of at least 8 x 8, channels first, not inputs of shape {shape}")
    return nn.Sequential(
        Residual(shape[0], 32),
        Residual(32, 64),
        Residual(64, 128),
        nn.GroupNorm(8, 128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def auto(num_classes: int, shape: Shape) -> nn.Module:
    """The paper's CNN for images of at least 16 x 16, the MLP for everything else."""
    return (cnn if len(shape) == 3 and min(shape[1:]) >= 16 else mlp)(num_classes, shape)


Making = Callable[[int, Shape], nn.Module]  # from the number of classes and the shape of an input
MODELS: dict[str, Making] = {"auto": auto, "cnn": cnn, "mlp": mlp, "resnet": resnet}
GROUP = "lrbpfl.models"  # of entry points, by which installed packages add networks


def names() -> list[str]:
    """Our own networks, then those of installed packages."""
    return plugins.names(GROUP, MODELS)


def parameters(name: str, num_classes: int, shape: Shape) -> int:
    """How many parameters our network of this name would have; it is not made."""
    with torch.device("meta"):  # takes no memory
        return sum(p.numel() for p in MODELS[name](num_classes, shape).parameters())


def make(name: str, num_classes: int, shape: Shape) -> nn.Module:
    """The network of this name for these classes and inputs, if it is not larger than anybody would want."""
    making = plugins.find("model", GROUP, name, MODELS)
    if name not in MODELS:
        return _made_elsewhere(making, plugins.who("model", GROUP, name), num_classes, shape)
    size = parameters(name, num_classes, shape)
    if size > LARGEST:
        raise BadInput(
            f"model {name!r} would have {size:,} parameters for inputs of shape {shape} and {num_classes} classes, and "
            f"at most {LARGEST:,} are allowed: give smaller inputs, or a network of your own in Python"
        )
    return MODELS[name](num_classes, shape)


def _made_elsewhere(making: Making, subject: str, num_classes: int, shape: Shape) -> nn.Module:
    try:
        model = making(num_classes, shape)
    except Exception as error:  # whatever somebody's code raises
        reason = f"{type(error).__name__}: {plain(error, 200)}"
        raise BadInput(f"{subject} cannot be made for {num_classes} classes and inputs {shape}: {reason}") from error
    if not isinstance(model, nn.Module):
        raise BadInput(f"{subject} gives a {type(model).__name__}, not a torch.nn.Module")
    return model
