"""The reference engine: one client after the other, in this process."""

from collections.abc import Iterator, Mapping

from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.work import (
    Setup,
    evaluate_client,
    fresh_state,
    granted,
    keep_memory,
    one_thread,
    update_client,
)
from lrbpfl.trees import Tree


class Serial:
    """Runs clients here. A client that raises is skipped in this round; what it raised is in its reply."""

    def __init__(self, setup: Setup) -> None:
        keep_memory()
        self.setup = granted(setup)
        self.states: dict[int, Tree] = {}
        self._staged: dict[int, Tree] = {}

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """The clients' replies, in the order of the messages."""
        self._staged = {}
        for k, message in messages.items():
            try:
                with one_thread():
                    trained = update_client(self.setup, message, self._state(k), t, k)
            except Exception as error:  # whatever a client's code raises must not end the run
                yield Reply.failed(k, error)
                continue
            self._staged[k] = trained.state
            yield Reply.of(k, len(self.setup.clients[k].train.y), trained)

    def accept(self, k: int) -> None:
        """The server took client k's upload: keep the state that came with it."""
        self.states[k] = self._staged.pop(k)

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """The clients' evaluations, in the order of the messages."""
        for k, message in messages.items():
            try:
                with one_thread():
                    result = evaluate_client(self.setup, message, self._state(k), t, k)
            except Exception as error:
                yield Evaluation(k, None, f"{type(error).__name__}: {error}")
                continue
            yield Evaluation(k, result)

    def close(self) -> None:
        """Nothing to let go."""

    def _state(self, k: int) -> Tree:
        return self.states[k] if k in self.states else fresh_state(self.setup, k)
