"""The HTTP side: what may be asked, in which form, and what is said when it cannot be answered."""

from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from lrbpfl.core import gates as gating
from lrbpfl.errors import BadInput
from lrbpfl.personal.description import Class
from lrbpfl.personal.model import PersonalModel
from lrbpfl.serving.answers import Answer, Question, UnknownClient, answers, short
from lrbpfl.serving.guard import Guard
from lrbpfl.serving.page import CONTENT_POLICY, page

STRICT = ConfigDict(extra="forbid", strict=True)
Example = Annotated[
    Any, Field(description="One example: numbers, nested as in the client's data; an object where inputs have names.")
]


class Limits(NamedTuple):
    """What one request may bring."""

    max_bytes: int = 1_000_000
    max_rows: int = 1_000


class OfOneClient(BaseModel):
    """Many rows of one client."""

    model_config = STRICT
    client: str
    inputs: Annotated[list[Example], Field(min_length=1)]


class OneRow(BaseModel):
    """A row and whose it is."""

    model_config = STRICT
    client: str
    input: Example


class OfManyClients(BaseModel):
    """Rows of different clients, answered in one batch where their models have a network in common."""

    model_config = STRICT
    rows: Annotated[list[OneRow], Field(min_length=1)]


class Predicted(BaseModel):
    """Answers, in the order of the rows."""

    predictions: list[Answer]


class Client(BaseModel):
    """What is known of a client's model."""

    name: str
    algorithm: str
    classes: list[Class]
    rank: Annotated[dict[str, int] | None, Field(description="Of its masks, by layer; null without masks.")]
    examples: Annotated[int | None, Field(description="It was trained on.")]
    inputs: Annotated[dict[str, Any], Field(description="The type and shape of one example.")]


class Clients(BaseModel):
    """Everybody who can be asked for."""

    clients: list[Client]


class Health(BaseModel):
    """That the service is up, and for how many clients."""

    status: str
    clients: int


class Fault(BaseModel):
    """What is wrong, in a sentence."""

    detail: str


def _form(body: Any) -> str:
    return "rows" if isinstance(body, dict) and "rows" in body else "inputs"


Asked = Annotated[
    Annotated[OfOneClient, Tag("inputs")] | Annotated[OfManyClients, Tag("rows")], Discriminator(_form), Body()
]
FAULTS: dict[int | str, dict[str, Any]] = {
    400: {"model": Fault, "description": "The body cannot be read, or was meant for another host"},
    401: {"model": Fault, "description": "The token is missing or wrong"},
    404: {"model": Fault, "description": "There is no such client"},
    413: {"model": Fault, "description": "Too many bytes or rows"},
    422: {"model": Fault, "description": "The row that is named cannot be taken"},
}


def application(
    models: Mapping[str, PersonalModel],
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The service for these models; every path but the page and /health wants the token, if there is one.

    With `hosts`, requests that were meant for another name are refused: a web page elsewhere can have its own name lead
    here, and its reader's browser would ask in its place.
    """
    limits = limits or Limits()
    app = FastAPI(title="lrbpfl", version=version("lrbpfl"), description=(__doc__ or "").strip())
    app.add_middleware(Guard, token=token, hosts=hosts, max_bytes=limits.max_bytes)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(BadInput, _refused)
    app.add_exception_handler(Exception, _failed)
    _add_paths(app, models, limits)
    return app


def _add_paths(app: FastAPI, models: Mapping[str, PersonalModel], limits: Limits) -> None:
    """Predictions are computed in a thread, so that the others are answered meanwhile."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def show_page() -> HTMLResponse:
        return HTMLResponse(page(), headers={"Content-Security-Policy": CONTENT_POLICY})

    @app.get("/health")
    def health() -> Health:
        """Whether the service is up."""
        return Health(status="ok", clients=len(models))

    @app.get("/clients", responses={401: FAULTS[401]})
    def clients() -> Clients:
        """Whose models are here, and what they take in."""
        return Clients(clients=[_client(name, model) for name, model in models.items()])

    @app.post("/predict", responses=FAULTS, response_model_exclude_none=True)
    def predict(asked: Asked) -> Predicted:
        """Probabilities and uncertainties (in nats) of each row, by its client's own model."""
        rows = _rows(asked)
        if len(rows) > limits.max_rows:
            raise TooMany(f"{len(rows)} rows were sent, and at most {limits.max_rows} are answered at once")
        return Predicted(predictions=answers(models, rows))


class TooMany(BadInput):
    """More rows than are answered at once."""


def _rows(asked: OfOneClient | OfManyClients) -> list[Question]:
    if isinstance(asked, OfManyClients):
        return [Question(row.client, row.input) for row in asked.rows]
    return [Question(asked.client, given) for given in asked.inputs]


def _client(name: str, model: PersonalModel) -> Client:
    gates, examples = getattr(model._tree, "gates", None), model.about.get("examples")
    return Client(
        name=name,
        algorithm=model.about["algorithm"]["name"],
        classes=list(model.classes),
        rank=None if gates is None else {layer: gating.rank(gamma) for layer, gamma in gates.items()},
        examples=examples if type(examples) is int else None,
        inputs=model.inputs,
    )


def _refused(request: Request, error: Exception) -> JSONResponse:
    status = 404 if isinstance(error, UnknownClient) else 413 if isinstance(error, TooMany) else 422
    return JSONResponse({"detail": str(error)}, status)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong with the form of a request."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return JSONResponse({"detail": f"the body is not JSON: {first.get('ctx', {}).get('error', '')}"}, 422)
    path = [f"row {part}" if isinstance(part, int) else short(part) for part in first["loc"][2:]]  # after body and form
    if len(path) > 1:  # what is in a row is named by the row
        path = path[1:]
    message = first["msg"][:1].lower() + first["msg"][1:]
    return JSONResponse({"detail": f"{', '.join(path) or 'the body'}: {message}"}, 422)


def _failed(request: Request, error: Exception) -> JSONResponse:
    """Nothing of what went wrong: that is in the log, where uvicorn writes it."""
    return JSONResponse({"detail": "something went wrong here; the log of the service says what"}, 500)
