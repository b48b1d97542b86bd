"""A run between sites, over a transport within this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrbpfl import trees
from lrbpfl.algorithms import names
from lrbpfl.engines.loop import federate
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData
from lrbpfl.sites.holdings import hold, settings_of, setup_of
from lrbpfl.sites.hub import _public, lead
from lrbpfl.sites.job import parse
from lrbpfl.states import Memory
from tests.sites.post import Post

Making = Callable[..., dict[str, Any]]


def with_public(job: Making, name: str, folder: Path) -> dict[str, Any]:
    """The job, with a file of inputs at the hub for the algorithm that needs one."""
    x = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)
    np.savez(folder / "public.npz", x=x)
    return job(name, {"public": str(folder / "public.npz")} if name == "fedbe" else None)


def server_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(max((path / "checkpoint").iterdir()) / "server.safetensors")


def serial(job: dict[str, Any], sites: dict[str, Path]) -> tuple[dict[str, torch.Tensor], Memory]:
    """The same federation on one machine, which has everybody's data."""
    found = parse(job)
    clients: list[ClientData] = []
    for name, root in sites.items():
        holding = hold(name, found, *settings_of(root))
        ids = {client: len(clients) + i for i, client in enumerate(holding.rows)}
        setup = setup_of(found, holding, ids, 6)
        clients += [setup.clients[k] for k in ids.values()]
    if found.about.public:
        setup = setup._replace(task=setup.task._replace(public=_public(found)))
    asked = found.config.federation
    engine = Serial(setup._replace(clients=tuple(clients)), Memory())
    for round in federate(engine, rounds=asked.rounds, cohort=4, evaluate_every=2):
        server = round.server
    assert isinstance(engine.states, Memory)
    return dict(trees.named_leaves(server)), engine.states


@pytest.mark.parametrize("name", names())
def test_the_same_bits_as_on_one_machine(name: str, job: Making, sites: dict[str, Path], tmp_path: Path) -> None:
    asked = with_public(job, name, tmp_path)
    post = Post(sites, asked)
    outcome = lead(post, tmp_path, asked, lambda: False)
    post.end()
    assert outcome["error"] is None and outcome["complete"] and not outcome["lost"]
    server, _ = serial(asked, sites)
    assert trees.equal(server_of(tmp_path / "runs" / asked["run"]), server)
