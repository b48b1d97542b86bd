import tomllib
from pathlib import Path
from typing import Any

import pytest

from lrbpfl.errors import BadInput
from lrbpfl.sites.flare import project


def tables() -> dict[str, Any]:
    text = project.TEXT.format(
        name="p", host="hub.org", port=1, admin_port=2, sites=project.SITE.format(site="a", organisation="a")
    )
    return tomllib.loads(text)


def test_what_init_writes_is_read_back(tmp_path: Path) -> None:
    project.create(tmp_path, "p", "hub.org", ["a", "b-1"], 1, 2)
    found = project.read(tmp_path)
    assert [site.name for site in found.sites] == ["a", "b-1"] and found.admins[0].role == "project_admin"
    assert (found.host, found.port, found.admin_port) == ("hub.org", 1, 2)
    with pytest.raises(BadInput, match="is there already"):
        project.create(tmp_path, "p", "hub.org", ["a"], 1, 2)


@pytest.mark.parametrize("site", ["", "../a", "a b", "-a", 'a"\nname = "b', "server", "hub.org", "a" * 64])
def test_a_name_that_cannot_be_a_folder_and_a_certificate_leaves_nothing(tmp_path: Path, site: str) -> None:
    with pytest.raises(BadInput):
        project.create(tmp_path / "new", "p", "hub.org", [site], 1, 2)
    assert not (tmp_path / "new" / project.FILE).exists()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("server.port", 0, "a port is a number from 1 to 65535"),
        ("server.port", True, "a port is a number"),
        ("server.admin_port", 1, "are both 1"),
        ("server.host", "hub.org/x", "a host name"),
        ("sites", [], "at least one"),
        ("sites", [{"name": "a", "organisation": "x"}, {"name": "A", "organisation": "x"}], "given twice"),
        ("sites", [{"name": "a"}], "has no organisation"),
        ("sites", [{"name": "a", "organisation": "x", "port": 3}], "port"),
        ("admins", [{"name": "a@b.org", "organisation": "x", "role": "root"}], "role"),
        ("admins", [{"name": "a", "organisation": "x", "role": "lead"}], "e-mail"),
    ],
)
def test_a_wrong_value_is_named(path: str, value: object, words: str) -> None:
    wrong = tables()
    *folders, key = path.split(".")
    table = wrong[folders[0]] if folders else wrong
    table[key] = value
    with pytest.raises(BadInput, match=words):
        project.parse(wrong)
