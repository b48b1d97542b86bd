"""Whatever a program sends that has read the schema, or has not: no failure, and nothing that the schema hides."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from lrbpfl.serving.application import Limits, application
from lrbpfl.serving.shelf import shelf

from .conftest import FEATURES, Written

CHECKS = [not_a_server_error, response_schema_conformance, status_code_conformance]
FINITE: dict[str, Any] = {"allow_nan": False, "allow_infinity": False}  # the sender's side takes no others
FINE = st.lists(st.floats(width=32, **FINITE), min_size=FEATURES, max_size=FEATURES)
ODD = st.lists(st.floats(**FINITE) | st.integers() | st.booleans(), min_size=FEATURES - 1, max_size=FEATURES + 1)
EXAMPLES = 60  # of each kind


def aimed(body: Any, row: Any) -> Any:
    """The body for a client that there is, with a row that may fit: most of what is made up fits nobody."""
    if isinstance(body, dict) and isinstance(body.get("inputs"), list):
        return {**body, "client": "north", "inputs": [row for _ in body["inputs"]]}
    if isinstance(body, dict) and isinstance(body.get("rows"), list):
        return {**body, "rows": [{"client": "south", "input": row} for _ in body["rows"]]}
    return body


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("aim", [False, True])
def test_predict_never_fails(mode: GenerationMode, aim: bool, written: Written) -> None:
    app = application(shelf(written("lr-bpfl")).models, limits=Limits(max_bytes=5_000, max_rows=4))
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)["/predict"]["POST"]

    @given(case=operation.as_strategy(generation_mode=mode), row=FINE | ODD)
    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def ask(case: schemathesis.Case[Any], row: list[float]) -> None:
        if aim:
            case.body = aimed(case.body, row)
        case.call_and_validate(checks=CHECKS)

    ask()
