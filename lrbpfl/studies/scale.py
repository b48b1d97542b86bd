"""What a round costs with ever more clients of whom few take part: time, memory and checkpoints, in fresh processes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lrbpfl.algorithms.protocol import Task
from lrbpfl.data import LazyClients
from lrbpfl.engines.loop import federate, sample_clients
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.work import Setup, check_setup
from lrbpfl.experiments.config import OWN, Config, parse
from lrbpfl.experiments.gather import gather
from lrbpfl.experiments.store import Run
from lrbpfl.rng import generator, numpy_generator
from lrbpfl.trees import Tree

SIZES = (100, 1_000, 10_000, 100_000)
NAMES = ("lr-bpfl", "pfedbayes", "fedavg")
COHORT, ROUNDS, JUDGED, WORKERS = 10, 12, 25, 2
FILES = 10_000
WAYS = {"lazily": "no", "at once": "pooled"}  # to read a folder, by the standardising that makes it so
FEATURES, HIDDEN, CLASSES = 20, 64, 3
WAIT = 600.0  # seconds for the first round of a command

Figures = dict[str, Any]
Arrays = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def measure() -> Iterator[Figures]:
    """A row for each algorithm and number of clients, and one for each way to read a folder, as they come."""
    for name in NAMES:
        for clients in SIZES:
            yield {"algorithm": name, "clients": clients, **_apart(name, clients)}
    yield from folder()


def _apart(name: str, clients: int) -> Figures:
    """The figures of one run in a process of its own, whose memory nobody else has used."""
    limits = f"cohort={COHORT}, rounds={ROUNDS}, judged={JUDGED}"
    code = f"from lrbpfl.studies.scale import one; print(one({name!r}, {clients}, {limits}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} with {clients} clients failed: {done.stderr}")
    found: Figures = json.loads(done.stdout)
    return found


def one(name: str, clients: int, *, cohort: int, rounds: int, judged: int) -> str:
    """Set up, train with a checkpoint after every round, and judge some clients; what it took, as JSON.

    What torch imports with the first optimiser is no part of it.
    """
    torch.optim.SGD([torch.zeros(1)], lr=0.0)
    with tempfile.TemporaryDirectory(prefix="lrbpfl-scale-") as folder:
        began = time.perf_counter()
        config = parse({"data": {"dataset": f"{OWN}:scale"}, "federation": {"model": OWN}, "algorithm": {"name": name}})
        run = Run.create(Path(folder), config)
        engine = Processes(_setup(config, clients), WORKERS, states=run.states)
        run.load(config, _server(engine), print)
        found = {"setup_seconds": time.perf_counter() - began}
        try:
            found |= _rounds(engine, run, config, cohort, rounds)
            found |= _judged(engine, cohort, rounds, judged)
            found |= {"bytes": _peak(os.getpid()), "worker_bytes": max(_peak(pid) for pid in _workers(engine))}
        finally:
            engine.close()
    return json.dumps(found)


def example(name: str) -> Arrays:
    """A client's 15 to 30 examples, which its name decides."""
    rng = numpy_generator(0, "scale", name)
    y = rng.integers(CLASSES, size=rng.integers(15, 31))
    return (rng.normal(size=(len(y), FEATURES)) + y[:, None]).astype(np.float32), y


def _setup(config: Config, clients: int) -> Setup:
    """A small network for so many clients, who are made when they are needed."""
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)).eval()
    source = LazyClients(map(str, range(clients)), example, classes=CLASSES)
    gathered = gather(source, None, seed=0, hold_out=0.3, calibration=0.0, standardise="no")
    task = Task(model, CLASSES, label_prior=config.federation.label_prior)
    setup = Setup(config.algorithm, task, gathered.clients, seed=0, data=gathered.digest)
    check_setup(setup)
    return setup


def _server(engine: Processes) -> Tree:
    return engine.setup.algorithm.init_server(engine.setup.task, generator(0, "server"))


