"""A client's own model: the same bits from its file, and no model at all from a file that lies."""

import hashlib
import json
import shutil
import stat
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lrbpfl
from lrbpfl import documents
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from tests.personal.conftest import QUICK, network, site

Forge = Callable[..., Path]


def bits(p: lrbpfl.Prediction) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in p[:4])).hexdigest()


def test_a_prediction_is_in_its_owners_words(trained: lrbpfl.Federation) -> None:
    x, y = site("north", 60)
    p = trained.personal("north").predict(x)
    assert p.classes == (3, 7, 11) and set(p.label.tolist()) <= {3, 7, 11}
    assert p.probability.shape == (60, 3) and np.allclose(p.probability.sum(1), 1)
    entropy = -(p.probability * np.log(p.probability)).sum(1)
    assert np.allclose(p.total, entropy, atol=1e-6) and np.allclose(p.total, p.aleatoric + p.epistemic, atol=1e-6)
    assert (p.label == y.numpy()).mean() > 0.5
    assert all(row[0] == label and set(row) <= {3, 7, 11} for row, label in zip(p.set, p.label, strict=True))
    assert bits(p) == bits(trained.personal("north").predict(x.numpy())) == bits(trained.personal("north").predict(x))


def test_sets_cover_what_they_promise_or_are_refused_with_the_number_needed(trained: lrbpfl.Federation) -> None:
    model = trained.personal("north")
    x, _ = site("north", 60)
    n = len(model.calibration)
    assert 9 <= n < 19
    wide, narrow = model.predict(x, coverage=0.9).set, model.predict(x, coverage=0.5).set
    assert all(set(small) <= set(large) for small, large in zip(narrow, wide, strict=True))
    refused = model.predict(x, coverage=0.95)
    with pytest.raises(BadInput, match=rf"client 'north': a coverage of 0.95 needs 19 .* not {n}"):
        _ = refused.set
    with pytest.raises(BadInput, match=r"with confidence 0\.95 needs 29"):
        _ = model.predict(x, confidence=0.95).set
    with pytest.raises(BadInput):
        model.predict(x, coverage=1.5)


@pytest.mark.parametrize("whole", [False, True])
def test_a_file_predicts_the_same_bits(trained: lrbpfl.Federation, tmp_path: Path, whole: bool) -> None:
    model, x = trained.personal("south"), site("x")[0]
    path = model.save(tmp_path / "deep" / "south.safetensors", whole=whole)
    back = lrbpfl.load(path, model=network())
    assert bits(back.predict(x)) == bits(model.predict(x)) and back.client == "south"
    assert len(list(path.parent.glob("W-*"))) == (not whole)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in path.parent.iterdir())
    halved = lrbpfl.load(model.save(tmp_path / "half.safetensors", whole=whole, half=True), model=network())
    assert np.allclose(halved.predict(x).probability, model.predict(x).probability, atol=0.02)


FRESH = """
import hashlib, json, sys
from pathlib import Path
import lrbpfl, torch
from tests.personal.conftest import network, site
from tests.personal.test_model import bits
files = sorted(Path(sys.argv[1]).glob("[!W]*.safetensors"))
print(json.dumps({file.stem: bits(lrbpfl.load(file, model=network()).predict(site("x")[0])) for file in files}))
"""


