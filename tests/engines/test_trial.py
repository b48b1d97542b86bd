"""A model is tried on every kind of inputs before round 0: the sentence names whose they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.engines.loop import federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Setup, check_setup
from lrbpfl.errors import BadInput
from tests.core.zoo import Functional


class Counted(nn.Module):
    """Knows how often it was called; takes rows of any length."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.calls, self.fc = 0, nn.Linear(1, outputs)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.fc(x.mean(1, keepdim=True))
        return logits


def setup_of(model: nn.Module, *inputs: Any, **parts: Any) -> Setup:
    """One client for each of the inputs, of which two are for training and two for testing."""
    y = torch.tensor([0, 2])
    clients = tuple(ClientData(f"c{k}", train=Data(x, y), test=Data(x, y)) for k, x in enumerate(inputs))
    odd: dict[str, Any] = {part: Data(x, y) for part, x in parts.items() if part != "public"}
    clients = (*clients[:-1], clients[-1]._replace(**odd))
    return Setup(FedAvg(), Task(model=model, num_classes=3, public=parts.get("public")), clients, seed=0)


FIVE, SEVEN = torch.randn(2, 5), torch.randn(2, 7)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (setup_of(nn.Linear(5, 3), FIVE, SEVEN), r"client 'c1', train data: .*\(7,\) float32.*RuntimeError"),
        (setup_of(nn.Linear(5, 3), FIVE, test=SEVEN), r"client 'c0', test data: .*\(7,\) float32"),
        (setup_of(nn.Linear(5, 3), FIVE, calibration=SEVEN), r"client 'c0', calibration data"),
        (setup_of(nn.Linear(5, 3), FIVE, public=SEVEN), r"the public inputs: .*\(7,\) float32"),
        (
            setup_of(nn.Linear(5, 3), FIVE, FIVE.double()),
            r"client 'c1', train data: .*float64.*convert them to float32",
        ),
        (setup_of(nn.Linear(5, 10), FIVE), "gives 10 outputs for 3 classes"),
        (setup_of(Functional(always=True), FIVE), "client 'c0'.*from call to call"),
        (setup_of(nn.Linear(5, 3), [FIVE]), "client 'c0'.*are a list"),
        (setup_of(nn.Linear(5, 3), (FIVE, FIVE[:1])), "client 'c0'.*different numbers of rows: 2, 1"),
        (setup_of(nn.Linear(5, 3), (FIVE, SEVEN / 0)), "client 'c0'.*not finite"),
        (setup_of(nn.Linear(5, 3).requires_grad_(False), FIVE), "nothing to train"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(setup: Setup, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        next(federate(Serial(setup), rounds=1, cohort=1))
    assert "\n" not in str(caught.value)


def test_inputs_of_one_kind_are_tried_once() -> None:
    model = Counted()
    check_setup(setup_of(model, FIVE))
    once = model.calls
    check_setup(setup_of(model, *[FIVE] * 50))
    assert model.calls == 2 * once
    check_setup(setup_of(model, FIVE, SEVEN, FIVE))
    assert model.calls == 3 * once + 1
