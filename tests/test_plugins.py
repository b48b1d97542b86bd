"""Other packages' algorithms and engines: found by name, loaded when asked for, and never in each other's way."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrbpfl import algorithms, models, plugins
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.engines import registry as engines
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import build_engine, build_setup
from lrbpfl.experiments.config import make_algorithm, parse
from lrbpfl.states import Memory

ROOT = Path(__file__).parents[1]

FEDPROX = '''
from pydantic.dataclasses import dataclass
from lrbpfl import Data, FedAvg, Task, trees
from lrbpfl.algorithms import average
from lrbpfl.algorithms.plain import PersonalNetwork, objective, personal_model, softmax
from lrbpfl.algorithms.protocol import STRICT, Count, NonNegative, first_params
from lrbpfl.core.descent import Rate, batches, descend


@dataclass(frozen=True, config=STRICT)
class FedProx:
    """FedProx (Li et al., MLSys 2020), Algorithm 2."""

    PRESETS = {"strong": {"mu": 1.0}}

    mu: NonNegative = 0.1
    lr: NonNegative = 0.1
    steps: Count = 5

    def init_server(self, task, rng):
        return first_params(task, "uniform", rng)

    def init_client(self, task, rng):
        return None

    def broadcast(self, task, server, client_id):
        return server

    def client_update(self, task, message, client, data, rng):
        plain = objective(task, data)

        def proximal(w, batch):
            return plain(w, batch) + self.mu / 2 * sum(((w[n] - message[n]) ** 2).sum() for n in w)

        rate = Rate("sgd", self.lr * task.pace)
        (w,), loss = descend(proximal, (message,), batches(data, 32, self.steps, rng), (rate,))
        return w, None, {"loss": loss}

    def server_aggregate(self, task, server, updates, rng):
        return average.mean(server, updates, ())

    def personalise(self, task, message, client, data, rng) -> PersonalNetwork:
        return personal_model(task, message, data)

    def predict(self, task, personal, x, rng):
        return softmax(task, personal, x)
'''
BOMB = "raise OSError('no\\ndisk')"
ODD = """
from dataclasses import dataclass
from lrbpfl import Serial

@dataclass(frozen=True)
class Bare:
    lr: float = 0.1

SEEN = []

def slow(setup, options, states):
    SEEN.append(options.workers)
    return Serial(setup)

number = 3
"""


def install(folder: Path, name: str, entries: dict[str, dict[str, str]], **modules: str) -> None:
    """A package as an installer leaves it: modules, and a folder with its name and entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    told = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in entries.items())
    (info / "entry_points.txt").write_text("\n".join(told))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose packages are installed while a test runs."""
    monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        plugins.offered.cache_clear()
        plugins._load.cache_clear()

    forget()
    yield tmp_path
    forget()
    for module in ("acme_nets", "acme_prox", "odd_things", "explosive"):
        sys.modules.pop(module, None)


def run(site: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    outside = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *command], cwd=site, env=outside, capture_output=True, text=True, check=False, timeout=100
    )


def test_a_package_adds_an_algorithm_to_the_command_line(tmp_path: Path) -> None:
    install(tmp_path, "acme", {"lrbpfl.algorithms": {"fedprox": "acme_prox:FedProx"}}, acme_prox=FEDPROX)
    small = ("data.dataset=digits", "federation.rounds=2", "federation.cohort=2", "engine.workers=1")
    settings = [word for key in small for word in ("--set", key)]
    command = ("-c", "from lrbpfl.cli.main import run; run()", "run", "-a", "fedprox:strong")
    ran = run(tmp_path, *command, *settings, "--out", "here", "--quiet")
    assert ran.returncode == 0, ran.stderr
    assert "fedprox:strong" in ran.stdout
    assert "mu = 1.0" in (tmp_path / "here" / "config.toml").read_text()


def test_a_package_checks_its_algorithm_in_a_plain_script(tmp_path: Path) -> None:
    checks = "\nfrom lrbpfl.testing import check_algorithm\ncheck_algorithm(FedProx())\nprint('fine')\n"
    (tmp_path / "script.py").write_text(FEDPROX + checks)
    ran = run(tmp_path, "script.py")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "fine\n", "")


NET = """
from torch import nn

def wide(classes, shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 20), nn.ReLU(), nn.Linear(20, classes))

def broken(classes, shape):
    raise KeyError("no weights")

def text(classes, shape):
    return "mlp"
