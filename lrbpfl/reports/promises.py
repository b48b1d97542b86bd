"""What was promised of prediction sets, and what came of it, client by client."""

from collections.abc import Sequence
from typing import NamedTuple

from lrbpfl.metrics.conformal import Promise, chance
from lrbpfl.reports.collect import Client, Result


class ClientPromise(NamedTuple):
    """One client with a promise."""

    place: int  # in the run's clients
    name: str
    new: bool
    coverage: float
    low: float  # between low and high a kept promise covers in 95 of 100 cases
    high: float
    set_size: float
    tested: int
    fitted: int  # on so many calibration examples


class RunPromises(NamedTuple):
    """One run whose clients have promises."""

    run: int  # place among all runs
    name: str
    promised: float
    confidence: float | None
    rows: list[ClientPromise]  # by rising coverage; new clients after the others
    without: list[tuple[str, str]]  # clients, and why

    @property
    def worst(self) -> ClientPromise | None:
        """The training client whose sets hold the truth least often."""
        return next((row for row in self.rows if not row.new), None)

    @property
    def below(self) -> list[ClientPromise]:
        """Those that cover less than chance would explain."""
        return [row for row in self.rows if row.coverage < row.low]


def sections(results: Sequence[Result]) -> list[RunPromises]:
    """A section for each run that was asked for sets."""
    return [_section(i, result) for i, result in enumerate(results) if "coverage_promised" in result.scores]


def _section(i: int, result: Result) -> RunPromises:
    promised, confidence = result.scores["coverage_promised"], result.scores.get("confidence")
    rows = [
        _row(place, client, promised, confidence)
        for place, client in enumerate(result.clients)
        if client["scores"].get("coverage") is not None
    ]
    return RunPromises(
        run=i,
        name=result.name,
        promised=promised,
        confidence=confidence,
        rows=sorted(rows, key=lambda row: (row.new, row.coverage, row.place)),
        without=[(c["name"], result.refused[c["number"]]) for c in result.clients if c["number"] in result.refused],
    )


def _row(place: int, client: Client, promised: float, confidence: float | None) -> ClientPromise:
    scores = client["scores"]
    tested, fitted = int(scores["examples"]), int(scores["calibration_examples"])
    low, high = chance(Promise(promised, confidence, scores["threshold"], fitted), tested)
    return ClientPromise(
        place=place,
        name=client["name"],
        new=client["new_alpha"] is not None,
        coverage=round(scores["coverage"] * tested) / tested,  # whole examples: a score has six digits
        low=low,
        high=high,
        set_size=scores["set_size"],
        tested=tested,
        fitted=fitted,
    )
