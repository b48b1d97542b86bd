"""A promise for each client: prediction sets fitted on what it kept from training, judged on its test data."""

from collections.abc import Iterable

from lrbpfl.engines.lazy import Roster
from lrbpfl.engines.work import ClientData, Evaluated
from lrbpfl.errors import BadInput
from lrbpfl.metrics.conformal import needed, promise, set_scores, too_few

NO_PROMISE = "no promise"  # an event that is no failure: the client kept too few examples
SETS = ("promises", "coverage", "coverage_worst", "set_size", "set_size_worst")  # over clients


def fit(coverage: float, confidence: float | None, result: Evaluated) -> dict[str, float] | str:
    """How a client's sets fare, with their threshold and on how many examples it was fitted; or why it has none."""
    kept = 0 if result.calibration is None else len(result.calibration.y)
    if result.calibration is None or kept < needed(coverage, confidence):
        return str(too_few(kept, coverage, confidence))
    given = promise(result.calibration, coverage, confidence)
    fitted = {"threshold": given.threshold, "calibration_examples": float(given.examples)}
    return {**set_scores(given, result.predictions), **fitted}


def check_calibration(coverage: float | None, confidence: float | None, temper: str, fraction: float | None) -> None:
    """Refuse keys that do not go together about what is fitted on calibration parts.

    Temperature and threshold of one part would make its examples look likelier than new ones, and the promise would
    not hold. Halves of a part that is small already would be too few for either.
    """
    if coverage is None and confidence is not None:
        raise BadInput(f"federation.confidence = {confidence:g} is about a promise: it needs federation.coverage")
    if coverage is not None and temper != "no":
        raise BadInput(
            f"federation.coverage = {coverage:g} and federation.temper = {temper!r} would be fitted on the same "
            "examples, and the promise would not hold: choose one, sets need no temperature"
        )
    for key, value in {"temper": None if temper == "no" else temper, "coverage": coverage}.items():
        if value is not None and not fraction:
            raise BadInput(f"federation.{key} = {value!r} needs data.calibration_fraction above 0")


def check_parts(
    coverage: float | None, confidence: float | None, fraction: float | None, clients: Iterable[ClientData]
) -> None:
    """Refuse a promise that no client could be given; of clients that are loaded when needed, the largest is looked at.

    Where nobody knows who that is, those who keep too few are told when they are judged.
    """
    if coverage is None:
        return
    if isinstance(clients, Roster):
        if clients.largest is None:
            return
        clients = [clients[clients.largest]]
    kept = max((len(client.calibration.y) for client in clients if client.calibration), default=0)
    if kept < needed(coverage, confidence):
        sentence = too_few(kept, coverage, confidence)
        raise BadInput(f"{sentence}, the most that data.calibration_fraction = {fraction} leaves a client")