"""


def test_a_package_adds_a_network_that_files_name(site: Path, tmp_path: Path) -> None:
    points = {name: f"acme_nets:{name}" for name in ("wide", "broken", "text")}
    install(site, "nets", {"lrbpfl.models": points}, acme_nets=NET)
    settings = ("federation.model=wide", "federation.rounds=1", "federation.judged_last=1", "engine.workers=1")
    command = ["-m", "lrbpfl", "run", "--quiet", "--out", "here", *(word for key in settings for word in ("-s", key))]
    ran = run(site, *command)
    assert ran.returncode == 0, ran.stderr
    (file,) = (tmp_path / "here" / "clients").glob("*/personal.safetensors")
    card = run(site, "-m", "lrbpfl", "card", str(file), "--json")
    assert card.returncode == 0 and '"wide"' in card.stdout, card.stdout + card.stderr
    with pytest.raises(BadInput, match=r"'broken' of the package nets cannot be made for 3 classes .*KeyError"):
        models.make("broken", 3, (5,))
    with pytest.raises(BadInput, match=r"gives a str, not a torch\.nn\.Module"):
        models.make("text", 3, (5,))
    with pytest.raises(BadInput, match=r"unknown model 'widee' \(did you mean 'wide'\?\)"):
        parse({"federation": {"model": "widee"}})


def test_names_are_told_without_loading(site: Path) -> None:
    install(site, "bomb", {"lrbpfl.algorithms": {"boom": "explosive:Boom"}}, explosive=BOMB)
    install(site, "acme", {"lrbpfl.algorithms": {"fedprox": "acme_prox:FedProx"}}, acme_prox=FEDPROX)
    assert algorithms.names() == [*ALGORITHMS, "boom", "fedprox"]
    with pytest.raises(BadInput, match=r"unknown algorithm 'fedprx' \(did you mean 'fedprox'\?\)"):
        make_algorithm("fedprx", {})
    assert "acme_prox" not in sys.modules
    assert algorithms.find("fedavg") is ALGORITHMS["fedavg"]
    assert algorithms.find("fedprox") is algorithms.find("fedprox")
    with pytest.raises(BadInput, match="unknown key of algorithm 'nu'; known: mu, lr, steps"):
        make_algorithm("fedprox", {"nu": 1.0})
    with pytest.raises(BadInput, match="of the package bomb cannot be loaded from 'explosive:Boom': OSError: no disk"):
        algorithms.find("boom")
    with pytest.warns(UserWarning, match="'boom' of the package bomb cannot be loaded"):
        assert list(algorithms.known()) == [*ALGORITHMS, "fedprox"]


def test_a_name_that_is_taken_is_refused_and_the_packages_are_named(site: Path) -> None:
    install(site, "acme", {"lrbpfl.algorithms": {"fedavg": "a:A", "both": "a:A"}})
    install(site, "brand", {"lrbpfl.algorithms": {"both": "b:B"}, "lrbpfl.engines": {"serial": "b:B"}})
    with pytest.raises(BadInput, match="algorithm 'fedavg' is offered by lrbpfl itself and the package acme:"):
        algorithms.find("fedavg")
    with pytest.raises(BadInput, match=r"'both' is offered by the package \w+ and the package \w+:"):
        algorithms.find("both")
    with pytest.raises(BadInput, match="engine 'serial' is offered by lrbpfl itself and the package brand"):
        engines.find("serial")
    assert algorithms.find("pfedme") is ALGORITHMS["pfedme"]
    assert algorithms.names() == [*ALGORITHMS, "both"]


def test_what_is_no_algorithm_is_refused(site: Path) -> None:
    points = {"number": "odd_things:number", "bare": "odd_things:Bare", "a/b": "odd_things:Bare"}
    entries = {"lrbpfl.algorithms": points, "lrbpfl.engines": {"number": "odd_things:number"}}
    install(site, "odd", entries, odd_things=ODD)
    for name, words in {
        "number": "'number' of the package odd is 3, not a dataclass",
        "bare": "'bare' of the package odd lacks init_server, init_client",
        "a/b": "'a/b' of the package odd has a name that is not made of letters",
    }.items():
        with pytest.raises(BadInput, match=words):
            algorithms.find(name)
    with pytest.raises(BadInput, match="engine 'number' of the package odd is 3, which cannot be called"):
        engines.find("number")


def test_a_package_adds_an_engine(site: Path) -> None:
    install(site, "odd", {"lrbpfl.engines": {"slow": "odd_things:slow"}}, odd_things=ODD)
    config = parse({"data": {"dataset": "digits"}, "engine": {"kind": "slow", "workers": 7}})
    assert "odd_things" not in sys.modules
    engine = build_engine(config, build_setup(config), Memory())
    assert isinstance(engine, Serial)
    assert sys.modules["odd_things"].SEEN == [7]
    with pytest.raises(BadInput, match=r"engine.kind = 'slo': no such engine \(did you mean 'slow'\?\); known: proc"):
        parse({"engine": {"kind": "slo"}})
