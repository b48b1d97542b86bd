"""What the algorithms send and keep on the paper's CNN, against formulas; bytes as the loop counts them."""

import dataclasses

import pytest
import torch

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.core.descent import Data
from lrbpfl.engines.loop import federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Setup
from lrbpfl.models import cnn
from lrbpfl.studies.costs import Costs, Numbers, count, measure, ratios, stage

CONVOLUTIONS = (32 * 3 + 64 * 32 + 128 * 64) * 9 + 32 + 64 + 128
HIDDEN = 2048 * 512 + 512 + 512 * 256 + 256


def parameters(classes: int) -> int:
    return CONVOLUTIONS + HIDDEN + 256 * classes + classes


P = parameters(10)
SENT = {
    "local": 0,
    "pfedgp": CONVOLUTIONS + HIDDEN,  # all but the last layer
    "metavd": P + 512 * 256 + 1,  # a variance for each weight of fc2, and the weight of the KL
    "pfedbayes": 2 * P,
    "lr-bpfl": P + 3 * 18,  # votes: three numbers for each of 18 candidates
}


def brief(name: str) -> Algorithm:
    """The algorithm with a single step wherever it counts steps."""
    kind = ALGORITHMS[name]
    fields = [field.name for field in dataclasses.fields(kind)]
    return kind(**{field: 1 for field in fields if field.endswith(("_steps", "_epochs"))})


def test_the_papers_network_has_the_papers_size() -> None:
    assert (P, parameters(100)) == (1_276_234, 1_299_364)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_messages_and_bytes_are_what_the_formulas_say(name: str) -> None:
    """Counted in a message, and by the loop over a round of two of three clients."""
    data = Data(torch.zeros(4, 3, 32, 32), torch.tensor([0, 1, 0, 1]))
    clients = tuple(ClientData(name=str(k), train=data, test=data) for k in range(3))
    task = Task(cnn(10), 10, public=data.x, num_clients=3)
    (ended,) = federate(Serial(Setup(brief(name), task, clients, seed=0)), rounds=1, cohort=2)
    assert not ended.failures
    expected = SENT.get(name, P)
    assert (ended.bytes_down, ended.bytes_up) == (2 * 4 * expected, 2 * 4 * expected)


def test_what_a_mask_of_rank_8_keeps() -> None:
    """A mask has 2 r (outputs + inputs) numbers a layer, and r gates; a client's own model has its label prior too.

    Beside that a client keeps the seed of its first draw.
    """
    sides = (32 + 3, 64 + 32, 128 + 64, 512 + 2048, 256 + 512, 10 + 256)
    masks, gates = 2 * 8 * sum(sides), 8 * len(sides)
    assert masks == 62_672
    own = masks + gates + 10
    algorithm = LRBPFL(calibration=0.0, max_rank=8, mask_layers="all", mask_steps=1, model_steps=1)
    numbers = count(stage(algorithm))
    assert numbers == Numbers(down=P, up=P, server=P, kept=gates + 1, own=own, model=P + own, examples=2 * 32)


def test_what_distributions_over_all_weights_keep() -> None:
    numbers = count(stage(brief("pfedbayes")))
    assert (numbers.server, numbers.kept) == (2 * P, 2 * P + 1)
    assert 2 * P == 2_552_468


def test_times_are_told_as_ratios_to_fedavg() -> None:
    some = Numbers(down=1, up=2, server=3, kept=4, own=5, model=6, examples=100)
    costs = {
        "fedavg": Costs(some, round_seconds=2.0, personalise_seconds=0.0, aggregate_seconds=0.1),
        "other": Costs(some._replace(examples=300), round_seconds=9.0, personalise_seconds=4.0, aggregate_seconds=1.0),
    }
    rows = dict(ratios(costs))
    assert rows["fedavg"]["round_ratio"] == rows["fedavg"]["example_ratio"] == 1.0
    other = rows["other"]
    assert (other["round_ratio"], other["example_ratio"], other["personalise_ratio"]) == (4.5, 1.5, 2.0)
    assert other["numbers_up"] == 2 and other["examples_a_round"] == 300


def test_measuring_counts_and_times() -> None:
    (cost,) = measure({"fedavg": brief("fedavg")}, repeats=1).values()
    assert cost.numbers == Numbers(down=P, up=P, server=P, kept=0, own=10, model=P + 10, examples=32)
    assert min(cost.round_seconds, cost.aggregate_seconds) > 0
