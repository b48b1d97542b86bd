"""What engines have in common that hand clients to workers: replies and evaluations from whatever workers answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.work import Evaluated, Setup, Trained
from lrbpfl.states import States
from lrbpfl.trees import Tree

Answer = Trained | Evaluated | str  # the string says what the client's code raised


class Asked(Protocol):
    """One call for one client."""

    @property
    def k(self) -> int:
        """The client."""

    @property
    def deaths(self) -> tuple[str, ...]:
        """What went wrong before there was an answer."""


class Pool(ABC):
    """An engine whose workers answer calls; states stay here, and go out with a call."""

    setup: Setup
    states: States

    @abstractmethod
    def _map(self, what: str, messages: Mapping[int, Tree], t: int) -> Iterator[tuple[Asked, Answer]]:
        """Each client's call ("update" or "evaluate") with its answer, in the order of the messages."""

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """The clients' replies, in the order of the messages."""
        for asked, answer in self._map("update", messages, t):
            if isinstance(answer, Trained):
                self.states.stage(asked.k, t + 1, answer.state)
                yield Reply.of(asked.k, answer, asked.deaths)
            else:
                yield Reply.failed(asked.k, str(answer), asked.deaths)

    def accept(self, k: int) -> None:
        """The server took client k's upload: keep the state that came with it."""
        self.states.accept(k)

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """The clients' evaluations, in the order of the messages."""
        for asked, answer in self._map("evaluate", messages, t):
            if isinstance(answer, Evaluated):
                yield Evaluation(asked.k, answer)
            else:
                yield Evaluation(asked.k, None, str(answer))
