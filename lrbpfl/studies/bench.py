"""How fast a mask step is, and what a second worker brings: ratios, interleaved, best of several, one thread."""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.pfedbayes import PFedBayes
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data, Rate, descend
from lrbpfl.core.gaussian import sample
from lrbpfl.core.masks import Layout, Masks
from lrbpfl.core.modes import learning
from lrbpfl.core.network import Params, forward, init_params, maskable
from lrbpfl.core.objective import free_energy, masked_network, nll
from lrbpfl.core.precision import computing
from lrbpfl.engines import registry as engines
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.options import Options
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.work import ClientData, Setup, keep_memory, one_thread
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from lrbpfl.states import Memory

BATCH, SAMPLES, RANK = 32, 4, 8  # B, C, r of the paper
CLIENTS, STEPS = 10, 20  # of the round that workers share
BAYES_STEPS = 10  # of pFedBayes, timed together


def measure(repeats: int) -> dict[str, float]:
    """The figures of `lrbpfl bench`: seconds of single steps, and ratios of the best of `repeats` each."""
    keep_memory()
    with one_thread():
        steps = best(_steps(), repeats)
    workers = measure_workers(repeats)
    plain, mask, bayes = steps["plain"], steps["mask"], steps["pfedbayes"] / BAYES_STEPS
    return {
        "plain_step_seconds": plain,
        "plain_step_channels_last_seconds": steps["plain_channels_last"],
        "plain_step_bf16_seconds": steps["plain_bf16"],
        "channels_last_step_over_bf16_step": steps["plain_channels_last"] / steps["plain_bf16"],
        "mask_step_seconds": mask,
        "rank_summed_step_seconds": steps["rank_summed"],
        "mask_step_over_plain_steps": mask / (SAMPLES * plain),
        "mask_step_over_channels_last_steps": mask / (SAMPLES * steps["plain_channels_last"]),
        "rank_summed_over_mask_step": steps["rank_summed"] / mask,
        "pfedbayes_step_seconds": bayes,
        "pfedbayes_step_over_plain_step": bayes / plain,
        "pfedbayes_step_over_channels_last_step": bayes / steps["plain_channels_last"],
        "round_one_worker_seconds": workers["1"],
        "round_two_workers_seconds": workers["2"],
        "workers_speedup": workers["1"] / workers["2"],
        "repeats": repeats,
    }


