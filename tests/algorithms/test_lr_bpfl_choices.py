"""LR-BPFL's choices beside Algorithm 1: kept masks, masked biases, some layers, held-out examples, server steps."""

import pytest
import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.core.network import LayerKind, Params
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from tests.algorithms.hand import play, predict, start
from tests.conftest import CLASSES, Toy, blobs


def test_a_kept_mask_is_where_the_next_round_starts(toy: Toy) -> None:
    algorithm = LRBPFL(warm_start=True, mask_lr=0.05)
    run = start(algorithm, toy)
    args = (toy.task, run.server.W)
    _, kept, _ = algorithm.client_update(*args, run.clients[0], toy.train[0], generator(0))
    assert not trees.equal(kept.masks, run.clients[0].masks)
    still = LRBPFL(warm_start=True, mask_lr=0.0, gate_lr=0.0, adapt_steps=0)
    _, again, _ = still.client_update(*args, kept, toy.train[0], generator(1))
    assert trees.equal(again.masks, kept.masks)
    assert trees.equal(still.personalise(*args, kept, toy.train[0], generator(2)).masks, kept.masks)


def test_a_kept_mask_learns(toy: Toy) -> None:
    """Without a step before they predict, clients with a kept mask fit their data better than fresh ones."""

    def loss(warm_start: bool) -> float:
        algorithm = LRBPFL(warm_start=warm_start, adapt_steps=0)
        run = play(algorithm, toy, start(algorithm, toy), range(6))
        probs = predict(algorithm, toy.task, run.server.W, run.clients[0], toy.train[0], toy.train[0].x).mean(0)
        return nn.functional.nll_loss(probs.log(), toy.train[0].y).item()

    assert loss(True) < loss(False)


def test_biases_get_a_column_of_the_mask(toy: Toy) -> None:
    algorithm = LRBPFL(mask_bias=True, max_rank=3)
    run = start(algorithm, toy)
    personal = algorithm.personalise(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0))
    for name, mask in personal.masks.items():
        assert mask.Q.mean.shape == (len(run.server.W[name]), 3)
        assert mask.R.mean.shape == (run.server.W[name].shape[1] + 1, 3)
    check = predict(algorithm, toy.task, run.server.W, run.clients[0], toy.train[0], toy.test[0].x)
    torch.testing.assert_close(check.sum(-1), torch.ones(check.shape[:2]))


@pytest.mark.parametrize(("kind", "expected"), [("all", ["0", "2"]), ("conv", ["0"]), ("dense", ["2"])])
def test_masks_go_where_they_are_asked_for(kind: LayerKind, expected: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, CLASSES))
    task, algorithm = Task(model, CLASSES), LRBPFL(mask_layers=kind)
    data = Data(torch.randn(8, 1, 6, 6, generator=generator(0)), torch.arange(8) % CLASSES)
    server, client = algorithm.init_server(task, generator(0)), algorithm.init_client(task, generator(0))
    upload, kept, _ = algorithm.client_update(task, server.W, client, data, generator(0))
    assert list(kept.gates) == [f"{name}.weight" for name in expected]
    assert list(upload) == list(server.W)
    assert predict(algorithm, task, server.W, kept, data, data.x).shape == (4, 8, CLASSES)


def test_a_model_without_such_a_layer_is_refused(toy: Toy) -> None:
    with pytest.raises(BadInput, match="mask_layers = 'conv'"):
        LRBPFL(mask_layers="conv").init_server(toy.task, generator(0))


def test_held_out_examples_stop_what_hurts_and_let_pass_what_helps(toy: Toy) -> None:
    """Labels without meaning, and a network that is unsure: every step hurts. The client's own data: all of them help."""
    run = start(LRBPFL(), toy)
    unsure = trees.tree_map(lambda w: 0.3 * w, run.server.W)

    def steps(W: Params, data: Data, lr: float) -> int:
        algorithm = LRBPFL(adapt_holdout=0.4, adapt_steps=40, adapt_lr=lr)
        return algorithm._chosen_steps(toy.task, W, run.clients[0], data, generator(0))

    assert steps(run.server.W, toy.train[0], 0.01) == 40
    random = torch.randint(CLASSES, (60,), generator=generator(3))
    nonsense = Data(blobs(torch.zeros(60, dtype=torch.int64), "nonsense").x, random)
    assert steps(unsure, nonsense, 1.0) == 0


def test_too_few_examples_hold_nothing_out(toy: Toy) -> None:
    one = Data(toy.train[0].x[:1], toy.train[0].y[:1])
    run, algorithm = start(LRBPFL(), toy), LRBPFL(adapt_holdout=0.3, adapt_steps=5)
    assert algorithm._chosen_steps(toy.task, run.server.W, run.clients[0], one, generator(0)) == 5


def test_the_chosen_steps_are_taken_on_all_data(toy: Toy) -> None:
    """The same mask as without holding out, if all steps are chosen, but for the order of the batches."""
    n = len(toy.train[0].y)
    run = start(LRBPFL(), toy)
    algorithm = LRBPFL(adapt_holdout=0.4, batch_size=n, init_std=1e-6, init_spread=0.0, adapt_steps=8)
    plain = LRBPFL(batch_size=n, init_std=1e-6, init_spread=0.0, adapt_steps=8)
    args = (toy.task, run.server.W, run.clients[0], toy.train[0])
    held, whole = (one.personalise(*args, generator(0)) for one in (algorithm, plain))
    for name, mask in held.masks.items():
        torch.testing.assert_close(mask.Q.mean, whole.masks[name].Q.mean, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_the_server_steps_as_it_is_told(toy: Toy, optimiser: str) -> None:
    algorithm = LRBPFL(server_optimiser=optimiser, server_lr=0.01)  # type: ignore[arg-type]
    run = play(algorithm, toy, start(algorithm, toy), range(2))
    plain = play(LRBPFL(), toy, start(LRBPFL(), toy), range(2))
    assert not trees.equal(run.server.W, plain.server.W)
    assert run.server.m is not None and (run.server.v is None) == (optimiser == "momentum")
    assert trees.equal(algorithm.broadcast(toy.task, run.server, 0), run.server.W)
