"""A client's model as an ordinary nn.Module without chance: what leaves this package."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import plain
from lrbpfl.algorithms.protocol import Ensemble, Ensembled
from lrbpfl.errors import BadInput
from lrbpfl.personal.model import PersonalModel
from lrbpfl.rng import generator

OUTPUTS = ("probability", "total", "aleatoric", "epistemic")
Outputs = dict[str, Tensor]  # by these names: (n, classes), and (n,) three times, in nats; 32-bit numbers


class Frozen(nn.Module):
    """The networks of a client's model with their noise drawn as `PersonalModel.predict` draws it.

    Inputs come as they come to `predict`: scaling, bytes of images and the temperature are inside.
    """

    def __init__(self, personal: PersonalModel) -> None:
        super().__init__()
        tensors, self._logits = _ensemble(personal)
        self._template = tensors
        self._names: dict[str, str] = {}
        for name, leaf in trees.named_leaves(tensors):
            self._names[name] = _free(name, set(self._names.values()))
            self.register_buffer(self._names[name], leaf.detach().clone())
        self._several = "several" in personal.inputs
        self._temperature = personal.temperature
        for part, leaf in personal.scaling._asdict().items() if personal.scaling else ():
            self.register_buffer(f"scaling_{part}", leaf)

    def forward(self, *args: Any) -> Outputs:
        """The outputs for inputs of the model's signature: several come in their order, named ones as one dict."""
        x = args if self._several else args[0]
        held = {name: getattr(self, attribute) for name, attribute in self._names.items()}
        logits = self._logits(trees.rebuild(self._template, held), self._scaled(x))
        return reduced(torch.softmax(logits, dim=-1), self._temperature)

    def _scaled(self, x: Any) -> Any:
        """Features as the networks learnt them."""
        if not hasattr(self, "scaling_mean"):
            return x
        return (x.float() - self.scaling_mean) / self.scaling_std


def reduced(samples: Tensor, temperature: float) -> Outputs:
    """Sampled probabilities (samples, n, classes) as `metrics.reduce` and `metrics.tempering.temper` treat them.

    In 64 bits, as there: a temperature far from one makes much of small probabilities.
    """
    probs = samples.double()
    probs = probs / probs.sum(dim=-1, keepdim=True)
    mean, aleatoric = probs.mean(dim=0), _entropy(probs).mean(dim=0)
    total = _entropy(mean)
    epistemic = (total - aleatoric).clamp(min=0.0)
    if temperature != 1.0:
        mean = torch.softmax(torch.log(mean) / temperature, dim=-1)
        total = _entropy(mean)
        aleatoric = (total - epistemic).clamp(min=0.0)
        epistemic = (total - aleatoric).clamp(min=0.0)
    found = (mean, total, aleatoric, epistemic)
    return {name: part.float() for name, part in zip(OUTPUTS, found, strict=True)}


def _ensemble(personal: PersonalModel) -> Ensemble:
    """The model's networks, with the noise of its own address."""
    algorithm, task, tree = personal.algorithm, personal.task, personal._tree
    if isinstance(algorithm, Ensembled):
        return algorithm.ensemble(task, tree, generator(*personal._address))
    if isinstance(tree, plain.PersonalNetwork):
        return plain.ensemble(task, tree)
    name = personal.about["algorithm"]["name"]
    raise BadInput(f"a model of {name!r} cannot be exported: it predicts with more than networks whose noise is drawn")


def _entropy(probs: Tensor) -> Tensor:
    """-sum_c p_c log p_c over the last dimension, with 0 log 0 = 0."""
    logs = torch.log(torch.where(probs > 0.0, probs, torch.ones_like(probs)))
    return (-(probs * logs).sum(dim=-1)).clamp(min=0.0)


def _free(name: str, taken: set[str]) -> str:
    """A name for an attribute that is not taken, as near to this one as can be."""
    plainly = re.sub(r"\W", "_", name)
    return plainly if plainly not in taken else f"{plainly}_{len(taken)}"
