"""Commands that pages show run as they stand, but for the data and the number of rounds."""

import pytest

from tests.cli.conftest import DIGITS, Lrbpfl
from tests.test_docs import PAGES, commands

ELSEWHERE = ("ray", "path/to/sites.csv")  # a cluster, a file of yours
WHOLE = ("README.md", "index.md")  # which test_docs runs whole
CALLS = [
    words
    for page in PAGES
    if page.name not in WHOLE
    for words in commands(page)
    if words[0] in ("run", "compare", "tune")
    and {"-s", "--set", "--vary"} & set(words)
    and not any(part in word for word in words for part in ELSEWHERE)
]


def test_there_are_some() -> None:
    assert {words[0] for words in CALLS} == {"run", "compare", "tune"}


@pytest.mark.parametrize("words", CALLS, ids=lambda words: " ".join(words)[:60])
def test_a_command_of_a_page_runs(words: list[str], lrbpfl: Lrbpfl) -> None:
    quickly = ("--set", "federation.rounds=1", "--set", "engine.kind=serial")
    ended = lrbpfl(*words, *DIGITS, *quickly)
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
