"""Input that was made to break something: one sentence, exit code 2, nothing written."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Lrbpfl

SMALL = ("-q", "-a", "local", "-s", "data.dataset=digits", "-s", "federation.rounds=1", "-s", "engine.kind=serial")
LONG, DEEP, DIGITS = "x" * 5000, "[" * 3000 + "]" * 3000, "9" * 5000
CASES = {
    "no algorithm": (["compare", "-a", ","], "no algorithm"),
    "a value for a section": (["compare", "-a", "local", "-s", "algorithm.local=3"], "algorithm.local is a section"),
    "a value for all algorithms": (["compare", "-c", "text.toml"], "algorithm is a section"),
    "the same in a run": (["run", "-a", "local", "-c", "text.toml"], "algorithm is a section"),
    "the same in a study": (["tune", "-a", "local", "-c", "text.toml"], "algorithm is a section"),
    "markup in a study": (["tune", *SMALL, "--vary", "data.dataset=[/red]"], "[/red] is not there"),
    "a study into no directory": (["tune", *SMALL, "-o", "/dev/null"], "/dev/null is no directory"),
    "a study where nothing can be": (["tune", *SMALL, "-o", "/proc/x"], "/proc/x cannot be created"),
    "a study of no data": (["tune", "-s", "data.dataset=nothing"], "unknown dataset 'nothing'"),
    "a study on no device": (["tune", "-s", "engine.device=gpu7"], "'gpu7'"),
    "one bad value of a study": (["tune", *SMALL, "--vary", "federation.cohort=2,500"], "federation.cohort = 500"),
    "nobody's home": (["run", "-s", "data.dataset=~nobody1/x"], "~nobody1/x"),
    "a long path": (["run", "-s", f"data.dataset=/{LONG}"], "too long"),
    "a long report": (["report", LONG], "too long"),
    "a long card": (["card", LONG], "too long"),
    "a long resume": (["resume", LONG], "too long"),
    "a long directory of models": (["serve", LONG], "too long"),
    "a long value": (["run", "-s", f"federation.rounds={LONG}"], "valid integer"),
    "a long key": (["run", "-s", f"federation.{LONG}=3"], "known: rounds"),
    "deep TOML": (["run", "-c", "deep.toml"], "deep.toml"),
    "a deep value": (["run", "-s", f"data.clients={DEEP}"], "too deeply"),
    "digits in TOML": (["run", "-c", "digits.toml"], "digits.toml"),
    "digits": (["run", "-s", f"federation.rounds={DIGITS}"], "federation.rounds"),
    "digits in another base": (["run", "-s", f"federation.rounds=0x{'f' * 5000}"], "federation.rounds"),
    "steps without end": (["run", "-a", "fedbe", "-s", f"algorithm.distil_epochs={DIGITS[:26]}"], "65536"),
    "a rate beyond float32": (["run", "-s", "algorithm.mask_lr=1e308"], "algorithm.mask_lr"),
    "control characters": (["run", "-s", "data.dataset=\x1b[31mred\x07"], "unknown dataset"),
    "bytes that are no text": (["run", "-s", "data.dataset=\udcff"], "TOML"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sentence_is_all(case: str, lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    (tmp_path / "text.toml").write_text("algorithm = 'x'\n")
    (tmp_path / "deep.toml").write_text(f"x = {DEEP}\n")
    (tmp_path / "digits.toml").write_text(f"[federation]\nrounds = {DIGITS}\n")
    before = sorted(tmp_path.rglob("*"))
    arguments, words = CASES[case]
    outcome = lrbpfl(*arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
    assert len(outcome.err) < 600
    assert not any(sign < " " for sign in outcome.err[:-1])
    assert sorted(tmp_path.rglob("*")) == before


def site(folder: Path, name: str, features: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", x=np.zeros((4, features), np.uint8), y=np.arange(4) % 2)


def test_a_network_that_no_machine_holds_is_not_made(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    site(tmp_path / "sites", "a", features=2_000_000)
    outcome = lrbpfl("run", "-s", "data.dataset=sites")
    assert outcome.code == 2
    assert "256,008,514 parameters" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]


def test_a_pipe_is_not_waited_for(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    site(tmp_path / "sites", "a")
    os.mkfifo(tmp_path / "sites" / "classes.txt")
    outcome = lrbpfl("run", "-s", "data.dataset=sites")
    assert outcome.code == 2
    assert "classes.txt" in outcome.err


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_a_link_that_leads_nowhere_loses_no_client_in_silence(suffix: str, lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    site(tmp_path / "sites", "a")
    (tmp_path / "sites" / f"b{suffix}").symlink_to(tmp_path / "gone")
    outcome = lrbpfl("run", "-s", "data.dataset=sites")
    assert outcome.code == 2
    assert f"b{suffix} is a link that leads nowhere" in outcome.err


def test_names_are_shown_as_they_are(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    rows = "\n".join(f"{name},{i % 2},{i}" for name in ("[/red]", "[bold]b") for i in range(6))
    (tmp_path / "t.csv").write_text(f"client,label,f\n{rows}\n")
    outcome = lrbpfl("partition", "-s", "data.dataset=t.csv")
    assert outcome.code == 0
    assert "[/red]" in outcome.out
    assert "[bold]b" in outcome.out
