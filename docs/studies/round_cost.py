"""What a round costs a client of LR-BPFL that is asked for its vote, and one that is not, beside FedAvg; and joining.

    python docs/studies/round_cost.py

One thread, best of several taken in turns: the paper's CNN with 300 images, a 20-64-3 network with 15 examples, and a
new client with 120 images after the most mask steps there are.
"""

import time
from collections import defaultdict

import torch
from torch import nn

from lrbpfl import LRBPFL, ClientData, Data, FedAvg, Federation, Setup, Task
from lrbpfl.algorithms import ballots
from lrbpfl.engines.work import evaluate_client, fresh_state, granted, update_client
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from lrbpfl.trees import Tree

FAR = (len(ballots.STEPS) - 1, 0)  # the candidate with the most steps


def data(n: int, *shape: int, classes: int) -> Data:
    """Random examples."""
    return Data(torch.randn(n, *shape, generator=generator(0, n)), torch.arange(n) % classes)


def measure(model: nn.Module, own: Data, classes: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one client's round, by what it is asked; and of its own model."""
    clients = tuple(ClientData(str(k), own, own) for k in range(20))
    setups = {a: granted(Setup(a, Task(model, classes), clients, seed=0)) for a in (FedAvg(), LRBPFL())}
    servers = {a: a.init_server(s.task, generator(0)) for a, s in setups.items()}
    W = servers[LRBPFL()].W
    message = type(LRBPFL().broadcast(setups[LRBPFL()].task, servers[LRBPFL()], 0))
    asked: dict[str, tuple[FedAvg | LRBPFL, Tree]] = {
        "fedavg": (FedAvg(), servers[FedAvg()]),
        "vote": (LRBPFL(), message(W, ballots.asking(ballots.CAUTIOUS))),
        "no vote": (LRBPFL(), message(W, ballots.asking(ballots.CAUTIOUS, judging=False))),
        "far vote": (LRBPFL(), message(W, ballots.asking(FAR))),
    }
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, (algorithm, sent) in asked.items():
            setup = setups[algorithm]
            began = time.perf_counter()
            update_client(setup, sent, fresh_state(setup, 0), 0, 0)
            taken[name].append(time.perf_counter() - began)
        sent = asked["no vote"][1]
        taken["own model"].append(
            evaluate_client(setups[LRBPFL()], sent, fresh_state(setups[LRBPFL()], 0), 0, 0).seconds
        )
    return {name: 1000 * min(seconds) for name, seconds in taken.items()}


def joining(algorithm: LRBPFL) -> float:
    """Seconds in which somebody with 120 images joins."""
    images = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator(0))
    pair = images, torch.arange(40) % 10
    with Federation(cnn(10), {"a": pair, "b": pair}, algorithm, workers=1, quiet=True) as federation:
        federation.fit(1)
        began = time.perf_counter()
        federation.onboard(images.repeat(3, 1, 1, 1), torch.arange(120) % 10, hold_out=0.0)
        return time.perf_counter() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    tiny = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    for what, found in (
        ("CNN", measure(cnn(10), data(300, 3, 32, 32, classes=10), 10, repeats=3)),
        ("20-64-3", measure(tiny, data(15, 20, classes=3), 3, repeats=12)),
    ):
        told = ", ".join(f"{name} {ms:.1f} ms ({ms / found['fedavg']:.2f})" for name, ms in found.items())
        print(f"{what}: {told}")
    print(f"joining: {joining(LRBPFL(mask_steps=150, calibration=0.0)):.1f} s with masks on dense layers, ", end="")
    print(f"{joining(LRBPFL(mask_steps=150, calibration=0.0, max_rank=8, mask_layers='all')):.1f} s at rank 8 on all")
