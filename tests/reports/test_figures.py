"""The figures as files."""

from pathlib import Path

import pytest

from lrbpfl.reports.collect import collect
from lrbpfl.reports.figures import draw
from tests.reports.conftest import write_run


def test_every_figure_comes_as_png_and_svg(tmp_path: Path) -> None:
    masked = write_run(tmp_path / "one", algorithm="lr-bpfl", layers=["fc.weight"], names=3 * [r"$\nothing$"])
    files = dict(draw(collect([masked, write_run(tmp_path / "two")])))
    stems = ("learning", "reliability", "accuracy-ece", "ranks")
    assert set(files) == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    for name, data in files.items():
        assert data.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in data
    assert b"lr-bpfl: worst client" in files["reliability.svg"]


def test_the_same_runs_give_the_same_files(tmp_path: Path) -> None:
    results = collect([write_run(tmp_path / "run")])
    assert dict(draw(results)) == dict(draw(results))


@pytest.mark.parametrize(("gone", "left"), [("predictions.safetensors", "learning"), ("metrics.jsonl", "reliability")])
def test_a_figure_without_numbers_is_left_out(tmp_path: Path, gone: str, left: str) -> None:
    path = write_run(tmp_path / "run")
    (path / gone).unlink()
    assert {Path(name).stem for name, _ in draw(collect([path]))} == {left}
