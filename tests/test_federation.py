"""The front door: what the README shows works as it stands, and leaves nothing behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lrbpfl
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.cli import main
from lrbpfl.errors import BadInput
from lrbpfl.federation import Federation, name_of
from tests.experiments.conftest import assert_same, contents
from tests.personal.conftest import QUICK, network, site

CLIENTS = {"north": site("north"), "south": site("south")}

SCRIPT = """
import multiprocessing
import numpy as np
import torch
import lrbpfl

class Net(torch.nn.Module):  # known to this script alone
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)

model, rng = Net(), np.random.default_rng(0)
def site(n):
    y = np.arange(n) % 3
    return rng.normal(size=(n, 4)) + np.eye(4)[y], np.array(["flu", "cold", "none"])[y]

(x, y), (x2, y2), (x3, y3), (x_new, _) = site(30), site(30), site(30), site(7)
federation = lrbpfl.Federation(
    model, clients={"north": (x, y), "south": (x2, y2)}, algorithm=ALGORITHM, seed=0, workers=2, start=START
)
federation.fit(rounds=2)
personal = federation.personal("north")
p = personal.predict(x_new)
personal.save("north.safetensors")
again = lrbpfl.load("north.safetensors", model=model)
assert (again.predict(x_new).probability == p.probability).all()
newcomer = federation.onboard(x3, y3)
assert newcomer.predict(x_new).label[0] in ("flu", "cold", "none")
federation.report("page.html")
print(len(multiprocessing.active_children()), sorted(federation.scores), federation.path, sep="|")
"""
QUICKLY = "lrbpfl.LRBPFL(mask_steps=2, model_steps=2, predict_samples=2, calibration=0.0)"


@pytest.mark.parametrize("start", ["auto", "spawn"])
def test_a_script_without_a_guard(tmp_path: Path, start: str) -> None:
    """Once as a file, with workers that start anew; once as a notebook would, from a stream."""
    text = SCRIPT.replace("ALGORITHM", QUICKLY).replace("START", repr(start))
    (tmp_path / "script.py").write_text(text)
    call = [sys.executable, "script.py"] if start == "spawn" else [sys.executable, "-"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(call, input=text, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    children, names, path = ran.stdout.strip().split("|")
    assert (children, names) == ("0", "['north', 'south']")
    assert not Path(path).parent.exists()  # temporary files are gone with the process
    assert "30% of each client's examples, chosen by seed 0, test its model" in ran.stderr
    assert "round 2/2" in ran.stderr and "Traceback" not in ran.stderr
    assert "<html" in (tmp_path / "page.html").read_text()


CUT = """
import sys
from lrbpfl import Federation
from tests.personal.conftest import QUICK, network
from tests.test_federation import CLIENTS
Federation(network(), CLIENTS, QUICK, workers=2, quiet=True).fit(6, directory=sys.argv[1])
"""


def test_a_killed_run_goes_on_to_the_same_files(tmp_path: Path) -> None:
    cut, whole, rounds = tmp_path / "cut", tmp_path / "whole", 6
    process = subprocess.Popen([sys.executable, "-c", CUT, cut], start_new_session=True)
    while process.poll() is None and not (cut / "checkpoint" / "000001").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (cut / "summary.json").exists()
    federation = Federation(network(), CLIENTS, QUICK, workers=1, quiet=True)
    for _ in range(2):  # a finished one only opens its results
        assert federation.fit(rounds, directory=cut).path == cut
    whole.mkdir()  # an empty directory is as good as none
    Federation(network(), CLIENTS, QUICK, workers=1, quiet=True).fit(rounds, directory=whole)
    assert_same(cut, contents(whole), but=("config.toml",))  # it names the workers


def test_another_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    def fit(model: nn.Module, clients: Any = CLIENTS, algorithm: Any = "fedavg", rounds: int = 1, **how: Any) -> None:
        Federation(model, clients, algorithm, workers=1, quiet=True, **how).fit(rounds, directory=tmp_path / "run")

    fit(network())
    renamed = {"north": CLIENTS["north"], "west": CLIENTS["south"]}
    relabelled = {name: (x, y + 1) for name, (x, y) in CLIENTS.items()}
    others: list[tuple[Any, dict[str, Any]]] = [
        (network(slope=0.3), {}),
        (network(), {"seed": 1}),
        (network(), {"pretrained": True}),
        (network(), {"clients": renamed}),
        (network(), {"clients": relabelled}),
        (network(), {"algorithm": "fedavg-ft"}),
        (network(), {"label_prior": 1.0}),
        (network(), {"hold_out": 0.5}),
        (network(), {"rounds": 2}),
    ]
    for model, how in others:
        with pytest.raises(BadInput, match=r"holds another run: .* name another directory"):
            fit(model, **how)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(BadInput, match="is no run directory"):
        Federation(network(), CLIENTS, "fedavg", workers=1, quiet=True).fit(1, directory=tmp_path / "other")


def test_weights_that_are_not_drawn_anew_belong_to_the_run(tmp_path: Path) -> None:
    """Layers but Linear and Conv start from the model's own values, so another draw of them is another run."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2))

    clients = {name: (torch.randint(0, 5, (12, 3)), torch.arange(12) % 2) for name in "ab"}
    how: dict[str, Any] = {"algorithm": "fedavg", "tokens": True, "workers": 1, "quiet": True}
    Federation(made(0), clients, **how).fit(1, directory=tmp_path / "run")
    Federation(made(0), clients, **how).fit(1, directory=tmp_path / "run")
    with pytest.raises(BadInput, match="starting weights"):
        Federation(made(1), clients, **how).fit(1, directory=tmp_path / "run")


