"""Two of twenty clients send what they should not: the others end where they would have ended."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Algorithm
from lrbpfl.engines.intake import Intake
from lrbpfl.engines.loop import Reply, Round, federate
from lrbpfl.engines.serial import Serial
from lrbpfl.metrics import scores
from lrbpfl.testing.toy import make_setup, make_toy, skewed
from lrbpfl.trees import Tree

BAD = (3, 8)
ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": FedAvg(local_steps=8),
    "lr-bpfl": LRBPFL(mask_steps=4, model_steps=8, predict_samples=4),
}


class Tampered(Serial):
    """Somebody else writes what the bad clients send; it is given what they sent now and in the round before."""

    def __init__(self, algorithm: Algorithm, seed: int, forge: Callable[[Tree, Tree], Tree] | None) -> None:
        toy = make_toy()
        toy = toy._replace(
            task=toy.task._replace(num_clients=20),
            train={k: skewed(k, 40, "train", k) for k in range(20)},
            test={k: skewed(k, 60, "test", k) for k in range(20)},
        )
        super().__init__(make_setup(algorithm, toy)._replace(seed=seed))
        self.forge, self.before = forge, dict[int, Tree]()

    def update(self, messages: Mapping[int, Tree], t: int) -> Iterator[Reply]:
        for reply in super().update(messages, t):
            if self.forge and reply.update and reply.client_id in BAD:
                now = reply.update.upload
                old = self.before.get(reply.client_id, now)
                self.before[reply.client_id] = now
                reply = reply._replace(update=reply.update._replace(upload=self.forge(now, old)))
            yield reply


def all_of(value: float) -> Callable[[Tree, Tree], Tree]:
    return lambda now, old: trees.tree_map(lambda leaf: torch.full_like(leaf, value), now)


def one_number(value: float) -> Callable[[Tree, Tree], Tree]:
    """In the upload's last tensor: a bias, or the numbers of examples in a vote."""

    def forge(now: Tree, old: Tree) -> Tree:
        named = {name: leaf.clone() for name, leaf in trees.named_leaves(now)}
        named[list(named)[-1]].view(-1)[0] = value
        return trees.rebuild(now, named)

    return forge


FORGERIES: dict[str, Callable[[Tree, Tree], Tree]] = {
    "1e30": all_of(1e30),
    "-3e38": all_of(-3e38),
    "one 1e30": one_number(1e30),
    "nan": all_of(float("nan")),
    "stale": lambda now, old: old,
    "keys": lambda now, old: {"not": torch.zeros(3)},
}


def play(name: str, seed: int, forge: Callable[[Tree, Tree], Tree] | None, intake: Intake) -> tuple[float, list[Round]]:
    """The mean log loss over all clients' test examples after the last round, and the rounds."""
    rounds = list(federate(Tampered(ALGORITHMS[name], seed, forge), rounds=5, cohort=12, intake=intake))
    results = [e.result.predictions for e in rounds[-1].evaluations.values() if e.result]
    assert len(results) == 20
    return float(np.mean([scores(p, seed=0)["nll"] for p in results])), rounds


@pytest.fixture(scope="module", params=ALGORITHMS)
def clean(request: pytest.FixtureRequest) -> tuple[str, dict[int, float], float]:
    name = str(request.param)
    losses = {seed: play(name, seed, None, Intake())[0] for seed in range(3)}
    return name, losses, float(np.std(list(losses.values()), ddof=1))


@pytest.mark.parametrize("kind", FORGERIES)
def test_the_end_is_that_of_a_clean_run(clean: tuple[str, dict[int, float], float], kind: str) -> None:
    name, losses, spread = clean
    loss, rounds = play(name, 0, FORGERIES[kind], Intake())
    assert abs(loss - losses[0]) < 3 * spread
    sent = [k for ended in rounds for k in ended.cohort if k in BAD]
    refused = [k for ended in rounds for k in ended.failures]
    assert len(sent) > 2
    assert refused == ([] if kind == "stale" else sent)
    assert not any(ended.undone for ended in rounds)


def test_without_the_rule_they_ruin_it() -> None:
    engine = Tampered(ALGORITHMS["fedavg"], 0, FORGERIES["1e30"])
    *_, last = federate(engine, rounds=2, cohort=12, intake=Intake(farthest=0))
    assert not any(evaluation.result for evaluation in last.evaluations.values())


def test_clipping_and_medians_hold_what_the_rule_lets_through() -> None:
    """Two turn their networks round and double them; without a rule that is seen in everybody's scores."""

    def back(now: Tree, old: Tree) -> Tree:
        return trees.tree_map(lambda leaf: -2 * leaf, now)

    clean, _ = play("fedavg", 0, None, Intake())
    spoiled, _ = play("fedavg", 0, back, Intake(farthest=0))
    held = [play("fedavg", 0, back, how)[0] for how in (Intake(aggregate="median"), Intake(clip=0.5, farthest=0))]
    assert max(held) < clean + 0.2 < spoiled