def test_all_ten_come_back_in_another_process(tmp_path: Path) -> None:
    clients = {"north": site("north"), "south": site("south", 24)}
    gp = lrbpfl.PFedGP(chains=2, predict_chains=3, sweeps=2, local_steps=1)
    quick: dict[str, Any] = {"lr-bpfl": QUICK, "pfedgp": gp, "pfedbayes": lrbpfl.PFedBayes(local_steps=2)}
    made: dict[str, str] = {}
    for name in ALGORITHMS:
        algorithm = quick.get(name, name)
        federation = lrbpfl.Federation(network(), clients, algorithm, workers=1, quiet=True)
        model = federation.fit(1).personal("south")
        model.save(tmp_path / f"{name}.safetensors")
        newcomer = federation.onboard(*site("new", 12))
        newcomer.save(tmp_path / name / "new.safetensors")
        assert len(list((tmp_path / name).glob("W-*"))) == bool(newcomer.about["shared"])  # where something is shared
        newcomer.save(tmp_path / f"{name}-new.safetensors")
        made |= {name: bits(model.predict(site("x")[0])), f"{name}-new": bits(newcomer.predict(site("x")[0]))}
    ran = subprocess.run([sys.executable, "-c", FRESH, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == made


def test_a_mask_on_the_papers_network_is_small(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    clients = {name: (images, torch.arange(6) % 3 + k * 5) for k, name in enumerate(("a", "b"))}
    clients["c"] = (images[:4], torch.tensor([3, 4, 8, 9]))
    quick = LRBPFL(
        max_rank=8, mask_layers="all", mask_steps=1, model_steps=1, predict_samples=1, calibration=0.0, ranks="printed"
    )
    names = [*range(3), *range(5, 8), 3, 4, 8, 9]
    federation = lrbpfl.Federation(cnn(len(names)), clients, quick, workers=1, quiet=True).fit(1)
    model = federation.personal("a")
    full, half = model.save(tmp_path / "a.safetensors"), model.save(tmp_path / "h.safetensors", half=True)
    assert model.about["leaves"] and full.stat().st_size <= 260_000
    assert half.stat().st_size <= 134_000  # half of the numbers, and the same description
    x = images.numpy()
    assert bits(lrbpfl.load(full).predict(x)) == bits(model.predict(x))  # one of ours needs no model=


def deeper() -> nn.Module:
    return nn.Sequential(*network(), nn.Identity())


def frozen() -> nn.Module:
    model = network()
    model[0].bias.requires_grad_(False)
    return model


class Scaled(nn.Module):
    def __init__(self, scale: float, f: Any = torch.relu) -> None:
        super().__init__()
        self.scale, self.f, self.calls, self.fc = scale, f, 0, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.fc(self.f(x)) * self.scale
        return out


@pytest.mark.parametrize("other", [deeper(), network(slope=0.2), network(hidden=13), frozen(), Scaled(1.0)])
def test_another_model_is_refused(saved: Path, other: nn.Module) -> None:
    with pytest.raises(BadInput, match=r"north\.safetensors belongs to another model"):
        lrbpfl.load(saved, model=other)
    with pytest.raises(BadInput, match="belongs to a model of your own: give it"):
        lrbpfl.load(saved)


def attention(heads: int, **how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, heads, 16, dropout=0.0, batch_first=True, **how)


def test_settings_that_no_layer_prints_make_another_model() -> None:
    from lrbpfl.personal.identity import fingerprint

    made = [Scaled(1.0), Scaled(2.0), Scaled(1.0, torch.tanh), attention(2), attention(4)]
    made += [attention(2, norm_first=True), attention(2, activation="gelu")]
    assert len(set(map(fingerprint, made))) == len(made)
    used = Scaled(1.0)
    used(torch.zeros(2, 4))  # what only counts is no setting
    assert fingerprint(used) == fingerprint(Scaled(1.0).train())


def test_another_shared_network_is_refused(trained: lrbpfl.Federation, saved: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(saved, tmp_path))
    with pytest.raises(BadInput, match=r"not beside it: W-[0-9a-f]{16}\.safetensors is missing"):
        lrbpfl.load(file, model=network())
    (own,) = saved.parent.glob("W-*")
    shared = documents.read(own, "shared")
    name = "message/W/0.weight"
    documents.write(tmp_path / own.name, shared._replace(tensors={**shared.tensors, name: shared.tensors[name] + 1}))
    with pytest.raises(BadInput, match="is not the shared network that"):
        lrbpfl.load(file, model=network())


LIES: dict[str, dict[str, Any]] = {
    "nothing": dict.fromkeys(("algorithm", "classes", "inputs", "leaves", "address", "model"), ...),
    "no algorithm": {"algorithm": ...},
    "an algorithm of text": {"algorithm": "lr-bpfl"},
    "an unknown algorithm": {"algorithm": {"name": "lr-bpfl2", "fields": {}}},
    "an unhashable algorithm": {"algorithm": {"name": ["lr-bpfl"], "fields": {}}},
    "no fields": {"algorithm": {"name": "lr-bpfl"}},
    "unknown fields": {"algorithm": {"name": "lr-bpfl", "fields": {"speed": 3}}},
    "fields of another type": {"algorithm": {"name": "lr-bpfl", "fields": {"max_rank": "two"}}},
    "fields as a list": {"algorithm": {"name": "lr-bpfl", "fields": [1]}},
    "another algorithm's": {"algorithm": {"name": "fedavg", "fields": {}}},
    "no classes": {"classes": ...},
    "classes twice": {"classes": [3, 3, 7]},
    "nested classes": {"classes": [[3], [7], [11]]},
    "mixed classes": {"classes": [3, "7", 11]},
    "classes of numbers with points": {"classes": [3.5, 7.0, 11.0]},
    "too many classes": {"classes": [3, 7, 11, 15]},
    "classes by name": {"classes": {"3": 1}},
    "no inputs": {"inputs": ...},
    "inputs of text": {"inputs": "float32"},
    "inputs without a type": {"inputs": {"shape": [4]}},
    "inputs of an odd type": {"inputs": {"dtype": ["float32"], "shape": [4]}},
    "inputs of another shape": {"inputs": {"dtype": "float32", "shape": [5]}},
    "inputs of no shape": {"inputs": {"dtype": "float32", "shape": []}},
    "huge inputs": {"inputs": {"dtype": "float32", "shape": [2**30, 2**30]}},
    "many large inputs": {"inputs": {"several": [{"dtype": "float32", "shape": [2**26]}] * 10}},
    "inputs of minus one": {"inputs": {"dtype": "float32", "shape": [-1]}},
    "inputs of truth": {"inputs": {"dtype": "float32", "shape": [True]}},
    "other tokens": {"inputs": {"dtype": "int64", "shape": [4]}},
    "inputs by name": {"inputs": {"named": {"x": {"dtype": "float32", "shape": [4]}}}},
    "inputs in inputs": {"inputs": {"several": [{"several": [{"dtype": "float32", "shape": [4]}]}]}},
    "no several inputs": {"inputs": {"several": []}},
    "no leaves": {"leaves": ...},
    "leaves as a list": {"leaves": ["W"]},
    "leaves to nowhere": {"leaves": {"W/0.weight": "nowhere"}},
    "leaves of numbers": {"leaves": {"W/0.weight": 3}},
    "no model": {"model": ...},
    "a model without a fingerprint": {"model": {"name": "mlp"}},
    "a fingerprint of numbers": {"model": {"name": None, "fingerprint": 3}},
    "no address": {"address": ...},
    "an empty address": {"address": []},
    "an address of text": {"address": ["0", "predict"]},
    "an address of points": {"address": [0, "predict", 1.5]},
    "a nested address": {"address": [0, ["predict"]]},
    "an endless address": {"address": [0] * 100_000},
    "a temperature of text": {"temperature": "1"},
    "no temperature": {"temperature": 0},
    "a negative temperature": {"temperature": -1.0},
    "a true temperature": {"temperature": True},
    "a label prior of text": {"label_prior": "1"},
    "a negative label prior": {"label_prior": -1.0},
    "no shared digest": {"shared": None},
    "a shared path": {"shared": "../../../etc/passwd"},
    "a shared number": {"shared": 3},
    "a client that is a list": {"client": ["north"]},
    "scores of text": {"scores": {"accuracy": "high"}},
    "no judged": {"judged": None},
    "examples of text": {"examples": "many"},
    "features that are too few": {"features": ["a", "b"]},
    "features that are no text": {"features": [1, 2, 3, 4]},
    "features twice": {"features": ["a", "a", "b", "c"]},
}


@pytest.mark.parametrize("name", LIES)
def test_a_description_that_lies_is_refused(forge: Forge, name: str) -> None:
    with pytest.raises(BadInput, match=r"forged\.safetensors") as refused:
        lrbpfl.load(forge(**LIES[name]), model=network())
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700


def test_a_file_cannot_make_us_build_a_giant(forge: Forge) -> None:
    for name, shape in (("mlp", [2**26]), ("cnn", [3, 4096, 4096]), ("resnet", [2**24, 2, 2]), ("none", [4]), (3, [4])):
        inputs, model = {"dtype": "float32", "shape": shape}, {"name": name, "fingerprint": "0"}
        with pytest.raises(BadInput, match="nothing here makes the model it names"):
            lrbpfl.load(forge(inputs=inputs, model=model))


def test_a_file_cannot_make_us_draw_for_ever(saved: Path, forge: Forge) -> None:
    said = documents.read(saved, "personal").about["algorithm"]
    large = torch.zeros(2**14)
    for samples, tensors, leaves in ((10**9, {}, {}), (2**16, {"own/large": large}, {"large": None})):
        fields = {**said["fields"], "predict_samples": samples}
        about = documents.read(saved, "personal").about
        path = forge(tensors, algorithm={**said, "fields": fields}, leaves={**about["leaves"], **leaves})
        with pytest.raises(BadInput, match=r"beyond 65536|too much memory"):
            lrbpfl.load(path, model=network())


SPOILED: dict[str, dict[str, Tensor | None]] = {
    "a tensor too many": {"own/extra": torch.zeros(1)},
    "NaN": {"own/gates/0.weight": torch.full((2,), torch.nan)},
    "another shape": {"own/gates/0.weight": torch.zeros(7, 7)},
    "a tensor too few": {"own/gates/0.weight": None},
    "calibration in two dimensions": {"calibration": torch.zeros(3, 3, dtype=torch.float64)},
    "calibration of another type": {"calibration": torch.zeros(30, dtype=torch.int64)},
    "calibration that falls": {"calibration": torch.linspace(1, 0, 30, dtype=torch.float64)},
    "calibration beyond one": {"calibration": torch.linspace(0, 2, 30, dtype=torch.float64)},
    "half a scaling": {"scaling/mean": torch.zeros(4)},
    "a scaling of another shape": {"scaling/mean": torch.zeros(1), "scaling/std": torch.ones(1)},
    "a scaling of zeros": {"scaling/mean": torch.zeros(4), "scaling/std": torch.zeros(4)},
    "a scaling of whole numbers": {"scaling/mean": torch.zeros(4).long(), "scaling/std": torch.ones(4).long()},
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_tensors_are_refused(forge: Forge, name: str) -> None:
    assert lrbpfl.load(forge(), model=network()).client == "north"
    with pytest.raises(BadInput, match=r"forged\.safetensors cannot be used"):
        lrbpfl.load(forge(SPOILED[name]), model=network())


def test_inputs_are_refused_in_a_sentence(trained: lrbpfl.Federation) -> None:
    model = trained.personal("north")
    for wrong, sentence in (
        (np.zeros((3, 5)), r"shape \(3, 5\), and the model takes \(n, 4\)"),
        (np.zeros(4), "shape"),
        (3, "shape"),
        (np.zeros((0, 4)), "the inputs have no rows"),
        ([["a"] * 4], "cannot be read as an array of numbers"),
        ([[1, 2], [3]], "cannot be read as an array of numbers"),
        (np.array([[0, 0, 0, np.nan]]), "row 0 of the inputs holds a number that is not finite"),
        (np.array([[0, 0, 0, 1e300]]), "row 0 .* not finite"),
        ((np.zeros((3, 4)),), "shape"),
    ):
        with pytest.raises(BadInput, match=sentence):
            model.predict(wrong)
    assert model.predict([[1, 2, 3, 4]]).probability.shape == (1, 3)


def test_a_model_shows_what_it_is(trained: lrbpfl.Federation) -> None:
    assert repr(trained.personal("south")).startswith("<PersonalModel of client 'south': 3 classes, made by lr-bpfl")


def test_a_finished_run_has_everybodys_model(tmp_path: Path) -> None:
    """Odd names, numbers as names; the command line's runs, too, when their data are gone."""
    from lrbpfl.experiments.build import build_setup
    from lrbpfl.experiments.config import parse
    from lrbpfl.experiments.runner import Progress, start

    data = tmp_path / "data"
    data.mkdir()
    for name in ("7", "Zürich ☂", "a'b\"c", "a..b c"):
        x, y = site(name, 20)
        np.savez(data / f"{name}.npz", x=x, y=y)
    config = parse(
        {
            "data": {"dataset": str(data), "train_fraction": 0.5},
            "federation": {"rounds": 1, "cohort": 2, "model": "mlp"},
            "engine": {"kind": "serial"},
            "algorithm": {"name": "fedavg-ft", "local_steps": 1},
        }
    )
    start(config, tmp_path / "run", build_setup(config), Progress())
    shutil.rmtree(data)
    for client in (7, "7", "Zürich ☂", "a'b\"c", "a..b c"):
        model = lrbpfl.load(tmp_path / "run", client=client)
        assert model.client == str(client) and model.predict(site("x")[0]).classes == (3, 7, 11)
    with pytest.raises(BadInput, match="has no client 'eight'; its clients: "):
        lrbpfl.load(tmp_path / "run", client="eight")
    with pytest.raises(BadInput, match="name one; its clients: "):
        lrbpfl.load(tmp_path / "run")
    with pytest.raises(BadInput, match="it is no finished run"):
        lrbpfl.load(tmp_path, client="7")
    (tmp_path / "run" / "clients.json").write_text("{}")
    with pytest.raises(BadInput, match="holds no list of names"):
        lrbpfl.load(tmp_path / "run", client="7")


def test_names_of_layers_may_hold_slashes(tmp_path: Path) -> None:
    layers = OrderedDict([("in/side", nn.Linear(4, 8)), ("relu", nn.ReLU()), ("a/b/c", nn.Linear(8, 3))])
    model = nn.Sequential(layers)
    federation = lrbpfl.Federation(model, {"a": site("a"), "b": site("b")}, QUICK, workers=1, quiet=True).fit(1)
    path = federation.personal("a").save(tmp_path / "a.safetensors")
    x = site("x")[0]
    assert bits(lrbpfl.load(path, model=model).predict(x)) == bits(federation.personal("a").predict(x))
    assert federation.onboard(*site("c")).classes == (3, 7, 11)