def _rounds(engine: Processes, run: Run, config: Config, cohort: int, rounds: int) -> Figures:
    """The best round and checkpoint, and what both compute on average, which a busy machine changes less.

    The first round, in which processes start, does not count.
    """
    times: list[tuple[float, float]] = []
    computed = 0.0
    for ended in islice(federate(engine, rounds=rounds + 1, cohort=cohort), rounds):  # the last would judge everybody
        if ended.failures:
            raise RuntimeError(f"clients of the benchmark failed: {ended.failures}")
        began = time.perf_counter()
        run.save(config, ended.t + 1, ended.server)
        times.append((ended.seconds, time.perf_counter() - began))
        computed = computed or _computed(engine)
    best_round, best_checkpoint = (min(column) for column in zip(*times[1:], strict=True))
    share = (_computed(engine) - computed) / (rounds - 1)
    return {"round_seconds": best_round, "round_cpu_seconds": share, "checkpoint_seconds": best_checkpoint}


def _computed(engine: Processes) -> float:
    """Seconds that this process and its workers have computed so far; of workers only where the system tells."""
    total = time.process_time()
    for pid in _workers(engine):
        stat = Path(f"/proc/{pid}/stat")
        if stat.is_file():
            after_name = stat.read_text().rpartition(")")[2].split()
            total += (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _judged(engine: Processes, cohort: int, rounds: int, number: int) -> Figures:
    """How many clients' own models are made and judged in a second, and what one of them computes.

    Of clients that never took part, if there are any, as most are where there are many.
    """
    algorithm, task, clients = engine.setup.algorithm, engine.setup.task, engine.setup.clients
    everybody = range(len(clients))
    known = {k for t in range(rounds) for k in sample_clients(len(clients), cohort, 0, t)}
    chosen = ([k for k in everybody if k not in known] or everybody)[:number]
    server, number = _server(engine), len(chosen)
    began, computed = time.perf_counter(), _computed(engine)
    for evaluation in engine.evaluate({k: algorithm.broadcast(task, server, k) for k in chosen}, 0):
        if evaluation.failure:
            raise RuntimeError(f"a client of the benchmark was not judged: {evaluation.failure}")
    seconds, computed = time.perf_counter() - began, _computed(engine) - computed
    return {"judged_per_second": number / seconds, "judged_cpu_seconds": computed / number}


def folder() -> Iterator[Figures]:
    """The time until round 1 is done, and the memory, of the command line on a folder: as it is, and read at once."""
    with tempfile.TemporaryDirectory(prefix="lrbpfl-scale-") as root:
        data = Path(root) / "sites"
        data.mkdir()
        for k in range(FILES):
            x, y = example(str(k))
            np.savez(data / f"site-{k}.npz", x=x, y=y)
        for how, standardise in WAYS.items():
            yield {"files": FILES, "read": how, **_command(data, Path(root) / how, standardise)}


def _command(data: Path, out: Path, standardise: str) -> Figures:
    """`lrbpfl run` in a process of its own, ended after the first checkpoint."""
    keys = {"data.dataset": data, "data.standardise": standardise, "federation.rounds": 1_000}
    keys |= {"federation.cohort": COHORT, "federation.evaluate_every": 0, "engine.workers": WORKERS}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    call = [sys.executable, "-m", "lrbpfl", "run", "-a", NAMES[0], *settings, "--out", str(out), "--quiet"]
    began = time.perf_counter()
    with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not (out / "checkpoint" / "000001" / "server.safetensors").exists():
            if process.poll() is not None or time.perf_counter() - began > WAIT:
                process.kill()
                raise RuntimeError(f"the command did not finish a round: {process.communicate()[1]}")
            time.sleep(0.01)
        found = {"first_round_seconds": time.perf_counter() - began, "bytes": _peak(process.pid)}
        process.terminate()
    return found


def _workers(engine: Processes) -> list[int]:
    return [worker.process.pid for worker in engine._workers if worker.process.pid is not None]


def _peak(pid: int) -> int:
    """The most resident memory that a process ever had, in bytes; 0 where the system does not tell."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
