"""The figures as files."""

import re
from pathlib import Path

import pytest

from lrbpfl.reports.collect import collect
from lrbpfl.reports.figures import COLOURS, draw
from tests.reports.conftest import write_run

ARMS: dict[str, tuple[float, ...]] = {"fedavg": (0.1, 1.0), "local": (0.5, 1.0), "fedbe": ()}


def test_every_figure_comes_as_png_and_svg(tmp_path: Path) -> None:
    names = 5 * [r"$\nothing$"]
    masked = write_run(tmp_path / "one", algorithm="lr-bpfl", layers=["fc.weight"], names=names, new=(0.25,))
    files = dict(draw(collect([masked, write_run(tmp_path / "two")])))
    stems = ("learning", "reliability", "accuracy-ece", "new-clients", "ranks")
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


def test_new_clients_are_drawn_over_all_alphas_beside_those_that_trained(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, algorithm=name, new=new) for name, new in ARMS.items()]
    svg = dict(draw(collect(runs)))["new-clients.svg"].decode()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    left = words[: words.index("alpha")]
    assert left == ["training", "0.1", "0.5", "1"]
    assert {"fedavg", "local"} <= set(words) and "fedbe" not in words


def test_dots_have_a_panel_for_each_kind_of_data_and_one_figure_can_be_drawn_alone(tmp_path: Path) -> None:
    (result,) = collect([write_run(tmp_path / "run")])
    scores = {"nll": 0.25, "ece_pooled_debiased": 0.5}
    one, two = ([result._replace(name=name, scores=scores)] for name in ("fedavg", "local"))
    bare = [result._replace(name="unscored", scores={})]
    files = dict(draw([*one, *two, *bare], {"speakers": one, "digits": [*two, *bare]}, only="nll-ece"))
    assert set(files) == {"nll-ece.png", "nll-ece.svg"}
    words = re.findall(r"<text[^>]*>([^<]*)</text>", files["nll-ece.svg"].decode())
    assert {"speakers", "digits", "fedavg", "local"} <= set(words) and "unscored" not in words


def test_the_scatter_has_a_panel_for_each_kind_of_data_and_shows_every_run_in_its_colour(tmp_path: Path) -> None:
    clean, noisy = (
        [result._replace(name=name, scores={"accuracy": 0.3, "ece_pooled": ece}) for name, ece in eces.items()]
        for result, eces in zip(
            collect([write_run(tmp_path / "clean"), write_run(tmp_path / "noisy")]),
            ({"fedavg": 0.1, "local": 0.2}, {"local": 0.9}),
            strict=True,
        )
    )
    svg = dict(draw([*clean, *noisy], {"as they are": clean, "with noise": noisy}))["accuracy-ece.svg"].decode()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"as they are", "with noise"} <= set(words)
    assert [words.count(name) for name in ("fedavg", "local")] == [1, 1]  # one legend for both
    heights = {float(word) for word in words if re.fullmatch(r"[\d.]+", word)}
    assert max(heights) >= 80  # the axis that the panels share reaches the highest point of the second
    assert svg.count(COLOURS[1]) > svg.count(COLOURS[0])
