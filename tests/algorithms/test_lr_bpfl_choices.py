"""LR-BPFL's choices beside Algorithm 1: kept masks, masked biases, some layers, held-out examples, server steps."""

from typing import Any

import pytest
import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.algorithms.lr_bpfl import LRBPFL, Client
from lrbpfl.algorithms.protocol import Task
from lrbpfl.algorithms.server_step import ServerOptimiser
from lrbpfl.core.descent import Data
from lrbpfl.core.network import LayerKind, Params
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator
from tests.algorithms.hand import play, predict, start
from tests.conftest import CLASSES, Toy


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
        algorithm = LRBPFL(warm_start=warm_start, adapt_steps=0, init_std=0.1, init_precision=0.0)
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


@pytest.mark.parametrize(
    ("kind", "expected"), [("auto", ["2"]), ("all", ["0", "2"]), ("conv", ["0"]), ("dense", ["2"])]
)
def test_masks_go_where_they_are_asked_for(kind: LayerKind, expected: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, CLASSES))
    task, algorithm = Task(model, CLASSES), LRBPFL(mask_layers=kind)
    data = Data(torch.randn(8, 1, 6, 6, generator=generator(0)), torch.arange(8) % CLASSES)
    server, client = algorithm.init_server(task, generator(0)), algorithm.init_client(task, generator(0))
    upload, kept, _ = algorithm.client_update(task, server.W, client, data, generator(0))
    assert list(kept.gates) == [f"{name}.weight" for name in expected]
    assert list(upload) == list(server.W)
    assert predict(algorithm, task, server.W, kept, data, data.x).shape == (algorithm.predict_samples, 8, CLASSES)


def test_a_model_without_dense_layers_is_masked_all_over() -> None:
    task = Task(nn.Sequential(nn.Conv2d(1, CLASSES, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), CLASSES)
    LRBPFL().init_server(task, generator(0))
    assert list(LRBPFL().init_client(task, generator(0)).gates) == ["0.weight"]


def test_a_model_without_such_a_layer_is_refused(toy: Toy) -> None:
    with pytest.raises(BadInput, match="mask_layers = 'conv'"):
        LRBPFL(mask_layers="conv").init_server(toy.task, generator(0))


@pytest.mark.parametrize("best", [0, 10, 20, 40])
def test_held_out_examples_choose_the_likeliest_of_four(toy: Toy, monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    """Adapted on six of ten examples, judged on the other four; the adaptation itself is only pretended."""
    data, seen = Data(toy.train[0].x[:10], torch.arange(10) % CLASSES), []

    def adapt(
        self: LRBPFL, task: Task, W: Params, client: Client, part: Data, *rest: Any, steps: int, lr: float
    ) -> Any:
        seen.append((len(part.y), steps))
        return steps, None

    def nll(self: LRBPFL, task: Task, W: Params, masks: int, gates: None, judge: Data, *rest: Any) -> torch.Tensor:
        assert len(judge.y) == 4
        return torch.tensor(abs(masks - best) + 1.0)

    run, algorithm = start(LRBPFL(), toy), LRBPFL(adapt_holdout=0.4, adapt_steps=40)
    monkeypatch.setattr(LRBPFL, "_adapt", adapt)
    monkeypatch.setattr(LRBPFL, "_nll", nll)
    assert algorithm._chosen_steps(toy.task, run.server.W, run.clients[0], data, generator(0)) == best
    assert seen == [(6, 0), (6, 10), (6, 20), (6, 40)]


def test_the_client_s_own_data_ask_for_all_steps(toy: Toy) -> None:
    run, algorithm = start(LRBPFL(), toy), LRBPFL(adapt_holdout=0.4, adapt_steps=40, adapt_lr=0.01)
    assert algorithm._chosen_steps(toy.task, run.server.W, run.clients[0], toy.train[0], generator(0)) == 40


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
def test_the_server_steps_as_it_is_told(toy: Toy, optimiser: ServerOptimiser) -> None:
    algorithm = LRBPFL(server_optimiser=optimiser, server_lr=0.01)
    run = play(algorithm, toy, start(algorithm, toy), range(2))
    plain = play(LRBPFL(), toy, start(LRBPFL(), toy), range(2))
    assert not trees.equal(run.server.W, plain.server.W)
    assert run.server.m is not None and (run.server.v is None) == (optimiser == "momentum")
    assert trees.equal(algorithm.broadcast(toy.task, run.server, 0), run.server.W)
