"""Plain networks, no Bayes inside."""

from collections import OrderedDict

from torch import nn


def cnn(num_classes: int, channels: int = 3) -> nn.Module:
    """The paper's CNN for 32 x 32 images: three 3x3 convolutions and three dense layers.

    The paper's ReLU and 2x2 max-pooling commute; pooling first leaves the ReLU a quarter of the work.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    widths = [channels, 32, 64, 128]
    for i in range(3):
        layers[f"conv{i + 1}"] = nn.Conv2d(widths[i], widths[i + 1], 3, padding=1)
        layers[f"pool{i + 1}"] = nn.MaxPool2d(2)
        layers[f"relu{i + 1}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["relu4"] = nn.Linear(2048, 512), nn.ReLU()
    layers["fc2"], layers["relu5"] = nn.Linear(512, 256), nn.ReLU()
    layers["fc3"] = nn.Linear(256, num_classes)
    return nn.Sequential(layers)
