"""How long a round of FedAvg takes here and in two other packages, Flower's simulation and fluke, as a Markdown table.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 "flwr[simulation]==1.41.0"
    peers/bin/pip install --no-deps fluke-fl==0.8.1
    peers/bin/pip install diskcache cerberus seaborn omegaconf torchmetrics pandas scikit-learn
    python docs/studies/peers.py peers/bin/python

(fluke also asks for torchvision, loggers and more, which FedAvg on tensors of one's own does not import.)

Ten clients with 128 examples each do 20 steps of SGD with batches of 32 on the paper's CNN; two workers, one thread
each. Everybody trains the same network on the same data and takes the mean of ten uploads; nobody evaluates. fluke has
no workers on a CPU: it runs once with one thread and once with both cores as two threads (of a machine that others use
too, two threads that wait for each other are the slower way). Clients of the others run the plain loop of their
tutorials, or their own. Each participant is a process of its own that does a round to warm up and then some that count;
all take turns, and the best round of each is told.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

CLIENTS, EXAMPLES, CLASSES = 10, 128, 10
STEPS, BATCH, LR = 20, 32, 0.01
EPOCHS = STEPS * BATCH // EXAMPLES
WORKERS = 2
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def network() -> nn.Module:
    """The paper's CNN, with pooling before the ReLU, which saves everybody work."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    widths = [3, 32, 64, 128]
    for i in range(3):
        layers[f"conv{i + 1}"] = nn.Conv2d(widths[i], widths[i + 1], 3, padding=1)
        layers[f"pool{i + 1}"], layers[f"relu{i + 1}"] = nn.MaxPool2d(2), nn.ReLU()
    layers["flatten"] = nn.Flatten()
    layers["fc1"], layers["relu4"] = nn.Linear(128 * 4 * 4, 512), nn.ReLU()
    layers["fc2"], layers["relu5"] = nn.Linear(512, 256), nn.ReLU()
    layers["fc3"] = nn.Linear(256, CLASSES)
    return nn.Sequential(layers)


@cache
def examples() -> list[tuple[Tensor, Tensor]]:
    """Everybody's data."""
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.randn(EXAMPLES, 3, 32, 32, generator=rng), torch.randint(CLASSES, (EXAMPLES,), generator=rng))
        for _ in range(CLIENTS)
    ]


def lrbpfl_rounds(rounds: int, precision: Literal["float32", "bf16"]) -> list[float]:
    """Seconds of each round after the first, in two worker processes."""
    from lrbpfl import ClientData, Data, FedAvg, Setup, Task
    from lrbpfl.engines.loop import federate
    from lrbpfl.engines.processes import Processes

    clients = tuple(ClientData(str(k), Data(*own), Data(*own)) for k, own in enumerate(examples()))
    algorithm = FedAvg(local_steps=STEPS, batch_size=BATCH, lr=LR)
    setup = Setup(algorithm, Task(network(), CLASSES), clients, seed=0, precision=precision)
    with closing(Processes(setup, WORKERS)) as engine:
        found = federate(engine, rounds=rounds + 2, cohort=CLIENTS)  # the last one is left out: it evaluates
        ends = [time.perf_counter() for _ in _sound(islice(found, rounds + 1))]
    return [after - before for before, after in pairwise(ends)]


def _sound(rounds: Iterable[Any]) -> Iterator[Any]:
    """A client that fails is quick, and must not be taken for a fast one."""
    for found in rounds:
        if found.failures:
            raise RuntimeError(f"clients failed: {found.failures}")
        yield found


