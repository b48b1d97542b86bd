"""A new client with n examples: LR-BPFL's mask against the shared network as it is, and against fine-tuning.

    python docs/studies/onboarding.py speakers --seeds 3 > docs/results/onboarding-speakers.md
    python docs/studies/onboarding.py cifar10 > docs/results/onboarding-cifar10.md

Ten new clients (five speakers) took no part in training. Each has n examples, the first n of a random order of its
training part, and is judged on its test part. `mask` is `lrbpfl onboard`; the others start from the network of FedAvg:
as it is, with its last layer fine-tuned, or all of it (20 steps of 32 examples, plain SGD at a rate of 0.02, as
`fedavg-ft`). All have the label prior of the n examples. Scores are means over all test examples of the new clients.
"""

import argparse
import copy
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from lrbpfl import Data, FedAvg, FedAvgFT, Task, onboard, scores
from lrbpfl.core.network import Params
from lrbpfl.documents import read
from lrbpfl.experiments.build import build
from lrbpfl.experiments.config import Config, parse
from lrbpfl.experiments.runner import Progress, start
from lrbpfl.metrics import Predictions, pool, reduce
from lrbpfl.personal.description import message_of
from lrbpfl.personal.onboarding import find_shared
from lrbpfl.rng import generator

SIZES = (5, 10, 20, 50, 120)
DATA = {
    "speakers": {"dataset": "speakers", "new_clients": 5},
    "cifar10": {
        "dataset": "cifar10", "partition": "labels", "labels_per_client": 5, "clients": 20, "new_clients": 10,
        "new_alpha": [0.5], "train_fraction": 0.1,
    },
}  # fmt: skip
ROUNDS = {"speakers": {"rounds": 30, "cohort": 5}, "cifar10": {"rounds": 40, "cohort": 4}}
FIELDS = {"speakers": {}, "cifar10": {"weights": "kaiming"}}  # of FedAvg, as in the study of clients that differ


def config(data: str, algorithm: str, seed: int) -> Config:
    """A run with new clients."""
    federation = {**ROUNDS[data], "seed": seed, "evaluate_every": 0, "label_prior": 1.0}
    fields = FIELDS[data] if algorithm == "fedavg" else {}
    return parse({"data": DATA[data], "federation": federation, "algorithm": {"name": algorithm, **fields}})


def tuned(task: Task, W: Params, data: Data, part: str, rng: torch.Generator) -> Params:
    """The network of FedAvg as it is, or after fine-tuning its last layer or all of it."""
    if part == "W as it is":
        return W
    moving = [name for name in W if part == "all" or name.startswith("fc3")]
    model = copy.deepcopy(task.model)
    for name, p in model.named_parameters():
        p.requires_grad_(name in moving)
        p.data = W[name].clone()
    task = task._replace(model=model)
    return {**W, **FedAvgFT().personalise(task, {name: W[name] for name in moving}, None, data, rng).W}


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=40)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[int, str], list[Predictions]] = defaultdict(list)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs = {}
            for name in ("lr-bpfl", "fedavg"):
                built = build(config(asked.data, name, seed))
                runs[name] = Path(folder) / name
                start(built.config, runs[name], built.setup, Progress())
            W = message_of(read(find_shared(runs["fedavg"]), "shared"))
            for k in range(len(built.setup.training), len(built.setup.clients)):
                client, order = built.setup.clients[k], generator(seed, "order", k)
                places = torch.randperm(len(client.train.y), generator=order)
                for n in SIZES:
                    if n > len(places):
                        continue
                    own = Data(client.train.x[places[:n]], client.train.y[places[:n]])
                    began = time.perf_counter()
                    model = onboard(runs["lr-bpfl"], own.x, own.y.numpy(), name=client.name, hold_out=0.0, seed=seed)
                    seconds[n, "mask"].append(time.perf_counter() - began)
                    said = model.predictions(client.test.x)
                    found[n, "mask"].append(said._replace(y=client.test.y.numpy()))
                    for part in ("W as it is", "last layer", "all"):
                        task = built.setup.task._replace(label_prior=1.0)
                        began = time.perf_counter()
                        network = tuned(task, W, own, part, generator(seed, "tune", k, n))
                        seconds[n, part].append(time.perf_counter() - began)
                        personal = FedAvg().personalise(task, network, None, own, torch.Generator())
                        probs = FedAvg().predict(task, personal, client.test.x, torch.Generator())
                        found[n, part].append(reduce(probs, client.test.y))
    print("| n | | accuracy % | NLL | ECE, debiased (floor) | seconds |\n|---|---|---|---|---|---|")
    for (n, part), predictions in found.items():
        s = scores(pool(predictions), seed=0)
        ece = f"{s['ece_debiased']:.3f} ({s['ece_floor']:.3f})"
        print(
            f"| {n} | {part} | {100 * s['accuracy']:.1f} | {s['nll']:.3f} | {ece} | {np.median(seconds[n, part]):.2f} |"
        )


if __name__ == "__main__":
    main()
