"""A run between sites, over a transport within this process."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lrbpfl import trees
from lrbpfl.algorithms import names
from lrbpfl.core.descent import Data
from lrbpfl.engines.work import ClientData
from lrbpfl.experiments.build import checked_setup
from lrbpfl.metrics import summarise
from lrbpfl.rng import generator
from lrbpfl.sites.hub import lead
from lrbpfl.sites.job import parse
from tests.sites.alone import alone, network
from tests.sites.post import Post, leaves

Making = Callable[..., dict[str, Any]]


def with_public(job: Making, name: str, folder: Path) -> dict[str, Any]:
    """The job, with a file of inputs at the hub for the algorithm that needs one."""
    x = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)
    np.savez(folder / "public.npz", x=x)
    return job(name, {"public": str(folder / "public.npz")} if name == "fedbe" else None)


def server_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(max((path / "checkpoint").iterdir()) / "server.safetensors")


@pytest.mark.parametrize("name", names())
def test_a_run_has_the_bits_of_one_machine_and_sends_what_the_docs_name(
    name: str, job: Making, sites: dict[str, Path], tmp_path: Path
) -> None:
    asked = with_public(job, name, tmp_path)
    post = Post(sites, asked)
    outcome = lead(post, tmp_path, asked, lambda: False)
    post.end()
    assert outcome["error"] is None and outcome["complete"] and not outcome["lost"]
    assert trees.equal(server_of(tmp_path / "runs" / asked["run"]), network(alone(asked, sites)))
    only_what_the_docs_name(asked, post)


STAMP = {"/run", "/leg", "/t"}
CALIBRATION = ("nll", "brier", "ece", "mce", "ece_floor", "ece_debiased")
SCORES = ("accuracy", *CALIBRATION, "total", "aleatoric", "epistemic", "examples")


def only_what_the_docs_name(asked: dict[str, Any], post: Post) -> None:
    """What left the sites, letter by letter."""
    shapes = {key: leaf.shape for key, leaf in server_like(asked).items()}
    for what, _, way, letter in post.letters:
        if way == "there":
            continue
        found = dict(leaves(letter))
        if what == "update":
            uploads = {path: leaf for path, leaf in found.items() if path.startswith("/clients/#/upload/")}
            assert {path.removeprefix("/clients/#/upload/") for path in uploads} == shapes.keys()
            assert all(leaf.shape == shapes[path.removeprefix("/clients/#/upload/")] for path, leaf in uploads.items())
            rest = found.keys() - uploads.keys() - STAMP - {"/clients/#/examples", "/clients/#/seconds"}
            assert all(path.startswith("/clients/#/info/") and type(found[path]) is float for path in rest)
        elif what == "evaluate":
            scores = {f"/clients/#/scores/{score}" for score in SCORES}
            bins = {f"/clients/#/bins/{part}" for part in ("counts", "confidence", "correct")}
            assert found.keys() == STAMP | scores | bins | {"/clients/#/examples", "/clients/#/parameters"}
            assert all(len(found[path]) == 15 for path in bins)
            assert not any(isinstance(value, torch.Tensor) for value in found.values())
        elif what == "open":
            assert found.keys() <= {"/run", "/leg", "/clients"}
        else:
            assert found.keys() == {"/run", "/leg"}


def server_like(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A message of this job."""
    found = parse(job)
    form = found.examples(2)
    data = Data(form.x, form.y)
    stand_in = ClientData("", data, data)
    setup = checked_setup(found.config, form, (stand_in,), form.x if found.about.public else form.x[:0], 1, "")
    server = setup.algorithm.init_server(setup.task, generator(0, "server"))
    return dict(trees.named_leaves(setup.algorithm.broadcast(setup.task, server, 0)))


def test_scores_at_the_hub_are_those_of_all_examples_in_one_place(
    job: Making, sites: dict[str, Path], tmp_path: Path
) -> None:
    asked = job()
    post = Post(sites, asked)
    outcome = lead(post, tmp_path, asked, lambda: False)
    post.end()
    evaluations = alone(asked, sites).evaluations
    whole = summarise({k: e.result.predictions for k, e in evaluations.items() if e.result}, seed=0)
    told = outcome["summary"]["lr-bpfl"]
    for score in ("accuracy", "nll", "ece_pooled", "mce_pooled", "ece_mean", "examples", "epistemic"):
        assert told[score] == pytest.approx(whole[score], abs=1e-9), score
    for score in ("ece_pooled_floor", "ece_pooled_low", "ece_pooled_high", "ece_pooled_debiased"):
        assert told[score] == pytest.approx(whole[score], abs=0.02), score  # within bins, examples are at their mean


