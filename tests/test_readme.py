"""What the README shows must run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    ran = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()[-4:]]
    assert sorted(name for name, _, _ in rows) == ["east", "north", "south", "west"]
    assert sum(float(accuracy) for _, accuracy, _ in rows) / 4 > 0.6  # three classes: a guess has a third
    assert {"north.safetensors", "new.safetensors", "page.html"} <= {file.name for file in tmp_path.iterdir()}


def test_every_command_is_in_its_table() -> None:
    from lrbpfl.cli.main import app

    named = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    named |= {str(group.name) for group in app.registered_groups}
    assert named == set(re.findall(r"^\| `lrbpfl (\w+)", README.read_text(), re.MULTILINE))


def test_every_key_of_a_configuration_is_in_its_table() -> None:
    from lrbpfl.experiments.config import SECTIONS

    for section, model in SECTIONS.items():
        (row,) = re.findall(rf"^\| `{section}` \| (.*) \|$", README.read_text(), re.MULTILINE)
        assert set(model.model_fields) <= set(re.findall(r"`(\w+)`", row))
