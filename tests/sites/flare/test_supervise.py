"""What a supervised run waits for, without a server."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from lrbpfl.errors import BadInput
from lrbpfl.sites.flare import supervise
from lrbpfl.sites.flare.admin import Admin, Gone


class Answers(Admin):
    """Says who is connected, once for each question; the last answer stays."""

    def __init__(self, *answers: set[str] | Exception) -> None:
        self.answers = list(answers)

    def sites(self) -> dict[str, set[str]]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {site: set() for site in answer}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Time that only sleeping spends."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return lambda: now[0]


JOB: dict[str, Any] = {"run": "r", "sites": ["a", "b", "c"], "minimum": 2}


def test_too_few_sites_are_told_by_name_after_a_deadline(clock: Callable[[], float]) -> None:
    told: list[str] = []
    with pytest.raises(BadInput, match=r"after 30 seconds 1 of the run's sites are connected \(b\), and it needs 2"):
        supervise.gather(Answers({"b", "stranger"}), JOB, set("abc"), told.append, 30.0, 15.0)
    assert told == ["waiting for sites for up to 30 seconds: connected are b, not a, c"] and 30 < clock() < 35


def test_enough_sites_wait_a_little_for_the_others_and_no_longer(clock: Callable[[], float]) -> None:
    told: list[str] = []
    assert supervise.gather(Answers({"a", "b"}), JOB, set("abc"), told.append, 60.0, 15.0) == {"a", "b"}
    assert 15 <= clock() < 20 and told[-1] == "going on without c: not connected"
    before = clock()
    assert supervise.gather(Answers({"a"}, {"a", "b", "c"}), JOB, set("abc"), print, 60.0, 15.0) == {"a", "b", "c"}
    assert clock() - before <= 2 * supervise.POLL


def test_a_server_that_is_away_is_asked_again_and_not_for_ever(clock: Callable[[], float]) -> None:
    told: list[str] = []
    back = Answers(Gone("there is no server"), {"a", "b", "c"})
    assert supervise.gather(back, JOB, set("abc"), told.append, 60.0, 15.0) == {"a", "b", "c"}
    assert told == ["there is no server; asking again for up to 60 seconds"]
    with pytest.raises(BadInput, match="there is no server; after 60 seconds we stop asking"):
        supervise.gather(Answers(Gone("there is no server")), JOB, set("abc"), told.append, 60.0, 15.0)