def test_temporary_files_end_with_their_federation(tmp_path: Path) -> None:
    with Federation(network(), CLIENTS, "fedavg", workers=2, quiet=True) as federation:
        with pytest.raises(BadInput, match="not been trained yet, or was closed: call fit first"):
            federation.personal("north")
        first = federation.fit(1).path
        second = federation.fit(1).path
        assert not first.parent.exists() and second.is_dir()
        kept = federation.fit(1, directory=tmp_path / "run").path
        federation.close()
        assert not second.parent.exists() and federation.path == kept == tmp_path / "run"
    assert multiprocessing.active_children() == []
    assert federation.personal("north").client == "north"  # a directory of one's own stays
    other = Federation(network(), CLIENTS, "fedavg", workers=1, quiet=True).fit(1)
    path = other.path
    del other
    gc.collect()
    assert not path.parent.exists()


def test_the_given_model_stays_as_it_is() -> None:
    model = network().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, grads = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    with Federation(model, CLIENTS, QUICK, workers=1, quiet=True).fit(1) as federation:
        federation.personal("north").predict(CLIENTS["north"][0])
        federation.onboard(*site("new"))
        assert federation.fit(1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes and [p.requires_grad for p in model.parameters()] == grads
    assert all(p.grad is None for p in model.parameters())


def test_what_an_algorithm_asks_for_it_gets() -> None:
    """As on the command line: a label prior for lr-bpfl, inputs at the server for fedbe; what is said overrules it."""

    def config(algorithm: Any, **how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        with Federation(network(), CLIENTS, algorithm, workers=1, quiet=True, **how).fit(1) as federation:
            from lrbpfl.experiments.store import Run

            _, found = Run.open(federation.path)
            return found.tables(), federation.personal("north").about

    tables, about = config(QUICK)
    assert tables["federation"]["label_prior"] == about["label_prior"] == 1.0
    tables, about = config(QUICK, label_prior=0.0)
    assert tables["federation"]["label_prior"] == about["label_prior"] == 0.0
    tables, about = config(lrbpfl.FedBE(local_steps=1))
    assert tables["data"]["public_fraction"] == 0.04
    assert about["examples"] == 27  # 40 - 30 % for testing - 4 % for the server


def test_all_ten_go_by_name_and_as_objects() -> None:
    for name, kind in ALGORITHMS.items():
        assert name_of(kind()) == name
        assert repr(Federation(network(), CLIENTS, kind(), quiet=True)) == (
            f"<Federation of 2 clients by {name}, not trained yet>"
        )
        assert Federation(network(), CLIENTS, name, quiet=True).algorithm == kind()
    assert Federation(network(), CLIENTS, "lr-bpfl:paper", quiet=True).algorithm == lrbpfl.LRBPFL(
        **lrbpfl.LRBPFL.PRESETS["paper"]
    )
    for wrong in (3, lrbpfl.LRBPFL):
        with pytest.raises(BadInput, match="give a name, as 'lr-bpfl', or an object"):
            Federation(network(), CLIENTS, wrong, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"lr-bplf.*lr-bpfl"):
        Federation(network(), CLIENTS, "lr-bplf", quiet=True)

    class Mine(lrbpfl.FedAvg):
        pass

    with pytest.raises(BadInput, match=r"Mine has no name .* entry point of the group lrbpfl\.algorithms"):
        Federation(network(), CLIENTS, Mine(), quiet=True)


class Both(nn.Module):
    """Age and notes: numbers beside tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(9, 4), nn.Linear(6, 2)

    def forward(self, age: Tensor, notes: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat([age, self.words(notes).mean(1)], 1))
        return out


def test_several_inputs_by_place_and_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model, y = Both(), np.array(["ill", "well"])[np.arange(20) % 2]
    named = {k: ({"age": rng.normal(size=(20, 2)), "notes": rng.integers(0, 9, (20, 3))}, y) for k in (1, 2, 10)}
    placed = {k: ((x["age"], x["notes"]), labels) for k, (x, labels) in named.items()}
    found = []
    for clients in (named, placed):
        federation = Federation(model, clients, "fedavg", calibration=0.3, workers=1, quiet=True).fit(1)
        assert federation.clients == ("1", "2", "10")
        personal = federation.personal(10)
        file = personal.save(tmp_path / "ten.safetensors")
        x = clients[10][0]
        p = lrbpfl.load(file, model=model).predict(x)
        assert set(p.label) <= {"ill", "well"}
        assert federation.onboard(x, y).classes == ("ill", "well")
        found.append(p.probability)
    assert np.array_equal(found[0], found[1])
    with pytest.raises(BadInput, match="two clients have the same name"):
        Federation(model, {1: named[1], "1": named[2]}, "fedavg", quiet=True)
    with pytest.raises(BadInput, match="client '2' has no pair of several inputs"):
        Federation(model, {1: named[1], 2: (np.zeros((3, 4)), y[:3])}, "fedavg", quiet=True)


def test_images_and_tokens_stay_what_they_are() -> None:
    images = torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with Federation(model, {"a": (images, [5, 9] * 10)}, "fedavg", workers=1, quiet=True).fit(1) as federation:
        assert federation.personal("a").inputs == {"dtype": "uint8", "shape": [1, 8, 8]}
        assert set(federation.personal("a").predict(images.float()).label) <= {5, 9}
    words = nn.Sequential(nn.Embedding(30, 4), nn.Flatten(), nn.Linear(12, 2))
    tokens = torch.randint(0, 30, (20, 3))
    clients = {"a": (tokens, [5, 9] * 10)}
    with Federation(words, clients, "fedavg-ft", tokens=True, workers=1, quiet=True).fit(1) as federation:
        model_of_a = federation.personal("a")
        assert model_of_a.inputs["dtype"] == "int64"
        with pytest.raises(BadInput, match="client 'a': its model fails on these inputs with IndexError"):
            model_of_a.predict(tokens + 30)
        with pytest.raises(BadInput, match=r"cannot be made from .* and these inputs"):
            federation.onboard(tokens + 30, [5, 9] * 10, hold_out=0.0)
    with pytest.raises(BadInput, match="tokens"):  # said to be numbers, they cannot be looked up
        Federation(words, clients, "fedavg", quiet=True)


def test_test_data_of_ones_own(tmp_path: Path) -> None:
    test = {"south": site("later", 9), "north": site("later", 6)}
    with Federation(network(), CLIENTS, "fedavg", test=test, workers=1, quiet=True).fit(1) as federation:
        assert {name: s["examples"] for name, s in federation.scores.items()} == {"north": 6, "south": 9}
        assert federation.personal("south").about["examples"] == 40
    for wrong, sentence in (
        ({"north": test["north"]}, "client 'south' is in one of clients and test only"),
        ({name: (x, y + 1) for name, (x, y) in test.items()}, "label 4, which no client's training data have"),
    ):
        with pytest.raises(BadInput, match=sentence):
            Federation(network(), CLIENTS, "fedavg", test=wrong, quiet=True)


def test_sets_are_judged_where_they_are_promised() -> None:
    how: dict[str, Any] = {"workers": 1, "quiet": True}
    with Federation(network(), CLIENTS, "fedavg", calibration=0.4, **how).fit(1, coverage=0.8) as federation:
        assert 0 <= federation.scores["north"]["coverage"] <= 1
        with pytest.raises(BadInput, match=r"a coverage of 0\.99 needs 99 calibration examples"):
            federation.fit(1, coverage=0.99)
    with pytest.raises(BadInput, match="calibration"):
        Federation(network(), CLIENTS, "fedavg", **how).fit(1, coverage=0.8)


def test_what_cannot_be_is_told_before_anything_runs() -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"hold_out": 1.2}, "hold_out is 1.2"),
        ({"calibration": -1}, "calibration -1"),
        ({"seed": -3}, "seed = -3"),
        ({"label_prior": -1.0}, "label_prior = -1.0"),
        ({"workers": -1}, "workers = -1"),
        ({"device": "toaster"}, "'toaster' cannot be used here"),
        ({"start": "slowly"}, "start = 'slowly'"),
        ({"standardise": "yes"}, "standardise is 'yes'"),
    ]
    for wrong, sentence in faults:
        with pytest.raises(BadInput, match=sentence):
            Federation(network(), CLIENTS, "fedavg", quiet=True, **wrong)


def test_the_command_line_meets_such_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reports on a finished one, and sends back to Python who wants to resume one that is not."""

    def call(*arguments: object) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["lrbpfl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.run()
            raise SystemExit(0)
        return ended.value.code, capsys.readouterr().err

    Federation(network(), CLIENTS, "fedavg", workers=1, quiet=True).fit(1, directory=tmp_path / "run")
    code, _ = call("report", tmp_path / "run")
    assert code in (0, None) and "north" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "run" / "summary.json").unlink()
    code, err = call("resume", tmp_path / "run")
    assert code == 2 and "came from Python: go on with Federation(...).fit(directory=...)" in " ".join(err.split())


def test_public_names() -> None:
    import ast

    tree = ast.parse(Path(str(lrbpfl.__file__)).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == set(lrbpfl.__all__) and len(lrbpfl.__all__) == len(told) <= 45
    named = [getattr(lrbpfl, name) for name in lrbpfl.__all__]
    assert set(ALGORITHMS.values()) <= {kind for kind in named if isinstance(kind, type)}
    assert set(lrbpfl.__all__) <= set(dir(lrbpfl))  # where completion looks


@pytest.mark.parametrize("how", ["client", "pooled"])
def test_the_scale_of_features_is_part_of_the_saved_model(how: Literal["client", "pooled"], tmp_path: Path) -> None:
    """Raw inputs, as their owner has them, give the predictions that the run judged; a newcomer's likewise."""
    rng = np.random.default_rng(0)
    clients = {
        name: (rng.normal(shift, 40.0, (40, 5)) + 30 * (np.arange(40) % 2)[:, None], np.arange(40) % 2)
        for name, shift in (("north", 100.0), ("south", 300.0))
    }
    test = {name: (x[:10], y[:10]) for name, (x, y) in clients.items()}
    with lrbpfl.Federation(
        nn.Linear(5, 2), clients, QUICK, test=test, standardise=how, workers=1, quiet=True
    ) as federation:
        federation.fit(2)
        table = load_file(federation.path / "predictions.safetensors")
        for k, name in enumerate(federation.clients):
            model = lrbpfl.load(federation.personal(name).save(tmp_path / f"{name}.safetensors"), model=nn.Linear(5, 2))
            said = torch.from_numpy(model.predict(test[name][0]).probability).float()
            assert torch.equal(said, table["probs"][table["client"] == k])
        x, y = clients["north"]
        newcomer = federation.onboard(x, y, hold_out=0.0)
        assert newcomer.scaling is not None
        expected = torch.from_numpy(np.concatenate([clients[name][0] for name in clients]) if how == "pooled" else x)
        torch.testing.assert_close(newcomer.scaling.mean, expected.float().mean(0), rtol=1e-4, atol=1e-3)


def test_weights_without_masks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 2))
    clients = {"a": (np.arange(40).reshape(20, 2) % 9, np.arange(20) % 2)}
    Federation(model, clients, tokens=True)
    assert "no masks on 0.weight: these weights are the same for all clients" in capsys.readouterr().err
    Federation(model, clients, "fedavg", tokens=True)
    assert "no masks" not in capsys.readouterr().err


def test_precision_and_threads_belong_to_the_run(tmp_path: Path) -> None:
    def fit(name: str, **how: Any) -> Any:
        federation = Federation(network(), CLIENTS, QUICK, quiet=True, **how)
        return federation.fit(1, directory=tmp_path / name).personal("north").predict(CLIENTS["north"][0]).probability

    exact, rough = fit("exact", workers=1), fit("rough", workers=2, precision="bf16")
    assert 0 < abs(exact - rough).max() < 0.02
    fit("threads", threads=2)
    for name, how in (("exact", {"precision": "bf16"}), ("rough", {}), ("threads", {"threads": 3}), ("threads", {})):
        with pytest.raises(BadInput, match="holds another run"):
            fit(name, **how)
    with pytest.raises(BadInput, match="workers is 2 and threads is 3"):
        fit("both", workers=2, threads=3)
    with pytest.raises(BadInput, match=r"federation\.precision = 'fp16'"):
        fit("half", precision="fp16")