def flower_rounds(rounds: int) -> list[float]:
    """The same with Flower's simulation: two Ray actors with one core each."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    began, ended = [], []

    class Timed(FedAvg):
        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            began.append(time.perf_counter())
            return super().configure_train(*args, **kwargs)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            if len(replies) != CLIENTS or any(reply.has_error() for reply in replies):
                raise RuntimeError("clients failed")
            found = super().aggregate_train(server_round, replies)
            ended.append(time.perf_counter())
            return found

    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = Timed(fraction_evaluate=0.0, min_evaluate_nodes=0, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds + 1)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": WORKERS}}
    run_simulation(server, flower_client(), num_supernodes=CLIENTS, backend_config=resources)
    return [after - before for before, after in zip(began, ended, strict=True)][1:]


def flower_client() -> Any:
    """A Flower client with a plain PyTorch loop."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    client = ClientApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        import peers

        torch.set_num_threads(1)
        model = peers.network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = peers.examples()[int(context.node_config["partition-id"])]
        loss = peers.steps(model, x, y)
        metrics = MetricRecord({"loss": loss, "num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return client


def steps(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """A client's 20 steps; the mean loss."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    total = 0.0
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(y)).split(BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimiser.step()
            total += loss.item()
    return total / STEPS


def fluke_rounds(rounds: int, threads: int) -> list[float]:
    """The same with fluke, one client after the other in this process, with so many threads."""
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server
    from fluke.utils import FederationObserver

    began, ended = [], []

    class Clock(FederationObserver):
        def start_round(self, number: int, global_model: Any) -> None:
            began.append(time.perf_counter())

        def end_round(self, number: int) -> None:
            ended.append(time.perf_counter())

    torch.set_num_threads(threads)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    rate = OptimizerConfigurator({"name": "SGD", "lr": LR})
    loaders = [FastDataLoader(x, y, num_labels=CLASSES, batch_size=BATCH, shuffle=True) for x, y in examples()]
    clients = [Client(k, own, None, rate, nn.CrossEntropyLoss(), local_epochs=EPOCHS) for k, own in enumerate(loaders)]
    server = Server(network(), None, clients, weighted=True)
    federation = FedAVG(CLIENTS, None, None, clients=clients, server=server)
    federation.attach(Clock())
    federation.run(rounds + 1, 1)
    return [after - before for before, after in zip(began, ended, strict=True)][1:]


PARTICIPANTS: dict[str, Callable[[int], list[float]]] = {
    "lrbpfl, bf16": lambda rounds: lrbpfl_rounds(rounds, "bf16"),
    "lrbpfl, float32": lambda rounds: lrbpfl_rounds(rounds, "float32"),
    "Flower": flower_rounds,
    "fluke, one thread": lambda rounds: fluke_rounds(rounds, 1),
    "fluke, two threads": lambda rounds: fluke_rounds(rounds, WORKERS),
}


def seconds(name: str, python: str, rounds: int) -> list[float]:
    """The rounds of one participant, in a process of its own."""
    here = Path(__file__).parent
    paths = [str(here), *([str(here.parents[1])] if name.startswith("lrbpfl") else [])]
    threads = str(WORKERS if name == "fluke, two threads" else 1)
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}
    code = f"import json, peers; print('\\n' + json.dumps(peers.PARTICIPANTS[{name!r}]({rounds})))"
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} fails:\n{done.stderr[-3000:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(best: dict[str, float]) -> str:
    """Markdown: how many times as fast as the fastest of the others each is."""
    reference = min(taken for name, taken in best.items() if not name.startswith("lrbpfl"))
    lines = ["| | a round, seconds | times as fast as the fastest peer |", "|---|--:|--:|"]
    lines += [f"| {name} | {taken:.2f} | {reference / taken:.2f} |" for name, taken in best.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A round of FedAvg in three packages.")
    parser.add_argument("peers", help="the Python in which Flower and fluke are installed")
    parser.add_argument("--turns", type=int, default=3, help="how often each participant is started")
    parser.add_argument("--rounds", type=int, default=3, help="that count, each time")
    given = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in PARTICIPANTS}
    for _ in range(given.turns):
        for name, found in taken.items():
            python = sys.executable if name.startswith("lrbpfl") else given.peers
            found += seconds(name, python, given.rounds)
            print(f"{name}: {', '.join(f'{one:.2f}' for one in found[-given.rounds :])} s", file=sys.stderr)
    print(table({name: min(found) for name, found in taken.items()}))
