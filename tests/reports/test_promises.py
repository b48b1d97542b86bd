"""What the page and the tables say about promises, from runs as the runner writes them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lrbpfl.experiments.build import build_setup
from lrbpfl.experiments.config import parse
from lrbpfl.experiments.runner import Progress, start
from lrbpfl.metrics.conformal import Promise, chance
from lrbpfl.reports.collect import collect
from lrbpfl.reports.figures import draw
from lrbpfl.reports.page import render
from lrbpfl.reports.promises import sections
from lrbpfl.reports.tables import promises_table, summary_table
from lrbpfl.rng import numpy_generator
from tests.reports.conftest import Open, write_run

SIZES = {"anna": 120, "bert <b>": 60, "carl": 16, "dora": 90, "emil": 90}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clients of one task; carl has too few examples, and dora calls the classes of her test data differently."""
    folder = tmp_path_factory.mktemp("promised")
    (folder / "data").mkdir()
    for name, size in SIZES.items():
        rng = numpy_generator(0, name)
        y = rng.integers(3, size=size)
        np.savez(folder / "data" / f"{name}.npz", x=rng.normal(size=(size, 6)) + 2 * y[:, None], y=np.append(y[:-1], 2))
    config = parse(
        {
            "data": {"dataset": str(folder / "data"), "train_fraction": 0.6, "calibration_fraction": 0.3},
            "federation": {"rounds": 2, "cohort": 3, "model": "mlp", "coverage": 0.9},
            "engine": {"kind": "serial"},
            "algorithm": {"name": "fedavg"},
        }
    )
    setup = build_setup(config)
    wrong = setup.clients[3].test._replace(y=(setup.clients[3].test.y + 1) % 3)
    clients = tuple(c._replace(test=wrong) if c.name == "dora" else c for c in setup.clients)
    start(config, folder / "run", setup._replace(clients=clients), Progress())
    return folder / "run"


def test_every_client_stands_beside_what_chance_allows(run: Path) -> None:
    (section,) = sections(collect([run]))
    assert [name for name, _ in section.without] == ["carl"] and "needs 9" in section.without[0][1]
    assert {row.name for row in section.rows} == SIZES.keys() - {"carl"}
    assert section.worst is not None and section.worst.name == "dora"
    assert [row.name for row in section.below] == ["dora"]
    for row in section.rows:
        assert (row.low, row.high) == chance(Promise(0.9, None, 0.0, row.fitted), row.tested)
        assert row.tested == round(0.4 * SIZES[row.name])
    assert collect([run])[0].events == []


def test_a_client_at_the_end_of_its_range_is_not_below_it(run: Path) -> None:
    """Scores come with six digits, and a third has more."""
    (result,) = collect([run])
    low, _ = chance(Promise(0.9, None, 0.0, 9), 30)
    assert low == 19 / 30 and float(f"{low:.6g}") < low
    scores = {
        **result.clients[0]["scores"],
        "coverage": float(f"{low:.6g}"),
        "examples": 30.0,
        "calibration_examples": 9.0,
    }
    one = result._replace(clients=[{**result.clients[0], "scores": scores}])
    (section,) = sections([one])
    assert section.rows[0].coverage == low and not section.below


def test_the_page_names_the_worst_client_and_draws_all(run: Path, opened: Open, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render(collect([run, write_run(tmp_path / "plain")])), encoding="utf-8")
    page = opened(tmp_path / "page.html")
    section = page.locator("#promises")
    text = section.inner_text()
    assert "The worst client, dora, covers" in text and "1 of 4 clients lies below its range" in text
    assert section.locator("svg").count() == 1 and section.locator("svg title").count() == 8
    assert "1 clients without a promise" not in text and "1 client without a promise" in text
    scores = json.loads((run / "summary.json").read_text())["fedavg"]
    assert f"{100 * scores['coverage_worst']:.2f}" in section.locator("tbody").inner_text()
    section.locator("svg .clickable").first.click()
    assert page.locator("#pick-client option:checked").inner_text() == "dora"
    page.locator("#pick-run").select_option("0")
    assert page.get_by_role("columnheader", name="set size").count() == 1


def test_a_page_without_promises_has_no_such_section(tmp_path: Path) -> None:
    page = render(collect([write_run(tmp_path / "plain")]))
    assert 'id="promises"' not in page and "beta-binomial" not in page


def test_coverage_is_a_figure_where_there_are_promises(run: Path, tmp_path: Path) -> None:
    files = dict(draw(collect([run, write_run(tmp_path / "plain")]), only="promises"))
    assert set(files) == {"promises.png", "promises.svg"}
    assert b"fedavg (run): 90 % promised" in files["promises.svg"] and b"(plain): " not in files["promises.svg"]


def test_the_terminal_shows_promises_in_a_table_of_their_own(run: Path) -> None:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    s = summary["fedavg"]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(promises_table(summary), summary_table(summary))
    row = next(line for line in capture.get().splitlines() if "fedavg" in line)
    shares = [f"{100 * s[key]:.2f}" for key in ("coverage", "coverage_worst")]
    sizes = [f"{s[key]:.2f}" for key in ("set_size", "set_size_worst")]
    assert row.split() == ["fedavg", "training", "4", "of", "5", *shares, *sizes]
    assert "coverage 0.9 promised on average" in capture.get() and "needs 9 calibration examples" in capture.get()
    assert promises_table({"fedavg": {"accuracy": 0.5}}) is None
    sure = promises_table({"fedavg": {**s, "confidence": 0.95, "new": {"0.1": {"promises": 0, "clients": 2.0}}}})
    with console.capture() as capture:
        console.print(sure)
    assert "with confidence 0.95" in capture.get() and "needs 29" in capture.get()
    assert ["fedavg", "new,", "0.1", "0", "of", "2", "-", "-", "-", "-"] in map(str.split, capture.get().splitlines())
