"""A round's evaluations, one client at a time: each is scored, written down and let go."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lrbpfl import trees
from lrbpfl.engines.loop import Evaluation
from lrbpfl.engines.work import Evaluated, Setup
from lrbpfl.experiments import promises
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.deal import NewKind
from lrbpfl.experiments.promises import NO_PROMISE
from lrbpfl.experiments.results import Results
from lrbpfl.experiments.spool import Waiting
from lrbpfl.experiments.store import Run
from lrbpfl.metrics import Predictions, Summary, tempering
from lrbpfl.metrics.conformal import summarise_sets
from lrbpfl.trees import Tree

BUFFER = 4096  # lines of the record that are written at a time


class Verdict(NamedTuple):
    """What a round's evaluations come to."""

    pooled: dict[str, float]  # over the training clients that were judged; empty if nobody was
    pooled_new: dict[NewKind, dict[str, float]]  # over new clients, by their kind
    examples_train: int = 0  # that these training clients train on
    parameters: int = 0  # numbers in the largest model of a training client, with what it took over from its message


class _Group:
    """Clients whose scores are pooled."""

    def __init__(self, seed: int) -> None:
        self.summary = Summary(seed)
        self.promised: dict[int, dict[str, float]] = {}  # scores of sets, beside the numbers of examples

    def pooled(self, *, sets: bool) -> dict[str, float]:
        """Scores over all of them; of sets too, if anybody was to have one."""
        whole = self.summary.result() if len(self.summary) else {}
        return whole | (summarise_sets(self.promised) if sets else {})


class Judge:
    """Takes the evaluations of round t, by the clients' rising numbers; where one temperature is fitted for all, they
    wait on the disk for the last one. `sent` says what the message to a client was, and to somebody new.
    """

    def __init__(
        self, run: Run, config: Config, setup: Setup, alphas: Mapping[int, NewKind], t: int, sent: Callable[[int], Tree]
    ) -> None:
        self.run, self.config, self.setup, self.alphas, self.t, self.sent = run, config, setup, alphas, t, sent
        self.last = t + 1 == config.federation.rounds
        self.groups = {kind: _Group(setup.seed) for kind in (None, *dict.fromkeys(alphas.values()))}
        self.examples_train = self.parameters = 0
        self.lines: list[dict[str, Any]] = []
        self.calibrations: list[Predictions] = []  # of training clients, where they are pooled
        self.waiting = Waiting(run.path / ".judged")
        self.results = Results(run, config, setup, t, sent(len(setup.training)), alphas) if self.last else None
        self.promising = False
        self.told: Mapping[str, float] = {}  # the scores of the client judged last, and the predictions they are of
        self.judged: Predictions | None = None

    def take(self, evaluation: Evaluation) -> None:
        """One client's evaluation."""
        k, result = evaluation.client_id, evaluation.result
        if result is None:
            self._tell({**self._about(k), "event": "not judged", "reason": evaluation.failure})
        elif self.config.federation.temper == "all":
            self.waiting.add(evaluation)
            if result.calibration is not None and k in self.setup.training:
                self.calibrations.append(result.calibration)
        else:
            own = [result.calibration] if result.calibration is not None else []
            self._judge(k, result, tempering.fit(own) if self.config.federation.temper == "client" else None)

    def finish(self) -> Verdict:
        """All have come: the scores over them; results of the last round are whole."""
        if self.config.federation.temper == "all":
            temperature = tempering.fit(self.calibrations)
            for k, result, _ in self.waiting:
                assert result is not None
                self._judge(k, result, temperature)
        self.run.record.append(self.lines)
        if self.results:
            self.results.finish()
        pooled = {kind: group.pooled(sets=self.promising) for kind, group in self.groups.items()}
        return Verdict(
            pooled=pooled.pop(None),
            pooled_new={kind: scores for kind, scores in pooled.items() if kind is not None},
            examples_train=self.examples_train,
            parameters=self.parameters,
        )

    def drop(self) -> None:
        """Nobody wants to know any more: let go of what lies on the disk."""
        self.waiting.drop()
        if self.results:
            self.results.predictions.drop()

    def _judge(self, k: int, result: Evaluated, temperature: float | None) -> None:
        if temperature is not None:
            result = result._replace(predictions=tempering.temper(result.predictions, temperature))
        group = self.groups[self.alphas.get(k)]
        told = group.summary.add(k, result.predictions, result.scores)
        if temperature is not None:
            told["temperature"] = temperature
        for name, value in self._promised(k, result, group, told["examples"]):
            told[name] = value
        self.told, self.judged = told, result.predictions
        for metric, value in told.items():
            self._tell({**self._about(k), "metric": metric, "value": value})
        message = dict(trees.named_leaves(self.sent(k)))
        if k in self.setup.training:
            self.examples_train += result.examples
            self.parameters = max(self.parameters, _size(result, message))
        if self.results and result.scores is None:
            self.results.add(k, result, message, told, 1.0 if temperature is None else temperature)

    def _promised(self, k: int, result: Evaluated, group: _Group, examples: float) -> Iterator[tuple[str, float]]:
        """The scores of the client's sets, if any are asked for and it kept enough to be promised some."""
        federation = self.config.federation
        if federation.coverage is None:
            return
        self.promising = True
        found = promises.fit(federation.coverage, federation.confidence, result)
        if isinstance(found, str):
            if self.last:  # the same in every round
                self._tell({**self._about(k), "event": NO_PROMISE, "reason": found})
            return
        group.promised[k] = {**found, "examples": examples}
        yield from found.items()

    def _about(self, k: int) -> dict[str, Any]:
        """Lines about new clients say so, by their alpha, or "sites" for whole ones."""
        return {"round": self.t + 1, "client": k, **({"new_alpha": self.alphas[k]} if k in self.alphas else {})}

    def _tell(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if len(self.lines) >= BUFFER:
            self.run.record.append(self.lines)
            self.lines = []


def _size(result: Evaluated, message: Mapping[str, torch.Tensor]) -> int:
    return trees.count(result.personal) + sum(message[name].numel() for name in result.shared.values())
