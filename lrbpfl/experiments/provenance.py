"""What a run was made with: versions, device and data, and whether they are still the same."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrbpfl import trees
from lrbpfl.core.network import init_params
from lrbpfl.data import Dataset
from lrbpfl.engines.work import Setup
from lrbpfl.errors import BadInput
from lrbpfl.personal.identity import fingerprint
from lrbpfl.rng import generator

DECIDING = ("lrbpfl", "torch", "numpy", "device")  # may change a number: told, and allowed if asked for


@cache
def versions() -> dict[str, str]:
    """Packages, Python, machine, and the commit where there is one."""
    found = {
        "lrbpfl": version("lrbpfl"),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }  # with torch's build
    found |= {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    source = Path(__file__).resolve().parents[2]
    if (source / ".git").exists():
        commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        found["commit"] = commit.stdout.strip()
    return found


def digest(dataset: Dataset) -> str:
    """A hash of all examples, whose they are and which of them are for testing."""
    found = hashlib.sha256()
    for field, value in dataset._asdict().items():
        if isinstance(value, Tensor | np.ndarray):
            found.update(f"{field}{tuple(value.shape)}{value.dtype}".encode())
            found.update(trees.raw(value) if isinstance(value, Tensor) else value.tobytes())
        elif field != "name":  # the same data may lie elsewhere
            found.update(f"{field}{value!r}".encode())
    return found.hexdigest()[:16]


def setup_digest(setup: Setup) -> str:
    """A hash of everybody's data, of the model, and of those of its weights that training starts from."""
    found = hashlib.sha256(fingerprint(setup.task.model).encode())
    found.update(json.dumps([setup.classes, setup.features]).encode())
    start = init_params(setup.task.model, generator(0), "template" if setup.task.pretrained else "kaiming")
    for leaf in start.values():
        found.update(trees.raw(leaf))
    if setup.data:  # of clients that are not all at hand
        found.update(setup.data.encode())
    for client in () if setup.data else setup.clients:
        found.update(client.name.encode())
        for name, leaf in trees.named_leaves(client[1:]):
            found.update(f"{name}{tuple(leaf.shape)}{leaf.dtype}".encode())
            found.update(trees.raw(leaf))
    return found.hexdigest()[:16]


def check_provenance(
    path: Path, made_with: Mapping[str, Any], now: Mapping[str, str], *, any_version: bool
) -> str | None:
    """Refuse to go on with other data, or with other versions unless that is asked for; then a sentence that tells it.

    What a run does not say, because it is older than the question, is not asked for.
    """
    if made_with.get("data", now.get("data")) != now.get("data"):
        raise BadInput(f"{path} was begun with other data than are there now: they changed, and its results would mix")
    changed = [
        f"{name} {made_with[name]} (now {now[name]})"
        for name in DECIDING
        if name in made_with and name in now and made_with[name] != now[name]
    ]
    if not changed:
        return None
    told = f"{path} was begun with {', '.join(changed)}"
    if not any_version:
        raise BadInput(f"{told}: numbers may differ; go on with --any-version (in Python: any_version=True)")
    return f"{told}: numbers may differ from those of one version"
