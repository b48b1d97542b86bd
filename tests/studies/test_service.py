"""The benchmark of serving: both of its ways must give the same answers, or it compares nothing."""

import pytest

from lrbpfl.serving.answers import answers
from lrbpfl.serving.shelf import side_by_side
from lrbpfl.studies import service


def test_both_ways_give_the_same_answers() -> None:
    models = side_by_side(service.personal_files(3))
    request = service._request(0, list(models))
    mixed = answers(models, request)
    apart = [service._alone(models, row) for row in request]
    assert len({tuple(one.probability.values()) for one in mixed}) == len(models)
    for one, other in zip(mixed, apart, strict=True):
        assert list(one.probability.values()) == pytest.approx(other.probability[0].tolist(), abs=1e-5)


def test_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CLIENTS", 3), ("ROWS", 2), ("SECONDS", 0.05)):
        monkeypatch.setattr(service, name, value)
    monkeypatch.setattr(service, "memory", lambda: {"resident_bytes": 1.0})
    found = service.measure()
    assert found["resident_bytes"] == 1.0
    assert found["mixed_over_apart"] == pytest.approx(
        found["mixed_requests_per_second"] / found["apart_requests_per_second"]
    )
    assert all(found[f"{way}_p99_seconds"] * found[f"{way}_requests_per_second"] >= 0.5 for way in ("mixed", "apart"))
