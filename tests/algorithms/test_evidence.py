"""Ranks that held-out examples ask for: planted masks, found again."""

import math

import torch
from torch import nn

from lrbpfl.algorithms import ballots
from lrbpfl.algorithms.evidence import log_likelihood
from lrbpfl.algorithms.lr_bpfl import LRBPFL, Client, Message
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core import gates as gating
from lrbpfl.core.descent import Data
from lrbpfl.core.network import Params, forward
from lrbpfl.rng import generator

MODEL = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))
LAYERS = ("0.weight", "2.weight", "4.weight")
TASK = Task(MODEL, num_classes=5, label_prior=0.0)
FAR = ballots.asking((len(ballots.STEPS) - 1, 0))  # masks that move far, with little noise
STILL = LRBPFL(max_rank=8, model_steps=0)


def network() -> Params:
    rng = generator(0, "planted")
    W = {
        name: torch.randn(p.shape, generator=rng) * (1.5 / math.sqrt(p.shape[-1]) if p.dim() > 1 else 0.1)
        for name, p in MODEL.named_parameters()
    }
    return {**W, "4.weight": 3 * W["4.weight"]}


def planted(W: Params, ranks: tuple[int, int, int], n: int, *path: str | int) -> Data:
    """Examples labelled by the network under masks of these ranks, far enough from one to matter."""
    rng = generator(0, "mask", *path)

    def rows(scale: float, size: int, about: float) -> torch.Tensor:
        return about + scale * torch.randn(size, generator=rng)

    G = dict(W)
    for name, rank in zip(LAYERS, ranks, strict=True):
        outputs, inputs = W[name].shape
        M = torch.outer(rows(0.3, outputs, 1.0), rows(0.3, inputs, 1.0))
        for _ in range(rank - 1):
            M = M + 0.6 * torch.outer(rows(1.0, outputs, 0.0), rows(1.0, inputs, 0.0))
        G[name] = W[name] * M
    x = torch.randn(n, 12, generator=rng)
    return Data(x=x, y=forward(MODEL, G, x).argmax(1))


def found(W: Params, data: Data, rounds: int) -> list[int]:
    """The ranks that gates end at, layer by layer, from r_max = 8."""
    client: Client = STILL.init_client(TASK, generator(0, "client"))
    for t in range(rounds):
        _, client, _ = STILL.client_update(TASK, Message(W, FAR), client, data, generator(0, "round", t))
    personal = STILL.personalise(TASK, Message(W, FAR), client, data, generator(0))
    return [gating.rank(personal.gates[name]) for name in LAYERS]


def test_gates_end_at_the_planted_ranks_whatever_the_number_of_rounds() -> None:
    """A useful rank survives next to useless ones, and rounds beyond enough close nothing more."""
    W = network()
    data = planted(W, (1, 3, 1), 4000)
    for rounds in (4, 12):
        assert all(abs(rank - true) <= 1 for rank, true in zip(found(W, data, rounds), (1, 3, 1), strict=True))


def test_clients_end_at_different_ranks_because_their_masks_need_them() -> None:
    W = network()
    simple, rich = (found(W, planted(W, ranks, 4000), 4) for ranks in ((1, 1, 1), (1, 3, 1)))
    assert simple[1] == 1 and rich[1] >= 2


def test_a_client_whose_masks_rest_keeps_one_rank() -> None:
    """Where nothing moves, ranks are worth nothing, and the price closes them."""
    W = network()
    data = planted(W, (1, 1, 1), 400)
    still = LRBPFL(max_rank=4, model_steps=0, mask_lr=0.0, init_spread=0.01)
    client: Client = still.init_client(TASK, generator(0))
    for t in range(3):
        _, client, _ = still.client_update(TASK, Message(W, FAR), client, data, generator(0, t))
    personal = still.personalise(TASK, Message(W, FAR), client, data, generator(0))
    assert {gating.rank(gamma) for gamma in personal.gates.values()} == {1}


def test_the_likelihood_of_a_mixture_by_hand() -> None:
    logits = torch.randn(3, 5, 4, generator=generator(0))
    y = torch.tensor([0, 3, 1, 1, 2])
    expected = logits.softmax(-1).mean(0)[torch.arange(5), y].log()
    torch.testing.assert_close(log_likelihood(logits, y), expected)
    assert math.isfinite(log_likelihood(torch.tensor([[[1e4, -1e4]]]), torch.tensor([1])).item())
