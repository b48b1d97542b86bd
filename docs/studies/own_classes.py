"""What a run's predictions score when each client's probabilities are limited to the classes that it has.

    python docs/studies/own_classes.py runs/mine

The network stays as it is: what the limit gains is what a client's own model did not know of its client.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from lrbpfl.metrics.predictions import reduce
from lrbpfl.metrics.scores import scores


def main(run: Path) -> None:
    """Print the scores before and after."""
    table = load_file(run / "predictions.safetensors")
    probs, y, client = table["probs"].double(), table["y"], table["client"]
    own = torch.zeros_like(probs)
    for k in client.unique():
        own[client == k] = probs[client == k] * (torch.bincount(y[client == k], minlength=probs.shape[1]) > 0)
    limited = (own + 1e-300) / (own + 1e-300).sum(1, keepdim=True)
    for name, found in (("as they are", probs), ("own classes", limited)):
        told = scores(reduce(found[None], y), seed=0)
        print(f"{name}: " + ", ".join(f"{score} {told[score]:.4f}" for score in ("accuracy", "nll", "ece")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
