"""The reference engine: one client after the other, in this process."""

from collections.abc import Iterator, Mapping

from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.work import (
    Setup,
    evaluate_client,
    granted,
    keep_memory,
    kept,
    one_thread,
    update_client,
)
from lrbpfl.states import Memory, States
from lrbpfl.trees import Tree


class Serial:
    """Runs clients here. A client that raises is skipped in this round; what it raised is in its reply."""

    def __init__(self, setup: Setup, states: States | None = None) -> None:
        keep_memory()
        self.setup = granted(setup)
        self.states = states or Memory()

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        """The clients' replies, in the order of the messages."""
        for k, message in messages.items():
            state = kept(self.setup, self.states, k)
            try:
                with one_thread():
                    trained = update_client(self.setup, message, state, t, k)
            except Exception as error:  # whatever a client's code raises must not end the run
                yield Reply.failed(k, error)
                continue
            self.states.stage(k, t + 1, trained.state)
            yield Reply.of(k, trained)

    def accept(self, k: int) -> None:
        """The server took client k's upload: keep the state that came with it."""
        self.states.accept(k)

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        """The clients' evaluations, in the order of the messages."""
        for k, message in messages.items():
            state = kept(self.setup, self.states, k)
            try:
                with one_thread():
                    result = evaluate_client(self.setup, message, state, t, k)
            except Exception as error:
                yield Evaluation(k, None, f"{type(error).__name__}: {error}")
                continue
            yield Evaluation(k, result)

    def close(self) -> None:
        """Nothing to let go."""