def best(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each action, in seconds, all of them taking turns after a first go that does not count."""
    seconds = dict.fromkeys(actions, float("inf"))
    for action in actions.values():
        action()
    for _ in range(repeats):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def _steps() -> dict[str, Callable[[], object]]:
    """Training steps on the paper's CNN: plain, with C masks of rank r, with ranks summed, and some of pFedBayes."""
    rng = generator(0, "bench")
    model = cnn(10)
    W, layers = init_params(model, rng, "kaiming"), maskable(model)
    network = masked_network(model, layers, {name: gating.init(RANK) for name in layers})
    masks = masking.init(network.places, spread=0.1, std=0.05, rng=rng)
    prior_mean = masking.prior_mean(network.places)
    batch = Data(torch.randn(BATCH, 3, 32, 32, generator=rng), torch.randint(10, (BATCH,), generator=rng))

    def mask_step(logits: Callable[[Tensor], Tensor]) -> None:
        def objective(masks: Masks, batch: Data) -> Tensor:
            draws = sample(masks, masking.draw(masks, SAMPLES, rng))
            kl = masking.kl_divergence(masks, prior_mean, prior_std=0.3)
            return free_energy(nll(logits(draws), batch.y), kl, temperature=1.0, num_data=300)

        descend(objective, (masks,), [batch], (Rate("adam", 0.01),))

    return {
        **_plain_steps(model, W, batch),
        "mask": lambda: mask_step(lambda draws: network.logits(W, draws, network.before(W, batch.x))),
        "rank_summed": lambda: mask_step(lambda draws: rank_summed(model, W, draws, network.places, batch.x)),
        "pfedbayes": _pfedbayes_steps(model, batch),
    }


def _plain_steps(model: nn.Module, W: Params, batch: Data) -> dict[str, Callable[[], object]]:
    """Steps on W alone: as torch does them, with channels last, and with channels last in bfloat16."""
    leaves = {name: w.clone().requires_grad_() for name, w in W.items()}

    def plain(logits: Callable[[], Tensor]) -> None:
        loss = nnf.cross_entropy(logits(), batch.y)
        torch.autograd.grad(loss, list(leaves.values()))

    def in_bf16() -> None:
        with computing("bf16"), learning():
            plain(lambda: forward(model, leaves, batch.x))

    return {
        "plain": lambda: plain(lambda: torch.func.functional_call(model, leaves, (batch.x,))),
        "plain_channels_last": lambda: plain(lambda: forward(model, leaves, batch.x)),
        "plain_bf16": in_bf16,
    }


def _pfedbayes_steps(model: nn.Module, batch: Data) -> Callable[[], object]:
    """Steps on a client's distribution over all weights, one network drawn for each."""
    algorithm, task, rng = PFedBayes(adapt_steps=BAYES_STEPS, batch_size=BATCH), Task(model, 10), generator(0, "bayes")
    message = algorithm.broadcast(task, algorithm.init_server(task, rng), 0)
    client = algorithm.init_client(task, rng)
    return lambda: algorithm.personalise(task, message, client, batch, rng)


def rank_summed(model: nn.Module, W: Params, draws: Tensor, places: Layout, x: Tensor) -> Tensor:
    """The same logits without materialised masks: every layer r times, sum_r Q_r o layer(W, R_r o x).

    Only for the paper's CNN (plain layers in sequence); it is what `MaskedNetwork.logits` is measured against.
    """

    def member(drawn: Tensor) -> Tensor:
        factors = masking.factors(drawn, places)
        h = x.contiguous(memory_format=torch.channels_last)
        for name, layer in model.named_children():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                Q, R = factors[f"{name}.weight"]
                h = _layer(layer, W[f"{name}.weight"], Q, R, h) + _spread(W[f"{name}.bias"], h)
            else:
                h = layer(h)
        return h

    return torch.stack([member(drawn) for drawn in draws.unbind()])


def _layer(layer: nn.Conv2d | nn.Linear, weight: Tensor, Q: Tensor, R: Tensor, h: Tensor) -> Tensor:
    def one_rank(q: Tensor, r: Tensor) -> Tensor:
        scaled = h * _spread(r, h)
        if isinstance(layer, nn.Linear):
            return nnf.linear(scaled, weight) * q
        return nnf.conv2d(scaled, weight, padding=1) * _spread(q, h)

    return torch.stack([one_rank(q, r) for q, r in zip(Q, R, strict=True)]).sum(0)


def _spread(vector: Tensor, h: Tensor) -> Tensor:
    """A value per channel, in a shape that broadcasts over h (batch, channels, ...)."""
    return vector.reshape(-1, *[1] * (h.dim() - 2))


def measure_workers(repeats: int) -> dict[str, float]:
    """One round of 10 clients x 20 steps with one worker and with two."""
    setup = _shared_round()
    return _rounds({str(n): Processes(setup, n) for n in (1, 2)}, repeats)


def measure_engines(repeats: int) -> dict[str, float]:
    """Seconds of the same round in every engine that is installed, one client after the other or two at a time."""
    setup = _shared_round()
    made = {name: engines.find(name)(setup, Options(workers=2), Memory()) for name in engines.names() if usable(name)}
    return {f"round_{name}_seconds": seconds for name, seconds in _rounds(made, repeats).items()} | {"repeats": repeats}


def usable(engine: str) -> bool:
    """Whether what our own engine needs is installed."""
    return engine != "ray" or find_spec("ray") is not None


def _shared_round() -> Setup:
    rng = generator(0, "bench-round")

    def data(n: int) -> Data:
        return Data(torch.randn(n, 3, 32, 32, generator=rng), torch.randint(10, (n,), generator=rng))

    clients = tuple(ClientData(name=str(k), train=data(100), test=data(1)) for k in range(CLIENTS))
    algorithm = LRBPFL(calibration=0.0, mask_steps=STEPS // 2, model_steps=STEPS // 2, predict_samples=1)
    return Setup(algorithm=algorithm, task=Task(cnn(10), 10), clients=clients, seed=0)


def _rounds(running: dict[str, Engine], repeats: int) -> dict[str, float]:
    try:
        return best({name: partial(_round, engine) for name, engine in running.items()}, repeats)
    finally:
        for engine in running.values():
            engine.close()


def _round(engine: Engine) -> None:
    """The first round; a client that fails is quick, and must not be taken for a fast one."""
    algorithm, task = engine.setup.algorithm, engine.setup.task
    server = algorithm.init_server(task, generator(0, "server"))
    for reply in engine.update({k: algorithm.broadcast(task, server, k) for k in range(CLIENTS)}, 0):
        if reply.failure:
            raise RuntimeError(f"client {reply.client_id} of the benchmark failed: {reply.failure}")
