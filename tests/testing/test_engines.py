"""An engine that breaks a promise is told which one; ours keep them all."""

from collections.abc import Iterator, Mapping

import pytest

from lrbpfl import trees
from lrbpfl.engines.loop import Evaluation, Reply
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import Setup, Trained
from lrbpfl.engines.work import kept as kept_by
from lrbpfl.rng import generator
from lrbpfl.states import Memory, States
from lrbpfl.testing import check_engine
from lrbpfl.trees import Tree
from tests.engines.fakes import kept


class OtherSeed(Serial):
    def __init__(self, setup: Setup, states: States) -> None:
        super().__init__(setup._replace(seed=1), states)


class Backwards(Serial):
    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        yield from super().update({k: messages[k] for k in sorted(messages)}, t)


class Eager(Serial):
    """Keeps a state before anybody accepted the upload."""

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        for reply in super().update(messages, t):
            self.states.accept(reply.client_id)
            yield reply

    def accept(self, k: int) -> None:
        pass


class Forgetful(Serial):
    def accept(self, k: int) -> None:
        pass


class Brittle(Serial):
    """A client that raises ends the run."""

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        for reply in super().update(messages, t):
            if reply.failure:
                raise RuntimeError(reply.failure)
            yield reply


class Mute(Serial):
    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        for evaluation in super().evaluate(messages, t):
            yield evaluation if evaluation.result else Evaluation(evaluation.client_id, None, "something")


class Sharing(Serial):
    """One client's state for everybody."""

    def __init__(self, setup: Setup, states: States) -> None:
        super().__init__(setup, states)
        states.get = lambda k, fresh: next(iter(kept(self).values()), None) or fresh()  # type: ignore[method-assign]


class Judging(Serial):
    """Judges clients as if they had never taken part."""

    def evaluate(self, messages: Mapping[int, Tree], t: int) -> Iterator[Evaluation]:
        yield from Serial(self.setup, Memory()).evaluate(messages, t)


class Exiting(Serial):
    """A client that wants to exit does."""

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        for reply in super().update(messages, t):
            if (reply.failure or "").startswith("SystemExit"):
                raise SystemExit(reply.failure)
            yield reply


class Lending(Serial):
    """Gives clients what it has, and no copies."""

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        setup = self.setup
        algorithm, task, clients, seed = setup.algorithm, setup.task, setup.clients, setup.seed
        for k, message in messages.items():
            state, train, rng = kept_by(self.setup, self.states, k), clients[k].train, generator(seed, "update", t, k)
            try:
                left = algorithm.client_update(task, message, state, train, rng)
                trained = Trained(*left, seconds=0.0, examples=len(train.y))
            except BaseException as error:
                yield Reply.failed(k, error)
                continue
            if any(bool(leaf.isnan().any()) for leaf in trees.leaves(trained.state)):
                yield Reply.failed(k, "its state is unfit")
                continue
            self.states.stage(k, t + 1, trained.state)
            yield Reply.of(k, trained)


class Gapless(Serial):
    """Tells of numbers only."""

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        for reply in super().update(messages, t):
            yield reply._replace(info={name: value for name, value in reply.info.items() if value == value})


def test_ours_keep_them_all() -> None:
    check_engine(Serial)
    check_engine(lambda setup, states: Processes(setup, 2, states=states))


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (OtherSeed, "the server after round 0 is not the serial engine's"),
        (Backwards, r"replies come from the clients \[0, 1, 2\], messages went to \[2, 0, 1\]"),
        (Eager, "a state is kept of a client whose upload nobody accepted"),
        (Forgetful, r"states are kept of the clients \[\]"),
        (Brittle, "the engine fails in a small run: RuntimeError: LookupError: this client fails on purpose"),
        (Mute, "a client whose prediction raised is evaluated as 'something'"),
        (Sharing, "the evaluations after round 1 are not the serial engine's"),
        (Exiting, "the engine fails in a small run: SystemExit: SystemExit: this client fails on purpose"),
        (Lending, "a client changes in place what it was given"),
        (Gapless, "a client's info holds what is no float"),
        (Judging, "the evaluations after round 1 are not the serial engine's"),
    ],
)
def test_a_broken_promise_is_told(engine: type[Serial], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_engine(engine)
