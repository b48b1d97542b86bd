"""Every key of every section and algorithm says what it takes and what it means."""

import pytest

from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import SECTIONS, parse
from lrbpfl.experiments.keys import find_keys, meanings
from lrbpfl.sites.holdings import SiteSection
from lrbpfl.sites.job import SitesSection


def test_every_key_has_a_meaning() -> None:
    found = find_keys(further={"sites": SitesSection, "site.toml": SiteSection})
    silent = [key.name for key in found if len(key.meaning) < 3 or not key.takes]
    assert not silent
    assert {key.name.split(".")[0] for key in find_keys()} == {*SECTIONS, "algorithm"}


def test_keys_are_those_that_a_configuration_takes() -> None:
    found = {key.name: key for key in find_keys("data")}
    assert found.keys() == {f"data.{name}" for name in SECTIONS["data"].model_fields}
    assert found["data.alpha"].takes == "number > 0" and found["data.alpha"].default == 0.1
    assert found["data.new_alpha"].takes == "list (number > 0)"
    assert found["data.shift"].takes == "none, features, concept"
    assert found["data.train_fraction"].takes == "number > 0 and < 1"
    config = parse({"algorithm": {"name": "pfedme"}})
    for key in find_keys("algorithm.pfedme"):
        assert getattr(config.algorithm, key.name.split(".")[2]) == key.default


def test_comments_above_and_behind_a_field_are_its_meaning() -> None:
    class Example:
        first: int = 0  # one
        # Two
        # lines.
        second: int = 0

        # Not about a field.

        third: str = "# no comment"  # three
        fourth: int = 0

    assert meanings(Example) == {"first": "one", "second": "Two lines.", "third": "three", "fourth": ""}


def test_one_key_and_an_unknown_one() -> None:
    assert [key.name for key in find_keys("federation.cohort")] == ["federation.cohort"]
    with pytest.raises(BadInput, match=r"'dta'.*did you mean 'data'"):
        find_keys("dta")
