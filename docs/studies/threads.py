"""A round of FedAvg in the serial engine with one thread and with two, in float32 and in bf16: seconds, best of three.

    python docs/studies/threads.py

Ten clients with 128 examples each do 20 steps of 32 images on the paper's CNN, as in peers.py; all take turns.
"""

import time

import torch

from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.precision import Precision
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Setup
from lrbpfl.models import cnn
from lrbpfl.rng import generator

CLIENTS, EXAMPLES, TURNS = 10, 128, 3
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")


def main() -> None:
    """Measure and print."""
    rng = generator(0, "threads")
    data = Data(torch.randn(EXAMPLES, 3, 32, 32, generator=rng), torch.randint(10, (EXAMPLES,), generator=rng))
    clients = tuple(ClientData(str(k), data, data) for k in range(CLIENTS))
    task = Task(cnn(10), 10)
    server = FedAvg().init_server(task, rng)
    best: dict[str, float] = {}
    for _ in range(TURNS):
        for precision in PRECISIONS:
            for threads in (1, 2):
                engine = Serial(Setup(FedAvg(), task, clients, 0, precision=precision, threads=threads))
                began = time.perf_counter()
                failed = [reply.failure for reply in engine.update(dict.fromkeys(range(CLIENTS), server), 0)]
                seconds = time.perf_counter() - began
                assert failed == [None] * CLIENTS
                name = f"{precision}, {threads} threads"
                best[name] = min(best.get(name, seconds), seconds)
    for name, seconds in best.items():
        print(f"{name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
