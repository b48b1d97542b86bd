"""Is everything there, and does it work? Versions, cores, data, and a federation of a few seconds."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from lrbpfl import trees
from lrbpfl.core.precision import native_bf16
from lrbpfl.data import DATASETS, load
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.experiments import config as configuration
from lrbpfl.experiments.build import build_setup, cores
from lrbpfl.experiments.provenance import versions
from lrbpfl.metrics import summarise


class Finding(NamedTuple):
    """One line of the examination."""

    fine: bool
    what: str
    detail: str


def examine(data_root: Path) -> Iterator[Finding]:
    """Look at everything a run needs, one finding after the other."""
    for name, number in versions().items():
        yield Finding(True, name, number)
    yield Finding(True, "cores", f"{cores()} for workers, one thread each; device {_devices()}")
    speed = "native to this CPU" if native_bf16() else "not native here: as federation.precision it may be slower"
    yield Finding(True, "bf16", speed)
    for name in DATASETS:
        yield _data(name, data_root)
    yield _self_test()


def _devices() -> str:
    return f"cpu, cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"


def _data(name: str, root: Path) -> Finding:
    """Whether a dataset is at hand; one that is not is no fault, it would be downloaded."""
    folders = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
    if name in folders and not (root / folders[name]).exists():
        return Finding(True, name, f"not in {root}; a run would download it")
    try:
        dataset = load(name)
    except BadInput as error:
        return Finding(False, name, str(error))
    return Finding(True, name, f"{len(dataset.y)} examples, {dataset.num_classes} classes")


def _self_test() -> Finding:
    """A small federation, once in this process and once in two workers: it must learn, and agree to the bit."""
    began = time.perf_counter()
    config = configuration.parse({"data": {"dataset": "digits", "clients": 5, "train_fraction": 0.3}})
    setup = build_setup(config)
    rounds = []
    for engine in (Serial(setup), Processes(setup, 2)):
        try:
            *_, last = federate(engine, rounds=6, cohort=3)
        finally:
            engine.close()
        rounds.append(last)
    results = {k: e.result.predictions for k, e in rounds[0].evaluations.items() if e.result}
    accuracy = summarise(results, seed=0)["accuracy"]
    same = trees.equal(rounds[0].server, rounds[1].server)
    detail = f"accuracy {100 * accuracy:.1f} % on digits, {time.perf_counter() - began:.1f} s, "
    detail += "one process and two workers agree bit for bit" if same else "one process and two workers DISAGREE"
    return Finding(same and accuracy > 0.75, "self-test", detail)
