"""The engine whose clients live at sites: one letter to each site a round, nothing kept here but what was counted."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lrbpfl import trees
from lrbpfl.algorithms.protocol import Update
from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.work import Evaluated, Setup
from lrbpfl.errors import BadInput
from lrbpfl.metrics import Predictions
from lrbpfl.metrics.calibration import BINS
from lrbpfl.sites import letters
from lrbpfl.sites.letters import Refused
from lrbpfl.sites.stores import Confirmed
from lrbpfl.sites.transport import Letter, Lost, Transport, What
from lrbpfl.states import States
from lrbpfl.trees import Tree

PING = 3600.0  # seconds that a sign of life of a lost site is waited for, beside the rounds
GRACE = 0.2  # seconds a round waits for a sign of life, which usually takes less
KEEPS = "its site keeps its scores to itself"
REBUILT = 10**7  # examples of a client that are rebuilt from its bins at most


class TooFew(BadInput):
    """So few sites are left that no round is begun."""


class Sites:
    """Runs clients at their sites.

    A site that does not answer in time, or not in order, is left out until it gives a sign of life or a new leg begins;
    its clients take no part in the rounds between, and keep what they had when they were last counted.
    """

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        where: Mapping[int, str],  # the site of each client
        joined: set[str],  # the sites that take part in this leg
        stamp: Mapping[str, Any],  # the run and the leg
        states: Confirmed,
        *,
        seconds: float,
        minimum: int,
    ) -> None:
        self.setup, self.lost = setup, dict[str, str]()
        self._confirmed = states
        self.states: States = states
        self._newcomer: dict[int, Tree] = {}
        self._transport, self._where, self._joined, self._stamp = transport, where, joined, dict(stamp)
        self._seconds, self._minimum = seconds, minimum
        self._guard, self._called = threading.Lock(), set[str]()  # lost sites of which a sign of life is awaited

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """The clients' replies, in the order of the messages."""
        self._look_for_lost()
        if len(self._joined) - len(self.lost) < self._minimum:
            told = ", ".join(f"{site}: {why}" for site, why in sorted(self.lost.items())) or "the others never joined"
            raise TooFew(f"fewer than {self._minimum} sites are left before round {t + 1} ({told})")
        answers = self._ask("update", messages, t)
        for k, message in messages.items():
            reply = self._reply(k, answers, message)
            if reply.update is not None:
                self.states.stage(k, t + 1, None)
            yield reply

    def accept(self, k: int) -> None:
        """Client k's upload was counted: its site hears so with its next letter."""
        self.states.accept(k)

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """What sites tell of their clients' evaluations, in the order of the messages."""
        answers = self._ask("evaluate", messages, t)
        for k in messages:
            try:
                yield self._evaluation(k, self._of_client(k, answers))
            except (Refused, _Failed) as fault:
                yield Evaluation(k, None, str(fault))

    def show(self, server: Tree) -> None:
        """What somebody new would get goes along with evaluations from now on, for the models that sites write."""
        newcomer = len(self.setup.training)
        self._newcomer = {newcomer: self.setup.algorithm.broadcast(self.setup.task, server, newcomer)}

    def close(self) -> None:
        """The leg ends here; who hears it ends, too."""
        there = [site for site in sorted(self._joined) if site not in self.lost]
        for _ in self._transport.call("close", {site: dict(self._stamp) for site in there}, self._seconds):
            pass

    def _ask(self, what: What, messages: Mapping[int, Tree], t: int) -> dict[str, Letter]:
        """The answers of the sites of these clients; any other site is in `lost`, and why."""
        asked: dict[str, dict[int, Tree]] = {}
        for k, message in messages.items():
            if self._is_there(self._where[k]):
                asked.setdefault(self._where[k], {})[k] = message
        sent: dict[str, Letter] = {}
        for site, own in asked.items():
            sent[site] = {**self._stamp, "t": t, "counted": self._counted(own)}
            newcomer = {} if what == "update" else self._newcomer
            sent[site] |= letters.pack({**own, **newcomer})
            if newcomer:
                sent[site]["newcomer"] = sent[site]["own"].pop(str(len(self.setup.training)))
        answers: dict[str, Letter] = {}
        for site, answer in self._transport.call(what, sent, self._seconds):
            fault = answer.reason if isinstance(answer, Lost) else letters.reason(answer)
            if not fault and not isinstance(answer, Lost):
                if all(answer.get(key) == value for key, value in {**self._stamp, "t": t}.items()):
                    answers[site] = answer
                    continue
                fault = "its answer is to another letter"
            with self._guard:
                self.lost[site] = fault or "no answer"
        return answers

    def _counted(self, clients: Mapping[int, Tree]) -> dict[str, dict[str, int]]:
        return {str(k): self._confirmed.counted(k)._asdict() for k in clients}

    def _reply(self, k: int, answers: Mapping[str, Letter], message: Tree) -> Reply:
        try:
            said = self._of_client(k, answers)
            named = letters.tensors(said.get("upload"))
            if named.keys() != dict(trees.named_leaves(message)).keys():
                raise _Failed("upload refused: its tensors have other names than the message's")
            update = Update(k, letters.whole(said, "examples", least=1), trees.rebuild(message, named))
            seconds = letters.numbers({"seconds": said.get("seconds")})["seconds"]
            return Reply(client_id=k, update=update, info=letters.numbers(said.get("info")), seconds=seconds)
        except Refused:
            return Reply.failed(k, "upload refused: it is not in order")
        except _Failed as fault:
            away = (str(fault),) if self._where[k] in self.lost or self._where[k] not in self._joined else ()
            return Reply.failed(k, str(fault), away)

    def _of_client(self, k: int, answers: Mapping[str, Letter]) -> dict[str, Any]:
        """What a site says of client k."""
        site = self._where[k]
        if site not in answers:
            raise _Failed(f"site {site} is away: {self.lost.get(site, 'it is not in this leg')}")
        said = letters.table(letters.table(answers[site].get("clients")).get(str(k)))
        if fault := letters.reason(said):
            raise _Failed(f"site {site}: {fault}")
        return said

    def _evaluation(self, k: int, said: Mapping[str, Any]) -> Evaluation:
        if said.get("kept") is True:
            return Evaluation(k, None, KEEPS)
        scores, bins = letters.numbers(said.get("scores")), letters.table(said.get("bins"))
        result = Evaluated(
            predictions=rebuilt(bins, self.setup.task.num_classes),
            personal={},
            shared={},
            seconds=0.0,
            examples=letters.whole(said, "examples", least=1),
            scores=scores,
        )
        return Evaluation(k, result)

    def _is_there(self, site: str) -> bool:
        with self._guard:
            return site in self._joined and site not in self.lost

    def _look_for_lost(self) -> None:
        """Ask lost sites for a sign of life, and wait for none."""
        with self._guard:
            silent = [site for site in self.lost if site not in self._called]
            self._called |= set(silent)
        for site in silent:
            answers = self._transport.call("ping", {site: dict(self._stamp)}, PING)
            listening = threading.Thread(target=self._listen, args=(site, answers), daemon=True)
            listening.start()
            listening.join(GRACE)

    def _listen(self, site: str, answers: Iterator[tuple[str, Letter | Lost]]) -> None:
        try:
            alive = any(answer == self._stamp for _, answer in answers)
        except Exception:  # the leg ends
            alive = False
        with self._guard:
            self._called.discard(site)
            if alive:
                self.lost.pop(site, None)


