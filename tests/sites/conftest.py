"""Three sites with the data of some speakers each."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lrbpfl import data
from lrbpfl.sites.job import write

FEATURES = [f"f{i}" for i in range(10)]


def speakers() -> list[list[str]]:
    """The rows of the speakers' file, without what is no feature: speaker, f0 ... f9, vowel."""
    with (Path(data.__file__).parent / "speakers.csv").open() as file:
        return [[row["speaker"], *(row[f] for f in FEATURES), row["vowel"]] for row in csv.DictReader(file)]


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Path]:
    """Folders of three sites, two speakers each."""
    rows = speakers()
    names = sorted({row[0] for row in rows}, key=int)[:6]
    roots = {}
    for i in range(3):
        root = roots[f"site-{i + 1}"] = tmp_path / f"site-{i + 1}"
        root.mkdir()
        with (root / "own.csv").open("w") as file:
            writer = csv.writer(file)
            writer.writerow(["speaker", *FEATURES, "vowel"])
            writer.writerows(row for row in rows if row[0] in names[2 * i : 2 * i + 2])
        (root / "site.toml").write_text('data = "own.csv"\nclient_column = "speaker"\nlabel_column = "vowel"\n')
    return roots


@pytest.fixture
def job() -> Callable[..., dict[str, Any]]:
    """A job on the speakers; tables may be changed."""
    vowels = sorted({row[-1] for row in speakers()})

    def make(algorithm: str = "lr-bpfl", about: dict[str, Any] | None = None, **federation: Any) -> dict[str, Any]:
        tables = {
            "algorithm": {"name": algorithm},
            "federation": {"rounds": 3, "cohort": 4, "evaluate_every": 2, **federation},
        }
        said = {"classes": vowels, "features": FEATURES, "names": ["site-1", "site-2", "site-3"], **(about or {})}
        return write("test", tables, said)

    return make
