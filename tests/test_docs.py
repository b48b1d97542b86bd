"""What the pages show must run: Python as it stands, commands and keys as the command line reads them."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from lrbpfl.cli.main import app
from lrbpfl.experiments.config import SECTIONS, make_algorithm
from lrbpfl.sites.holdings import SiteSection
from lrbpfl.sites.job import parse, write

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def fenced(page: Path, kinds: tuple[str, ...]) -> list[str]:
    """The blocks of these languages, without the indentation of a list."""
    found = FENCE.findall(page.read_text())
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, kind, text in found if kind in kinds]


def commands(page: Path) -> list[list[str]]:
    """Every call of `lrbpfl`, in blocks and in sentences, as words."""
    blocks = fenced(page, ("", "bash"))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    said = re.findall(r"`(lrbpfl [^`]+)`", FENCE.sub("", page.read_text()))
    calls = [line.strip() for line in lines if line.strip().startswith("lrbpfl ")] + [" ".join(s.split()) for s in said]
    return [shlex.split(call, comments=True)[1:] for call in calls]


def read(words: list[str]) -> dict[str, Any]:
    """The options as the command line reads them; a mention may leave out what is required, and invent nothing."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    parser = command.make_parser(command.context_class(command))
    options, rest, _ = parser.parse_args(args=list(words))
    assert not rest, f"{words} has too many words"
    return dict(options)


def unknown(words: list[str]) -> list[str]:
    """Settings that name no key of a section and no field of the algorithm they are about."""
    options = read(words)
    settings = [text.split("=")[0].split(".") for text in options.get("settings") or []]
    settings += [text.split("=")[0].split(".") for many in options.get("vary") or [] for text in many.split("; ")]
    return [".".join(path) for path in settings if path[-1] not in known(path, options.get("algorithm") or "lr-bpfl")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_key_of_a_page_is_one(page: Path) -> None:
    assert [key for words in commands(page) for key in unknown(words)] == []


@pytest.mark.parametrize("call", ["runn", "run --rouns 3", "card one two", "paper lists"])
def test_a_command_that_is_none_is_found(call: str) -> None:
    with pytest.raises(Exception, match=r"no command|No such option|too many"):
        read(call.split())


def test_a_key_that_is_none_is_found() -> None:
    call = "tune -a fedavg -s data.clients=3 -s federation.round=3 -s algorithm.ranks=2 --vary algorithm.lrr=1"
    assert unknown(call.split()) == ["federation.round", "algorithm.ranks", "algorithm.lrr"]


def known(path: list[str], algorithm: str) -> set[str]:
    """The keys of a section, or the fields of the algorithm."""
    if path[0] != "algorithm":
        return set(SECTIONS[path[0]].model_fields)
    name = path[1] if len(path) == 3 else algorithm
    return {"name", *vars(make_algorithm(name, {}))}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    for number, code in enumerate(fenced(page, ("python",))):
        (tmp_path / f"{number}.py").write_text(code)
        ran = subprocess.run(
            [sys.executable, f"{number}.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{page.name}: {ran.stderr[-2000:]}"


def test_the_settings_of_sites_are_settings() -> None:
    told = [tomllib.loads(block) for block in fenced(ROOT / "docs" / "sites.md", ("toml",))]
    jobs = [tables for tables in told if "sites" in tables]
    assert len(jobs) == 1 and len(told) == 2
    for tables in told:
        if "sites" in tables:
            about = tables.pop("sites")
            assert parse(write("study", tables, about)).config.federation.rounds == 50
        else:
            assert SiteSection(**tables).client_column == "ward"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_commands_run_as_they_stand(page: str, tmp_path: Path) -> None:
    first = [block for block in fenced(ROOT / page, ("",)) if block.startswith("lrbpfl compare")]
    assert len(first) == 1
    for line in first[0].splitlines():
        words = [sys.executable, "-m", *shlex.split(line)]
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(tmp_path.glob("runs/*/report.html"))


def test_the_site_builds_and_asks_nothing_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mkdocs", "mkdocstrings", "material"):
        pytest.importorskip(name)
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\W?(https?:[^\" >]+)|<link[^>]+stylesheet[^>]+(https?:[^\" >]+)"
    )
    assert {page.name: found for page in pages if (found := loads.findall(page.read_text()))} == {}
