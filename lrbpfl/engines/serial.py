"""The reference engine: one client after the other, in this process."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from lrbpfl.engines.conduct import attempt
from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.work import (
    Setup,
    Stateless,
    evaluate_client,
    granted,
    keep_memory,
    kept,
    one_thread,
    update_client,
)
from lrbpfl.states import Memory, States
from lrbpfl.trees import Tree

T = TypeVar("T")


class Serial:
    """Runs clients here. A client that raises is skipped in this round; what it raised is in its reply.

    SystemExit and KeyboardInterrupt are no exceptions to that, but Ctrl-C is nobody's but the user's, and ends the run.
    A client that ends or hangs its process ends or hangs this one: `Processes` is the engine for code like that.
    """

    def __init__(self, setup: Setup, states: States | None = None) -> None:
        keep_memory()
        self.setup = granted(setup)
        self.states = states or Memory()

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """The clients' replies, in the order of the messages."""
        for k, message in messages.items():
            with one_thread():
                trained = self._run(update_client, message, t, k)
            if isinstance(trained, str):
                yield Reply.failed(k, trained)
                continue
            self.states.stage(k, t + 1, trained.state)
            yield Reply.of(k, trained)

    def accept(self, k: int) -> None:
        """The server took client k's upload: keep the state that came with it."""
        self.states.accept(k)

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """The clients' evaluations, in the order of the messages."""
        for k, message in messages.items():
            with one_thread():
                result = self._run(evaluate_client, message, t, k)
            yield Evaluation(k, None, result) if isinstance(result, str) else Evaluation(k, result)

    def close(self) -> None:
        """Nothing to let go."""

    def _run(self, work: Callable[[Setup, Tree, Tree, int, int], T], message: Tree, t: int, k: int) -> T | str:
        try:
            state = kept(self.setup, self.states, k)
        except Stateless as error:
            return str(error)
        return attempt(lambda: work(self.setup, message, state, t, k))
