"""The HTTP side: every status, and a sentence with each of them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from lrbpfl.personal.model import PersonalModel, Prediction
from lrbpfl.serving import application as serving
from lrbpfl.serving.answers import Question, _read, answers
from lrbpfl.serving.application import Limits, application
from lrbpfl.serving.shelf import shelf

from .conftest import CLASSES, FEATURES, NAMES, Written, rows

ROW = [0.25] * FEATURES
GOOD = {"client": "south", "inputs": [ROW, ROW]}


@pytest.fixture(scope="module")
def models(written: Written) -> dict[str, PersonalModel]:
    return shelf(written("lr-bpfl")).models


@pytest.fixture(scope="module")
def service(models: dict[str, PersonalModel]) -> TestClient:
    limits = Limits(max_bytes=20_000, max_rows=50)
    return TestClient(application(models, limits=limits), raise_server_exceptions=False)


def test_one_client_and_many_get_the_same_answers(service: TestClient, models: dict[str, PersonalModel]) -> None:
    x = rows(3)
    one = service.post("/predict", json={"client": "east", "inputs": x.tolist()}).json()["predictions"]
    mixed = [{"client": name, "input": row} for row in x.tolist() for name in ("north", "east")]
    many = service.post("/predict", json={"rows": mixed}).json()["predictions"]
    assert [answer["client"] for answer in many] == ["north", "east"] * 3
    expected = models["east"].predict(x)
    for i, answer in enumerate(one):
        assert set(answer) == {"client", "label", "probability", "total", "aleatoric", "epistemic"}
        assert answer["label"] == expected.label[i]
        found = [answer["probability"][name] for name in CLASSES]
        np.testing.assert_allclose(found, expected.probability[i], atol=1e-5)
        assert many[2 * i + 1]["probability"] == pytest.approx(answer["probability"], abs=1e-5)


def test_clients_tell_what_they_take_in(service: TestClient) -> None:
    clients = service.get("/clients").json()["clients"]
    assert [one["name"] for one in clients] == sorted(NAMES)
    layers = {"fc1.weight": 2, "fc2.weight": 2, "fc3.weight": 2}
    assert clients[0] == {
        "name": "east", "algorithm": "lr-bpfl", "classes": list(CLASSES), "rank": layers, "examples": 12,
        "inputs": {"dtype": "float32", "shape": [FEATURES]},
    }  # fmt: skip


def test_a_model_without_masks_has_no_rank(written: Written) -> None:
    service = TestClient(application(shelf(written("fedavg")).models))
    assert [one["rank"] for one in service.get("/clients").json()["clients"]] == [None] * 3


def test_health_page_and_schema(service: TestClient) -> None:
    assert service.get("/health").json() == {"status": "ok", "clients": 3}
    page = service.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")  # nothing from elsewhere
    assert {"/predict", "/clients", "/health"} == set(service.get("/openapi.json").json()["paths"])
    assert service.get("/docs").status_code == 200


def row_with(value: Any, place: int = 1) -> dict[str, Any]:
    """Three rows, of which one holds something odd."""
    inputs: list[Any] = [ROW, ROW, ROW]
    inputs[place] = [*ROW[:-1], value]
    return {"client": "north", "inputs": inputs}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"client": "west", "inputs": [ROW]}, 404, "there is no client 'west'"),
        ({"rows": [{"client": "north", "input": ROW}, {"client": "W", "input": ROW}]}, 404, "row 1: there is no cli"),
        ({"client": "north", "inputs": [ROW, ROW[:-1]]}, 422, "row 1 has the shape (5,), and the model takes (6,)"),
        ({"client": "north", "inputs": [ROW, 3.0]}, 422, "row 1 has the shape ()"),
        ({"client": "north", "inputs": [ROW, [ROW, [1]]]}, 422, "row 1 is no regular array"),
        (row_with(float("nan")), 422, "row 1 holds a number that is not finite"),
        (row_with(float("-inf"), 2), 422, "row 2 holds a number that is not finite"),
        (row_with(1e39), 422, "row 1 holds a number that is not finite, or too large"),
        (row_with(10**400), 422, "row 1 holds a number that is not finite, or too large"),
        ({"client": "north", "inputs": [ROW, [3e38] * FEATURES]}, 422, "row 1: its numbers are so large"),
        (row_with("7"), 422, 'row 1 holds "7", and only numbers are taken'),
        (row_with(True), 422, "row 1 holds true"),
        (row_with(None), 422, "row 1 holds null"),
        (row_with({"x": 1}), 422, "row 1 holds an object"),
        ({"rows": [{"client": "north", "input": ROW, "colour": 1}]}, 422, "row 0, 'colour': extra inputs"),
        ({"rows": [{"client": "north", "input": ROW}, {"input": ROW}]}, 422, "row 1, 'client': field required"),
        ({"client": "north", "rows": [{"client": "north", "input": ROW}]}, 422, "'client': extra inputs are not"),
        ({"client": 7, "inputs": [ROW]}, 422, "'client': input should be a valid string"),
        ({"client": "north", "inputs": []}, 422, "'inputs': list should have at least 1 item"),
        ({"client": "north"}, 422, "'inputs': field required"),
        ([ROW], 422, "the body: input should be a valid dictionary"),
        ({"client": "north", "inputs": [ROW] * 51}, 413, "51 rows were sent, and at most 50 are"),
        ({"client": "north" * 5000, "inputs": [ROW]}, 413, "the body is larger than 20000 bytes"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_in_a_sentence(body: Any, status: int, sentence: str, service: TestClient) -> None:
    reply = service.post("/predict", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (reply.status_code, sentence in reply.json()["detail"]) == (status, True), reply.text
    assert len(reply.json()["detail"]) < 200


@pytest.mark.parametrize(
    "body", [b"{", b"\xff", b"[" * 10_000, b'{"client": "\\ud800", "inputs": [[1]]}', b"1" * 9_000]
)
def test_bodies_that_are_no_proper_json_are_refused(body: bytes, service: TestClient) -> None:
    reply = service.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code in (400, 404, 422)
    assert isinstance(reply.json()["detail"], str)


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [10, 100, 450, 900, 2_000])
def test_what_is_nested_deeply_is_refused(left: str, right: str, depth: int, service: TestClient) -> None:
    body = f'{{"client": "north", "inputs": [{left * depth}1{right * depth}]}}'
    reply = service.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code in (400, 422), reply.text
    assert "row 0 holds" in reply.json()["detail"] or depth > 450


def test_a_long_body_is_refused_whatever_it_says_of_its_length(service: TestClient) -> None:
    reply = service.post("/predict", content=(b" " * 1_000 for _ in range(30)))
    assert reply.status_code == 413


def test_a_failure_says_nothing_of_itself(service: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(models: Mapping[str, PersonalModel], rows: list[Question]) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(serving, "answers", fail)
    reply = service.post("/predict", json=GOOD)
    assert reply.status_code == 500
    assert reply.json() == {"detail": "something went wrong here; the log of the service says what"}


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401), ("Bearer wrong", 401), ("Bearer", 401), ("Basic s3cret", 401), ("Bearer \xe9", 401),
        ("Bearer s3cret ", 200), ("bearer s3cret", 200),
    ],
)  # fmt: skip
def test_a_token_is_asked_for(header: str | None, status: int, models: dict[str, PersonalModel]) -> None:
    service = TestClient(application(models, token="s3cret"))
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    for path in ("/clients", "/openapi.json", "/docs"):
        assert service.get(path, headers=headers).status_code == status
    reply = service.post("/predict", json=GOOD, headers=headers)
    assert reply.status_code == status
    assert (reply.headers.get("www-authenticate") == "Bearer") == (status == 401)
    assert service.get("/health", headers=headers).status_code == service.get("/", headers=headers).status_code == 200


def test_sets_are_told_where_a_model_promises_them(
    models: dict[str, PersonalModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Promised(Prediction):
        promise: Any = "of coverage"
        set: Any = (("no", "yes"), ("no",))

    concluded = PersonalModel.concluded
    monkeypatch.setattr(PersonalModel, "concluded", lambda self, samples: Promised(*concluded(self, samples)[:5]))
    assert [one.set for one in answers(models, [Question("north", ROW)] * 2)] == [["no", "yes"], ["no"]]


def test_several_inputs_come_by_name_or_in_a_list() -> None:
    part = {"dtype": "float32", "shape": [2]}
    named, several = {"named": {"a": part, "b": part}}, {"several": [part, part]}
    found = _read({"b": [3, 4], "a": [1, 2.5]}, named, "row 0")
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1, 2.5], "b": [3, 4]}
    assert [value.tolist() for value in _read([[1, 2], [3, 4]], several, "row 0")] == [[1, 2], [3, 4]]
    for given, described in (({"a": [1, 2]}, named), ([[1, 2]], several), ({"a": [1, 2], "b": [1]}, named)):
        with pytest.raises(ValueError, match=r"^row 7"):
            _read(given, described, "row 7")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 400), ("localhost.evil:80", 400)],
)
def test_requests_for_another_host_are_refused(host: str, status: int, models: dict[str, PersonalModel]) -> None:
    service = TestClient(application(models, hosts=("localhost", "127.0.0.1", "::1")))
    assert service.get("/clients", headers={"Host": host}).status_code == status
