"""Clients that are loaded when they are needed: the same runs as of clients that are read at once, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lrbpfl
from lrbpfl.data import lazy
from lrbpfl.engines.lazy import Roster
from lrbpfl.engines.loop import federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.errors import BadInput
from lrbpfl.experiments.build import build, build_setup
from lrbpfl.federation import Federation
from lrbpfl.rng import numpy_generator
from tests.experiments.conftest import NAMES, Configure, assert_same, contents, run

QUICK = lrbpfl.LRBPFL(mask_steps=2, model_steps=2, predict_samples=2)


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on every folder counts as a large one."""
    return lambda: monkeypatch.setattr(lazy, "MANY_FILES", 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("data", "federation", "algorithm"),
    [
        ({}, {}, {}),
        ({"standardise": "client", "stratified": False}, {}, {"name": "lr-bpfl", "mask_steps": 2, "model_steps": 2}),
        (
            {"validation_fraction": 0.2, "calibration_fraction": 0.3, "partition": "natural"},
            {"evaluate_on": "validation", "temper": "client"},
            {"name": "fedavg-ft", "local_steps": 2},
        ),
    ],
)
def test_a_run_on_a_folder_has_the_same_bits(
    data: dict[str, Any],
    federation: dict[str, Any],
    algorithm: dict[str, Any],
    configure: Configure,
    tmp_path: Path,
    lazily: Callable[[], None],
) -> None:
    """All files of the run, models and predictions included; only the hash of the data is another."""
    config = configure(data=data, federation=federation, algorithm=algorithm)
    run(config, tmp_path / "at once")
    lazily()
    assert isinstance(build_setup(config).clients, Roster)
    run(config, tmp_path / "lazily")
    assert_same(tmp_path / "lazily", contents(tmp_path / "at once"), but=("config.toml",))


@pytest.mark.parametrize("standardise", ["no", "client"])
def test_a_federation_of_a_folder_has_the_same_bits(
    standardise: Any, folder: Path, tmp_path: Path, lazily: Callable[[], None]
) -> None:
    def fit(name: str) -> dict[str, Any]:
        federation = Federation(
            network(), folder, QUICK, calibration=0.2, standardise=standardise, quiet=True, workers=1
        )
        federation.fit(rounds=2, cohort=2, directory=tmp_path / name)
        found = contents(tmp_path / name)
        return {
            file: value for file, value in found.items() if file.endswith((".safetensors", "record", "summary.json"))
        }

    whole = fit("at once")
    lazily()
    some = fit("lazily")
    for file in [file for file in whole if "checkpoint" in file]:  # names the configuration, which names the data
        assert whole.pop(file)[1] == some.pop(file)[1]
    assert some == whole


@pytest.mark.parametrize(
    "data",
    [
        {"standardise": "pooled"},
        {"shift": "features"},
        {"new_clients": 1},
        {"new_sites": ("anna",)},
        {"partition": "size", "clients": 3},
        {"public_fraction": 0.1},
    ],
)
def test_what_needs_everybody_at_once_reads_everybody(
    data: dict[str, Any], configure: Configure, lazily: Callable[[], None]
) -> None:
    lazily()
    assert isinstance(build_setup(configure(data=data)).clients, tuple)