class _Failed(Exception):
    """Why there is nothing of a client."""


def rebuilt(bins: Mapping[str, Any], classes: int) -> Predictions:
    """Predictions that have these bins (counts, mean confidence, right ones), each example at its bin's mean."""
    counts, confidence, correct = (_row(bins.get(key)) for key in ("counts", "confidence", "correct"))
    fits = 0 < counts.sum() <= REBUILT and bool((correct <= counts).all()) and bool((confidence <= 1).all())
    whole = bool((counts == counts.round()).all()) and bool((correct == correct.round()).all())
    if not fits or not whole:
        raise Refused("letter")
    sizes, right = counts.astype(np.int64), correct.astype(np.int64)
    p = np.repeat(np.maximum(confidence, 1.0 / classes), sizes)
    y = np.concatenate([np.arange(n) >= hits for n, hits in zip(sizes, right, strict=True)]).astype(np.int64)
    probs = np.repeat(((1.0 - p) / (classes - 1))[:, None], classes, axis=1)
    probs[:, 0] = p
    nothing = np.zeros(len(p))
    return Predictions(probs=probs, y=y, total=nothing, aleatoric=nothing)


def _row(given: Any) -> "np.ndarray[Any, np.dtype[np.float64]]":
    fits = isinstance(given, list) and len(given) == BINS and all(type(value) in (int, float) for value in given)
    row = np.array(given, dtype=np.float64) if fits else np.full(BINS, np.nan)
    if not np.isfinite(row).all() or bool((row < 0).any()):
        raise Refused("letter")
    return row
