"""A new client fits what is its own, on its own machine; what it cannot use is refused in a sentence."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lrbpfl
from lrbpfl import documents
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.personal.onboarding import find_shared
from tests.personal.conftest import QUICK, network, site


def join(trained: lrbpfl.Federation, n: int, **how: Any) -> lrbpfl.PersonalModel:
    x, y = site("new", 90)
    return lrbpfl.onboard(trained.path, x[:n], y[:n], model=network(), **how)


def test_a_newcomer_only_fits_a_mask(trained: lrbpfl.Federation, tmp_path: Path) -> None:
    model = join(trained, 90, name="west")
    file = model.save(tmp_path / "west.safetensors")
    assert model.about["leaves"]["W/0.weight"] == "W/0.weight"  # the network is the federation's
    assert not [name for name in documents.read(file, "personal").tensors if name.startswith("own/W")]
    x, y = site("later", 90)
    assert (model.predict(x).label == y.numpy()).mean() > 0.6
    assert (model.client, model.about["examples"], model.about["judged"]["examples"]) == ("west", 72, 18)
    assert len(model.predict(x).set) == 90
    assert torch.equal(lrbpfl.load(file, model=network())._tree.W["0.weight"], model._tree.W["0.weight"])


def test_the_same_call_gives_the_same_bits(trained: lrbpfl.Federation, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (join(trained, 30, name=name).save(tmp_path / name / "m") for name in ("a", "a", "b"))
    assert torch.equal(torch.get_rng_state(), state)
    bits = first.read_bytes()
    assert again.read_bytes() == bits != other.read_bytes()


def test_dropout_follows_the_seed() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    clients = {"a": site("a"), "b": site("b")}
    federation = lrbpfl.Federation(model, clients, "fedavg-ft", workers=1, quiet=True).fit(1)
    x, y = site("c", 20)
    first = federation.onboard(x, y).predict(x).probability
    torch.rand(5)
    assert np.array_equal(federation.onboard(x, y).predict(x).probability, first)


@pytest.mark.parametrize("n", [1, 2, 5, 9, 10])
def test_few_examples_do(trained: lrbpfl.Federation, n: int) -> None:
    model = join(trained, n)
    assert model.predict(site("x")[0]).probability.shape == (40, 3)
    assert bool(model.about["scores"]) == (n == 10)  # below ten nothing is held out
    with pytest.raises(BadInput, match=r"client 'new': a coverage of 0\.9 needs 9 calibration examples"):
        _ = model.predict(site("x")[0]).set


def test_one_class_does(trained: lrbpfl.Federation) -> None:
    x, y = site("new")
    model = lrbpfl.onboard(trained.path, x[y == 7], y[y == 7], model=network())
    assert model.predict(x).probability.shape == (40, 3) and np.isfinite(model.predict(x).total).all()


def test_what_cannot_be_used_is_told(trained: lrbpfl.Federation, tmp_path: Path) -> None:
    x, y = site("new")
    for wrong_x, wrong_y, how, sentence in (
        (x, y + 1, {}, r"row 0 has the label \d+, which the federation does not know; its classes: 3, 7, 11"),
        (x, y.numpy().astype(str), {}, r"row 0 has the label '\d+', which the federation does not know"),
        (x[:, :3], y, {}, r"shape \(40, 3\), and the model takes \(n, 4\)"),
        (x, y[:5], {}, "40 inputs and 5 labels"),
        (x[:0], y[:0], {}, "0 inputs and 0 labels"),
        (x, y.float() + 0.5, {}, "labels must be whole numbers or text"),
        (x[:1], y[:1], {"hold_out": 0.5}, "one example can hold nothing out"),
        (x, y, {"hold_out": 1.0}, "hold_out is 1.0"),
        (x, y, {"model": network(hidden=5)}, "belongs to another model"),
    ):
        with pytest.raises(BadInput, match=sentence):
            lrbpfl.onboard(trained.path, wrong_x, wrong_y, **{"model": network(), **how})
    with pytest.raises(BadInput, match="it is no finished run"):
        lrbpfl.onboard(tmp_path, x, y)
    own = trained.path / "clients" / "00000" / "personal.safetensors"
    with pytest.raises(BadInput, match="'personal' document, and a 'shared' one is needed"):
        lrbpfl.onboard(own, x, y, model=network())


def test_a_shared_file_that_lies_is_refused(trained: lrbpfl.Federation, tmp_path: Path) -> None:
    x, y = site("new")
    real = documents.read(find_shared(trained.path), "shared")
    name = "message/W/0.weight"
    spoiled = [{**real.tensors, name: torch.full_like(real.tensors[name], torch.nan)}]
    spoiled += [{**real.tensors, name: torch.zeros(2, 2)}, {"message/W/0.weight": real.tensors[name]}, {}]
    spoiled += [{**real.tensors, "message/more": torch.zeros(1)}]
    lies = [real._replace(tensors=tensors) for tensors in spoiled]
    lies += [real._replace(about={**real.about, "standardise": how}) for how in ("pooled", "odd", 3)]
    for lie in lies:
        documents.write(tmp_path / "W-forged.safetensors", lie)
        with pytest.raises(BadInput, match="W-forged"):
            lrbpfl.onboard(tmp_path, x, y, model=network())


ALONE = """
import os, sys
allowed = tuple(sys.argv[3:])

def watch(event, args):
    if event.startswith("socket."):
        raise RuntimeError(event)
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if not isinstance(args[0], int) and not str(args[0]).startswith((*allowed, os.devnull)):
            raise RuntimeError(f"{args[0]} is opened for writing")
    if event in ("os.rename", "os.remove", "os.mkdir") and not str(args[0]).startswith(allowed):
        raise RuntimeError(f"{event} of {args[0]}")

import lrbpfl, torch
from tests.personal.conftest import network, site
torch.optim.SGD(network().parameters())  # torch makes a folder of its own for this
sys.addaudithook(watch)
made = lrbpfl.onboard(sys.argv[1], *site("new"), model=network())
made.save(sys.argv[2])
made.predict(site("x")[0])
"""


def test_nothing_is_sent_and_nothing_else_is_written(trained: lrbpfl.Federation, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call: list[str | Path] = [sys.executable, "-B", "-c", ALONE, trained.path, out / "new.safetensors", out]
    ran = subprocess.run(call, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(list(out.iterdir())) == 2


def test_a_phone_full_of_pictures_joins_within_seconds() -> None:
    """120 pictures, the paper's network, LR-BPFL as it is; it should be ten seconds at most on one core."""
    rng = np.random.default_rng(0)
    clients = {name: (rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8), np.arange(20) % 10) for name in "ab"}
    quick = QUICK.__class__(model_steps=1, calibration=0.0)
    with lrbpfl.Federation(cnn(10), clients, quick, workers=1, quiet=True) as federation:
        federation.fit(1, cohort=1)
        began = time.perf_counter()
        federation.onboard(rng.integers(0, 256, (120, 3, 32, 32), dtype=np.uint8), np.arange(120) % 10)
        seconds = time.perf_counter() - began
    print(f"120 pictures: {seconds:.1f} s")
    assert seconds < 30