def test_a_lost_answer_leaves_no_trace(job: Making, sites: dict[str, Path], tmp_path: Path) -> None:
    """A site trains and its answer is lost: its clients go on from what was counted, as if it had never been asked."""
    asked = job(about={"minimum": 2})
    states = {}
    for how in ("there", "back"):
        root = tmp_path / how
        own = {name: copy_site(path, root / name) for name, path in sites.items()}
        post = Post(own, asked, partial(lost_once, how))
        outcome = lead(post, root, asked, lambda: False)
        post.end()
        assert outcome["complete"]
        states[how] = (server_of(root / "runs" / asked["run"]), post.letters)
    assert trees.equal(states["there"][0], states["back"][0])


def lost_once(how: str, what: str, site: str, letter: dict[str, Any]) -> str | None:
    """Site 2 is lost in the first round."""
    return how if (what, site, letter.get("t")) == ("update", "site-2", 0) else None


def copy_site(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_hub_that_is_cut_goes_on_to_the_same_bits(job: Making, sites: dict[str, Path], tmp_path: Path) -> None:
    """Between an upload and its count, which is the worst moment: sites have newer states than the hub counted."""
    asked = job()

    class Cut(Exception):
        pass

    def cut(what: str, site: str, letter: dict[str, Any]) -> str | None:
        if what == "update" and letter["t"] == 2 and site == "site-3":
            raise Cut
        return None

    own = {name: copy_site(path, tmp_path / "cut" / name) for name, path in sites.items()}
    post = Post(own, asked, cut)
    with pytest.raises(Cut):
        lead(post, tmp_path / "cut", asked, lambda: False)
    post.end()
    again = Post(own, asked)
    outcome = lead(again, tmp_path / "cut", asked, lambda: False)
    again.end()
    assert outcome["complete"] and outcome["leg"] == 2
    server = network(alone(asked, sites))
    assert trees.equal(server_of(tmp_path / "cut" / "runs" / asked["run"]), server)


def test_names_that_two_sites_have_are_refused(job: Making, sites: dict[str, Path], tmp_path: Path) -> None:
    (sites["site-2"] / "own.csv").write_bytes((sites["site-1"] / "own.csv").read_bytes())
    asked = job()
    post = Post(sites, asked)
    outcome = lead(post, tmp_path, asked, lambda: False)
    post.end()
    assert not outcome["complete"] and "both have a client" in outcome["error"]


def test_too_few_sites_end_a_leg_with_a_sentence(job: Making, sites: dict[str, Path], tmp_path: Path) -> None:
    asked = job()
    post = Post(
        sites, asked, lambda what, site, _: "there" if site == "site-1" and what in ("update", "ping") else None
    )
    outcome = lead(post, tmp_path, asked, lambda: False)
    post.end()
    assert not outcome["complete"] and outcome["rounds"] == 1
    assert "fewer than 3 sites are left" in " ".join(outcome["told"]) and "site-1" in outcome["lost"]
    assert outcome["error"] is None  # the next leg may find more


def test_a_site_may_keep_its_scores(job: Making, sites: dict[str, Path], tmp_path: Path) -> None:
    with (sites["site-2"] / "site.toml").open("a") as file:
        file.write("scores = false\ninfo = false\n")
    asked = job()
    post = Post(sites, asked)
    outcome = lead(post, tmp_path, asked, lambda: False)
    post.end()
    assert outcome["summary"]["lr-bpfl"]["clients"] == 4
    own = [dict(leaves(letter)) for _, site, way, letter in post.letters if site == "site-2" and way == "back"]
    assert not any("/scores/" in path or "/bins/" in path or "/info/" in path for found in own for path in found)
    local = json.loads((sites["site-2"] / "store" / asked["run"] / "summary.json").read_text())
    assert local["lr-bpfl"]["clients"] == 2
