"""What the README shows must run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks import said_by

ROOT = Path(__file__).parents[1]
README, CONFIGURATION = ROOT / "README.md", ROOT / "docs" / "configuration.md"


def example() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return str(found)


def test_the_python_example_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example())
    ran = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    check(ran.stdout, tmp_path)


def test_the_python_example_runs_in_a_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(part) for part in example().split("\n\n")]
    check(said_by(nbformat.v4.new_notebook(cells=cells), tmp_path), tmp_path)


def check(said: str, folder: Path) -> None:
    """What the example leaves behind."""
    rows = [line.split() for line in said.splitlines()[-4:]]
    assert sorted(name for name, _, _ in rows) == ["east", "north", "south", "west"]
    assert sum(float(accuracy) for _, accuracy, _ in rows) / 4 > 0.6  # three classes: a guess has a third
    assert {"north.safetensors", "new.safetensors", "page.html"} <= {file.name for file in folder.iterdir()}


def test_every_command_is_in_its_table() -> None:
    from lrbpfl.cli.main import app

    named = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named |= {str(group.name) for group in app.registered_groups}
    assert named == set(re.findall(r"^\| `lrbpfl (\w+)", README.read_text(), re.MULTILINE))


def test_every_key_of_a_configuration_is_in_its_table() -> None:
    from lrbpfl.experiments.config import SECTIONS

    for section, model in SECTIONS.items():
        (row,) = re.findall(rf"^\| `{section}` \| (.*) \|$", CONFIGURATION.read_text(), re.MULTILINE)
        assert set(model.model_fields) <= set(re.findall(r"`(\w+)`", row))
