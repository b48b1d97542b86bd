"""Bad input: one sentence that names it, exit code 2, nothing written."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.cli.conftest import DIGITS, TINY, Lrbpfl

CASES = {
    "unknown dataset": (["--set", "data.dataset=cifar11"], ["cifar11", "cifar10"]),
    "unknown algorithm": (["--algorithm", "lr-bpfi"], ["lr-bpfi", "lr-bpfl", "fedavg"]),
    "unknown preset": (["--algorithm", "lr-bpfl:papre"], ["papre", "paper"]),
    "unknown section": (["--set", "federaton.rounds=3"], ["federaton", "federation"]),
    "unknown key": (["--set", "federation.round=3"], ["round", "did you mean 'rounds'"]),
    "unknown field of an algorithm": (["--set", "algorithm.maxrank=3"], ["maxrank", "max_rank"]),
    "unknown partition": (["--set", "data.partition=dirichlett"], ["dirichlett", "dirichlet"]),
    "unknown model": (["--set", "federation.model=cnnn"], ["cnnn", "cnn"]),
    "wrong type": (["--set", "federation.rounds=ten"], ["federation.rounds = 'ten'"]),
    "fraction for a count": (["--set", "federation.rounds=2.5"], ["federation.rounds = 2.5"]),
    "number for a switch": (["--set", "data.balanced=1"], ["data.balanced = 1"]),
    "wrong type of an algorithm's field": (["--set", "algorithm.mask_lr=fast"], ["algorithm.mask_lr = 'fast'"]),
    "zero rounds": (["--set", "federation.rounds=0"], ["federation.rounds = 0"]),
    "negative clients": (["--set", "data.clients=-3"], ["data.clients = -3"]),
    "negative steps": (["--set", "algorithm.mask_steps=-1"], ["algorithm.mask_steps = -1"]),
    "rate that is not a number": (["--set", "algorithm.mask_lr=nan"], ["algorithm.mask_lr", "finite"]),
    "more labels than classes": (["--set", "data.labels_per_client=11"], ["11", "10"]),
    "more clients a round than clients": (["--set", "federation.cohort=11"], ["federation.cohort = 11", "10 clients"]),
    "train fraction of one": (["--set", "data.train_fraction=1.0"], ["train_fraction", "1.0"]),
    "alpha of zero": (["--set", "data.partition=dirichlet", "--set", "data.alpha=0"], ["alpha", "0"]),
    "validation without a validation part": (["--set", "federation.evaluate_on=validation"], ["validation_fraction"]),
    "unusable device": (["--set", "engine.device=gpu7"], ["gpu7"]),
    "unknown tracker": (["--track", "tensorbord"], ["tensorbord", "tensorboard", "mlflow"]),
    "no such configuration": (["--config", "none.toml"], ["none.toml"]),
    "setting without a value": (["--set", "federation.rounds"], ["section.key=value"]),
    "no such folder": (["--set", "data.dataset=./nowhere"], ["nowhere"]),
    "corruptions of what is no photograph": (["--set", "data.corruptions=true"], ["data.corruptions", "digits"]),
    "a shift that is none": (["--set", "data.shift=label"], ["data.shift = 'label'", "concept"]),
    "more groups than classes": (["--set", "data.shift=concept", "--set", "data.concept_groups=11"], ["11", "10"]),
    "more new clients than examples": (["--set", "data.new_clients=500"], ["data.new_clients = 500", "359"]),
    "the same alpha twice": (["--set", "data.new_alpha=[1, 1.0]"], ["data.new_alpha", "twice"]),
    "natural partition of a dataset without owners": (["--set", "data.partition=natural"], ["natural", "digits"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sentence_names_what_is_wrong(case: str, lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    arguments, words = CASES[case]
    outcome = lrbpfl("run", *DIGITS, *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("lrbpfl: ")
    assert outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in words), outcome.err
    assert list(tmp_path.iterdir()) == []


def write_client(folder: Path, name: str, x: npt.NDArray[np.float32], y: npt.NDArray[np.int64]) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", x=x, y=y)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", ["ward-b", "finite"]),
        ("negative label", ["ward-b", "-1"]),
        ("empty client", ["ward-b"]),
        ("truncated file", ["ward-b.npz"]),
        ("one example", ["ward-b"]),
    ],
)
def test_bad_client_files_are_named(fault: str, words: list[str], lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    x: npt.NDArray[np.float32] = np.ones((20, 6), dtype=np.float32)
    y: npt.NDArray[np.int64] = np.arange(20) % 2
    folder = tmp_path / "sites"
    write_client(folder, "ward-a", x, y)
    if fault == "nan":
        x = x.copy()
        x[3, 2] = np.nan
    if fault == "negative label":
        y = y.copy()
        y[5] = -1
    kept = {"empty client": 0, "one example": 1}.get(fault, len(y))
    x, y = x[:kept], y[:kept]
    write_client(folder, "ward-b", x, y)
    if fault == "truncated file":
        path = folder / "ward-b.npz"
        path.write_bytes(path.read_bytes()[:100])
    outcome = lrbpfl("run", "--set", f"data.dataset={folder}", "--set", "federation.cohort=1")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in words), outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]


def test_a_truncated_data_file_is_named(lrbpfl: Lrbpfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBPFL_DATA", str(tmp_path))
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(b"too short")
    outcome = lrbpfl("run", "--set", "data.dataset=cifar100")
    assert outcome.code == 2
    assert "train.bin" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_directory_that_exists_is_left_alone(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    for command in ("run", "compare"):
        outcome = lrbpfl(command, *TINY, "--out", "mine")
        assert outcome.code == 2
        assert "mine" in outcome.err
        assert "resume" in outcome.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_written_is_told(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    outcome = lrbpfl("run", *TINY, "--out", "file/run")
    assert outcome.code == 2
    assert "file/run" in outcome.err


def test_resume_of_something_else_is_told(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    assert "no run directory" in lrbpfl("resume", "nowhere").err
    (tmp_path / "empty").mkdir()
    assert lrbpfl("resume", "empty").code == 2


def test_resume_under_another_configuration_is_refused(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    assert lrbpfl("run", *TINY, "--out", "first").code == 0
    (tmp_path / "first" / "summary.json").unlink()
    config = tmp_path / "first" / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    outcome = lrbpfl("resume", "first")
    assert outcome.code == 2
    assert "another configuration" in outcome.err


def test_comparisons_check_names_first(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    assert "fedavgg" in lrbpfl("compare", "--algorithms", "lr-bpfl,fedavgg").err
    assert "twice" in lrbpfl("compare", "--algorithms", "fedavg,fedavg").err
    assert "per-fed" in lrbpfl("compare", "--set", "algorithm.per-fed.lr=0.1").err
    assert list(tmp_path.iterdir()) == []
