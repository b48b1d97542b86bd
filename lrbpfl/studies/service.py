"""What it costs to serve many clients of the paper's CNN: mixed rows in one batch or client by client, and memory."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrbpfl import trees
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.documents import Document
from lrbpfl.engines.work import ClientData, Setup, evaluate_client, fresh_state, granted, keep_memory, one_thread
from lrbpfl.models import cnn
from lrbpfl.personal.model import PersonalModel
from lrbpfl.personal.pack import Parts, Told, personal_document, shared_document
from lrbpfl.rng import generator
from lrbpfl.serving.answers import Question, answers
from lrbpfl.serving.shelf import Found, side_by_side

CLIENTS, ROWS = 100, 32  # whose models there are, and the rows of one request, each of another client
MANY = 1_000  # clients whose memory is counted
SECONDS = 8.0  # for either way
SHAPE, CLASSES = (3, 32, 32), 10


def measure() -> dict[str, float]:
    """The figures of `lrbpfl bench --serve`: requests a second and p99 of either way, and bytes."""
    keep_memory()
    with one_thread():
        models = side_by_side(personal_files(CLIENTS))
        requests = [_request(i, list(models)) for i in range(8)]
        mixed = _timed(lambda i: answers(models, requests[i % len(requests)]), SECONDS)
        apart = _timed(lambda i: [_alone(models, row) for row in requests[i % len(requests)]], SECONDS)
        one = _timed(lambda i: answers(models, requests[i % len(requests)][:1]), SECONDS / 4)
    figures = {
        "mixed_requests_per_second": len(mixed) / sum(mixed),
        "mixed_p99_seconds": float(np.quantile(mixed, 0.99)),
        "apart_requests_per_second": len(apart) / sum(apart),
        "apart_p99_seconds": float(np.quantile(apart, 0.99)),
        "mixed_over_apart": (len(mixed) / sum(mixed)) / (len(apart) / sum(apart)),
        "one_row_requests_per_second": len(one) / sum(one),
        "one_row_p99_seconds": float(np.quantile(one, 0.99)),
    }
    return {**figures, **memory()}


def memory(clients: int = MANY) -> dict[str, float]:
    """What so many clients take in a process of their own, beside W and their masks alone; nothing without /proc."""
    if not Path("/proc/self/statm").is_file():
        return {}
    code = f"from lrbpfl.studies.service import resident; print(resident({clients}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def resident(clients: int = MANY) -> str:
    """Resident bytes that W and many clients add to a process that has imported and computed everything once."""
    with one_thread():
        warm = side_by_side(personal_files(2))  # kept, so that none of its memory is used again
        before = _resident()
        models = side_by_side(personal_files(clients))
        after = _resident()
        del warm
    some = next(iter(models.values()))
    shared = trees.nbytes(some._tree.W)
    own = sum(trees.nbytes(model._tree) - shared for model in models.values())
    figures = {"resident_bytes": after - before, "w_bytes": shared, "masks_bytes": own}
    return json.dumps({**figures, "resident_over_w_and_masks": (after - before) / (shared + own)})


def personal_files(clients: int) -> Iterator[Found]:
    """Files of clients whose masks are as they begin, each a little different: what they say takes no training."""
    rng = generator(0, "serve")
    data = Data(torch.randn(8, *SHAPE, generator=rng), torch.arange(8))
    client = ClientData(name="0", train=data, test=data)
    setup = granted(Setup(LRBPFL(mask_steps=0, calibration=0.0), Task(cnn(CLASSES), CLASSES), (client,), seed=0))
    server = setup.algorithm.init_server(setup.task, generator(0, "server"))
    message = setup.algorithm.broadcast(setup.task, server, 0)
    result = evaluate_client(setup, message, fresh_state(setup, 0), 0, 0)
    shared, sent = shared_document(setup, "lr-bpfl", server), dict(trees.named_leaves(message))
    told = Told(client="0", examples=len(data.y), address=(0, "predict", 0, 0))
    some = personal_document(shared, Parts(result.personal, result.shared), sent, told)
    for k in range(clients):
        about = {**some.about, "client": str(k), "address": [0, "predict", 0, k]}
        yield Found(
            f"client {k}", Document(about, {name: _moved(leaf, k) for name, leaf in some.tensors.items()}), shared
        )


def _moved(leaf: torch.Tensor, k: int) -> torch.Tensor:
    return leaf + 0.01 * torch.randn(leaf.shape, generator=generator(k, "moved"))


def _request(i: int, names: list[str]) -> list[Question]:
    rng = generator(i, "request")
    chosen = torch.randperm(len(names), generator=rng)[:ROWS].tolist()
    return [Question(names[k], torch.randn(SHAPE, generator=rng).tolist()) for k in chosen]


def _alone(models: dict[str, PersonalModel], row: Question) -> Any:
    """A client's row as its own model answers it."""
    return models[row.client].predict([row.input])


def _timed(action: Callable[[int], object], seconds: float) -> list[float]:
    """How long each of many goes takes, after a first that does not count."""
    action(0)
    found: list[float] = []
    while sum(found) < seconds and len(found) < 1_000:
        began = time.perf_counter()
        action(len(found))
        found.append(time.perf_counter() - began)
    return found


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