def test_small_folders_are_read_at_once(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_setup(configure()).clients, tuple)
    monkeypatch.setattr(lazy, "MANY_BYTES", 1_000)
    assert isinstance(build_setup(configure()).clients, Roster)


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Six clients; the inputs of two are not in order, which their labels do not tell."""
    path = tmp_path / "spoilt"
    path.mkdir()
    for k in range(6):
        x = numpy_generator(0, k).normal(size=(20, 6))
        x[3, 2] = np.nan if k == 2 else 0
        np.savez(path / f"site-{k}.npz", x=x[:, :5] if k == 4 else x, y=np.arange(20) % 3)
    return path


@pytest.mark.parametrize("engine", [Serial, lambda setup: Processes(setup, 2)])
def test_a_bad_file_fails_in_its_round_and_is_not_judged(
    engine: Any, spoilt: Path, configure: Configure, lazily: Callable[[], None]
) -> None:
    config = configure(data={"dataset": str(spoilt)})
    with pytest.raises(BadInput, match="row 3 of client 'site-2', feature 2, holds nan"):
        build(config)
    lazily()
    made = engine(build_setup(config))
    try:
        (ended,) = federate(made, rounds=1, cohort=6)
    finally:
        made.close()
    told = {
        2: "BadInput: row 3 of client 'site-2', feature 2, holds nan, and inputs must be finite numbers",
        4: "BadInput: client 'site-4' has inputs (5,) float32 where client 'site-0' has (6,) float32"
        ": all must be alike",
    }
    assert ended.failures == told and ended.accepted == [0, 1, 3, 5]
    assert {k: e.failure for k, e in ended.evaluations.items() if e.failure} == told


def test_labels_are_looked_at_before_anything_else(
    spoilt: Path, configure: Configure, lazily: Callable[[], None]
) -> None:
    lazily()
    np.savez(spoilt / "site-5.npz", x=np.zeros((3, 6)), y=["a", "b", "c"])
    with pytest.raises(BadInput, match="client 'site-5' has labels that are text, and client 'site-0' has labels"):
        build(configure(data={"dataset": str(spoilt)}))
    (spoilt / "site-5.npz").write_bytes(b"PK")
    with pytest.raises(BadInput, match=r"site-5\.npz cannot be read"):
        build(configure(data={"dataset": str(spoilt)}))


def test_what_is_odd_is_said_of_large_folders_too(
    tmp_path: Path, configure: Configure, lazily: Callable[[], None]
) -> None:
    for k in range(3):
        y = np.full(12, 7) if k == 1 else np.arange(4 if k == 2 else 20) % 2 * 7
        np.savez(tmp_path / f"s{k}.npz", x=1000.0 + numpy_generator(0, k).normal(size=(len(y), 2)), y=y + 5 * (k == 2))
    config = configure(data={"dataset": str(tmp_path)})
    whole = build(config)
    lazily()
    some = build(config)
    assert [said for said in some.remarks if "stands for all" not in said] == whole.remarks[:-1]
    assert "2 of 2 features are out of scale" in whole.remarks[-1]
    assert "client 's0', which stands for all here: 2 of 2 features are out of scale" in some.remarks[-1]
    assert (some.setup.classes, some.setup.task.class_names) == (whole.setup.classes, whole.setup.task.class_names)
    assert some.config == whole.config


def test_a_promise_is_checked_by_the_largest_client(configure: Configure, lazily: Callable[[], None]) -> None:
    lazily()
    asked = {"federation": {"coverage": 0.9}}
    build(configure(data={"calibration_fraction": 0.6}, **asked))
    with pytest.raises(BadInput, match=r"the most that data\.calibration_fraction = 0\.1 leaves a client"):
        build(configure(data={"calibration_fraction": 0.1}, **asked))


def example(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = numpy_generator(0, name)
    y = np.arange(18) % 3
    return rng.normal(size=(18, 6)) + y[:, None], np.array(["flu", "cold", "none"])[y]


@pytest.mark.parametrize(("start", "classes"), [("fork", None), ("spawn", ("cold", "flu", "none"))])
def test_a_function_of_ones_own_gives_what_a_mapping_gives(start: Any, classes: Any, tmp_path: Path) -> None:
    """A closure, which travels to workers by value; `none` is said, or found, to be the third class."""
    shift = 0.0

    def load(name: str) -> tuple[Any, Any]:
        x, y = example(name)
        return torch.from_numpy(x + shift), y

    given: dict[str, Any] = {"algorithm": QUICK, "hold_out": 0.4, "calibration": 0.2, "quiet": True, "workers": 1}
    with (
        Federation(network(), {name: example(name) for name in NAMES}, **given) as whole,
        Federation(network(), lrbpfl.LazyClients(reversed(NAMES), load, classes=classes), start=start, **given) as some,
    ):
        assert some.clients == whole.clients == NAMES
        assert some.fit(rounds=2, cohort=2).scores == whole.fit(rounds=2, cohort=2).scores
        x = torch.from_numpy(example("new")[0])
        assert torch.equal(
            torch.as_tensor(some.personal("bert").predict(x).probability),
            torch.as_tensor(whole.personal("bert").predict(x).probability),
        )


def test_a_run_goes_on_with_the_same_names_only(tmp_path: Path) -> None:
    def fit(names: tuple[str, ...], hold_out: float = 0.3) -> None:
        clients = lrbpfl.LazyClients(names, example, classes=("cold", "flu", "none"))
        with Federation(network(), clients, QUICK, hold_out=hold_out, quiet=True, workers=1) as federation:
            federation.fit(rounds=1, directory=tmp_path / "run")

    fit(NAMES)
    fit(NAMES)
    for other in ((NAMES[:3], 0.3), (NAMES, 0.5)):
        with pytest.raises(BadInput, match="holds another run"):
            fit(*other)


class Sums(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.fc(left + right)
        return logits


def test_several_inputs_and_tests_of_ones_own() -> None:
    def load(name: str) -> tuple[Any, Any]:
        x, y = example(name)
        return (x, -x), y

    given: dict[str, Any] = {"algorithm": QUICK, "quiet": True, "workers": 1}
    named = lrbpfl.LazyClients(NAMES, load)
    with (
        Federation(Sums(), named, test=named, **given) as some,
        Federation(Sums(), {n: load(n) for n in NAMES}, test={n: load(n) for n in NAMES}, **given) as whole,
    ):
        assert some.fit(rounds=1).scores == whole.fit(rounds=1).scores


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"standardise": "pooled"}, "standardise is 'pooled', which takes everybody's data at once"),
        ({"client_column": "ward"}, "'ward' names a column"),
        ({"test": {"a": example("a")}}, "test must be LazyClients of the same names"),
    ],
)
def test_what_lazy_clients_cannot_have_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Federation(network(), lrbpfl.LazyClients(NAMES, example), QUICK, quiet=True, **given)


def test_the_first_client_shows_what_is_wrong_with_a_function() -> None:
    def load(name: str) -> Any:
        raise KeyError(name)

    with pytest.raises(BadInput, match="client 'anna' cannot be loaded: KeyError: 'anna'"):
        Federation(network(), lrbpfl.LazyClients(NAMES, load, classes=3), QUICK, quiet=True)
    with pytest.raises(BadInput, match="row 0 of client 'anna' has the label 'flu', and the classes are 0, 1, 2"):
        Federation(network(), lrbpfl.LazyClients(NAMES, example, classes=3), QUICK, quiet=True)


def test_a_baseline_that_asks_for_inputs_takes_those_of_some(folder: Path, lazily: Callable[[], None]) -> None:
    """FedBE of a folder has everybody's share, as ever; of clients of one's own, that of so many at most."""
    lazily()
    with Federation(network(), folder, lrbpfl.FedBE(), quiet=True) as federation:
        assert isinstance(federation._setup.clients, tuple)
    with Federation(network(), lrbpfl.LazyClients(NAMES, example), lrbpfl.FedBE(), quiet=True) as federation:
        assert isinstance(federation._setup.clients, Roster)
