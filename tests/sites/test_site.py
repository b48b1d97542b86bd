"""What a site answers, and what it refuses to."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lrbpfl
from lrbpfl.engines.serial import Serial
from lrbpfl.sites.holdings import hold, settings_of
from lrbpfl.sites.hub import lead
from lrbpfl.sites.job import parse
from lrbpfl.sites.site import Site
from tests.sites.post import Post, copied

Making = Callable[..., dict[str, Any]]


@pytest.fixture
def letter(job: Making, sites: dict[str, Path], tmp_path: Path) -> tuple[dict[str, Any], Path, dict[str, Any]]:
    """A job, the folder of site 1, and the letter that it got in round 0 of a run elsewhere."""
    asked = job(cohort=6)
    post = Post(sites, asked)
    lead(post, tmp_path, asked, lambda: False)
    post.end()
    (first,) = [found for what, site, way, found in post.letters if (what, site, way) == ("update", "site-1", "there")][
        :1
    ]
    return asked, sites["site-1"], first


def opened(asked: dict[str, Any], root: Path, leg: int) -> Site:
    """The site, after the opening letters of a leg."""
    site = Site("site-1", root, asked, Serial)
    stamp = {"run": asked["run"], "leg": leg}
    assert site.answer("open", stamp) == {**stamp, "clients": ["0", "1"]}
    assert site.answer("open", {**stamp, "of": 6, "rounds": 0, "ids": {"0": 0, "1": 1}}) == stamp
    return site


def test_old_letters_are_refused(letter: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    asked, root, first = letter
    again = Site("site-1", root, asked, Serial)
    assert again.answer("open", {"run": asked["run"], "leg": 1})["error"] == "replay"  # the leg is over
    again.end()
    site = opened(asked, root, leg=2)
    assert site.answer("update", copied(first))["error"] == "replay"  # of the leg before
    fresh = {**copied(first), "leg": 2}
    assert "error" not in site.answer("update", fresh)
    assert site.answer("update", copied(fresh))["error"] == "replay"  # twice
    assert site.answer("update", {**copied(fresh), "run": "other"})["error"] == "replay"
    site.end()


SPOILS: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda letter: letter["common"].popitem(),
    lambda letter: letter["common"].update(extra=torch.zeros(1)),
    lambda letter: letter["common"].update({key: leaf.double() for key, leaf in letter["common"].items()}),
    lambda letter: letter["common"].update({key: leaf * torch.nan for key, leaf in letter["common"].items()}),
    lambda letter: letter["common"].update({key: leaf.to_sparse() for key, leaf in letter["common"].items()}),
    lambda letter: letter.update(counted={**letter["counted"], "4": {"now": 0, "earlier": 0}}),
    lambda letter: letter["counted"]["0"].update(now=-1),
    lambda letter: letter.update(t=True),
    lambda letter: letter.update(t=99),
    lambda letter: letter.update(own=[]),
)


def test_letters_that_are_not_in_order_are_refused(letter: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    asked, root, first = letter
    for leg, spoil in enumerate(SPOILS, 2):
        site = opened(asked, root, leg)
        bad = {**copied(first), "leg": leg}
        spoil(bad)
        assert site.answer("update", bad) == {"error": "letter", "type": "Refused"}, leg
        site.end()


def test_a_missing_state_is_told_and_nothing_is_made_up(letter: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    asked, root, first = letter
    site = opened(asked, root, leg=2)
    lost = {**copied(first), "leg": 2, "counted": {"0": {"now": 2, "earlier": 2}, "1": {"now": 0, "earlier": 0}}}
    for file in (root / "store" / asked["run"] / "clients" / "00000").glob("state-*"):
        file.unlink()
    assert site.answer("update", lost)["error"] == "state"
    site.end()


def test_more_steps_than_allowed_are_refused(job: Making, sites: dict[str, Path]) -> None:
    with (sites["site-1"] / "site.toml").open("a") as file:
        file.write("steps = 1\n")
    asked = job()
    site = Site("site-1", sites["site-1"], asked, Serial)
    assert site.answer("open", {"run": asked["run"], "leg": 1})["error"] == "steps"
    site.end()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("vowel", "word"), "data"),
        (("f3", "g3"), "columns"),
        (("hid", "hidden"), "classes"),
    ],
)
def test_other_data_than_the_job_names_are_refused(
    job: Making, sites: dict[str, Path], change: tuple[str, str], code: str
) -> None:
    file = sites["site-1"] / "own.csv"
    file.write_text(file.read_text().replace(*change))
    asked = job()
    site = Site("site-1", sites["site-1"], asked, Serial)
    assert site.answer("open", {"run": asked["run"], "leg": 1})["error"] == code
    site.end()


def test_a_site_is_one_client_where_its_data_tell_none_apart(
    job: Making, sites: dict[str, Path], tmp_path: Path
) -> None:
    root, asked = sites["site-1"], job(cohort=1)
    table = [line.split(",") for line in (root / "own.csv").read_text().splitlines()]
    with (root / "one.csv").open("w") as file:  # its columns in another order, and one more
        file.writelines(",".join([*reversed(row[1:]), "7" if i else "ward"]) + "\n" for i, row in enumerate(table))
    x, y = np.array([row[1:-1] for row in table[1:]], np.float32), np.array([row[-1] for row in table[1:]])
    np.savez(root / "one.npz", x=x, y=y)
    found = []
    for data in ("one.csv", "one.npz"):
        label = 'label_column = "vowel"\n' if data.endswith("csv") else ""
        (root / "site.toml").write_text(f'data = "{data}"\n{label}')
        settings, folder = settings_of(root)
        holding = hold("north", parse(asked), settings, folder)
        assert list(holding.rows) == ["north"]
        found.append(holding.dataset)
    assert torch.equal(found[0].x, found[1].x) and torch.equal(found[0].y, found[1].y)
    assert found[0].x.shape == (len(table) - 1, 10)


def test_tokens_are_tokens(job: Making, sites: dict[str, Path]) -> None:
    root = sites["site-1"]
    np.savez(root / "text.npz", x=np.arange(12).reshape(4, 3), y=np.array(["hid", "had", "hid", "had"]))
    (root / "site.toml").write_text('data = "text.npz"\n')
    asked = parse(job(about={"features": [], "inputs": [3], "kind": "tokens"}))
    assert hold("north", asked, *settings_of(root)).dataset.x.dtype == torch.int64


def test_data_that_change_during_a_run_are_refused(letter: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    asked, root, _ = letter
    file = root / "own.csv"
    file.write_text(file.read_text().replace("0.418", "0.419"))
    site, stamp = Site("site-1", root, asked, Serial), {"run": asked["run"], "leg": 2}
    assert "error" not in site.answer("open", stamp)
    answer = site.answer("open", {**stamp, "of": 6, "rounds": 0, "ids": {"0": 0, "1": 1}})
    assert answer == {"error": "changed", "type": "Refused"}
    site.end()


def test_what_a_client_raises_leaves_as_a_type(
    letter: tuple[dict[str, Any], Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lrbpfl.algorithms.lr_bpfl import LRBPFL

    def fails(*_: Any) -> Any:
        raise ValueError("patient 17 is 180 cm tall")

    asked, root, first = letter
    site = opened(asked, root, leg=2)
    monkeypatch.setattr(LRBPFL, "client_update", fails)
    answer = site.answer("update", {**copied(first), "leg": 2})
    assert answer["clients"]["0"] == {"error": "training", "type": "ValueError"}
    assert "patient" not in str(answer) and "patient 17" in (root / "store" / "site.log").read_text()
    site.end()


@pytest.mark.parametrize("limit", ["seconds = 0.01", "memory = 0.05"])
def test_work_beyond_a_sites_limits_is_ended(letter: tuple[dict[str, Any], Path, dict[str, Any]], limit: str) -> None:
    if limit.startswith("memory") and sys.platform != "linux":
        pytest.skip("memory is bounded on Linux alone")
    asked, root, first = letter
    with (root / "site.toml").open("a") as file:
        file.write(f"{limit}\n")
    site, stamp = Site("site-1", root, asked), {"run": asked["run"], "leg": 2}  # with the workers that sites have
    site.answer("open", stamp)
    site.answer("open", {**stamp, "of": 6, "rounds": 0, "ids": {"0": 0, "1": 1}})
    answer = site.answer("update", {**copied(first), "leg": 2})
    site.end()
    assert answer["clients"] == {k: {"error": "training", "type": "Failure"} for k in ("0", "1")}
    assert "its worker" in (root / "store" / "site.log").read_text()


def test_a_site_has_its_models_at_the_end(letter: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    asked, root, _ = letter
    model = lrbpfl.load(root / "store" / asked["run"], client="1")
    found = model.predict(np.zeros((3, 10), dtype=np.float32))
    assert found.probability.shape[0] == 3 and np.allclose(found.probability.sum(1), 1, atol=1e-5)
