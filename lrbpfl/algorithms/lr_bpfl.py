"""LR-BPFL (Zhang, Liu, Simeone, Wang, Pezaros and Zhu, AISTATS 2025, arXiv:2410.14390), Algorithm 1.

Departures of the defaults from the paper's printed values are the fields that `PRESETS["paper"]` sets back. Where the
paper is silent: a convolution's mask spans (output channel, input channel) and is shared over kernel positions; biases
carry no mask; a gate acts once, on the sampled product; the first gate is fixed at one; a closed gate leaves the KL,
and the prior mean follows the rank; the gate penalty is a part of the free energy, so that, like the KL, it weighs less
at a client with more data; a fresh posterior's noise falls with the client's examples per class.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl.algorithms import server_step
from lrbpfl.algorithms.protocol import (
    STRICT,
    Count,
    Info,
    NonNegative,
    Positive,
    Probability,
    Steps,
    Task,
    Update,
    Wishes,
    first_params,
    log_label_prior,
)
from lrbpfl.algorithms.server_step import Server, ServerOptimiser
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data, OptimiserName, Rate, batches, descend
from lrbpfl.core.masks import Gates, Masks
from lrbpfl.core.network import LayerKind, Params, Weights, maskable, rows_of_classes
from lrbpfl.core.objective import Likelihood, free_energy, mask_logits, nll, probabilities
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator


class Client(NamedTuple):
    """What a client keeps: its gates, and its mask if the next round is to go on from it."""

    gates: Gates  # gamma_k
    masks: Masks | None  # phi_k, psi_k


class Personal(NamedTuple):
    """A client's model: the shared network, its private mask and its label prior."""

    W: Params
    masks: Masks  # phi_k, psi_k
    gates: Gates  # gamma_k
    log_prior: Tensor  # (classes,)


@dataclass(frozen=True, config=STRICT)
class LRBPFL:
    """One shared deterministic network W, and a private low-rank Bayesian mask at every client."""

    label_prior: NonNegative = 1.0  # what it asks of the task: smooths class frequencies in the likelihood; paper: none
    max_rank: Count = 2  # r_max; paper: 8
    adaptive_rank: bool = True  # train and prune the gates; off: every mask keeps r_max ranks
    threshold: Probability = 0.95  # lambda-bar, Eq. (10); paper: 0.95
    gate_init: float = 3.5  # gamma at the start; paper: 3.5
    gate_penalty: NonNegative = 30.0  # weight of sum lambda^2 in F; paper: 0.1
    prior_variance: Positive = 0.1  # of p(Q) and p(R); paper: 0.1
    mask_mean: Positive = 1.0  # of a mask's entries under the prior, and at the start; paper: 1
    temperature: NonNegative = 1.0  # weight of the KL; paper: 1
    likelihood: Likelihood = "elbo"  # mean of logs (paper), or log of the mean over the C masks
    mask_layers: LayerKind = "auto"  # which layers carry masks, auto: Linear ones if there are any; paper: all
    mask_bias: bool = False  # the bias as one more input of the masked matrix; paper: unspecified
    warm_start: bool = False  # keep phi, psi, drawn once before any data, from round to round; Algorithm 1: afresh
    samples: Count = 1  # C in training; paper: 4
    predict_samples: Count = 16  # C at prediction; paper: 4
    update: Literal["coordinate", "joint"] = "coordinate"  # masks first, then W (paper), or both at once (its ablation)
    mask_steps: Steps = 10  # T_L, steps on (phi, psi, gamma) a round; paper: 20
    model_steps: Steps = 20  # steps on W under the adapted mask; Algorithm 1: 1
    adapt_steps: Steps = 60  # steps on the mask before a client predicts; paper: unspecified
    adapt_holdout: Probability = 0.0  # share of a client's data that picks 0, 1/4, 1/2 or all of adapt_steps; 0: all
    batch_size: Count = 32  # B; paper: 32
    mask_lr: NonNegative = 0.003  # eta of phi, psi; paper: 0.01
    adapt_lr: NonNegative = 0.001  # the same before a client predicts; paper: unspecified
    gate_lr: NonNegative = 0.5  # eta of gamma; paper: 0.001
    model_lr: NonNegative = 0.01  # eta of W; paper: 0.001
    mask_optimiser: OptimiserName = "adam"  # of phi, psi; paper: gradient descent
    gate_optimiser: OptimiserName = "sgd"  # of gamma; Adam would close all gates alike, however useful their ranks
    model_optimiser: OptimiserName = "momentum"  # of W; paper: gradient descent
    model_decay: NonNegative = 0.0  # weight decay of W; paper: unspecified, 0.0005 in its code
    class_rows: bool = True  # the mean of a class's row of the last layer: by how far clients moved it; paper: plain
    server_optimiser: ServerOptimiser = "mean"  # what the server does with the clients' mean; paper: takes it
    server_lr: NonNegative = 1.0  # of the server's step towards the mean; paper: 1
    weights: Weights = "kaiming"  # of W^0; paper: unspecified
    init_spread: NonNegative = 0.01  # standard deviation of the initial means around the prior's; paper: unspecified
    init_std: Positive = 0.3  # standard deviation of a fresh posterior, without data; paper: unspecified
    init_precision: NonNegative = 0.03  # what an example per class adds to its 1 / std^2; paper: unspecified

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        # Without a label prior a mask must go further: it has to silence the classes that its client does not have.
        # Masks on the convolutions help there; the noise is what suits masks on all layers.
        "no-prior": {
            "mask_lr": 0.01,
            "adapt_lr": 0.01,
            "adapt_steps": 120,
            "class_rows": False,
            "mask_layers": "all",
            "samples": 2,
            "init_precision": 0.28,
            "label_prior": 0.0,
        },
        "paper": {
            "max_rank": 8,
            "mask_layers": "all",
            "samples": 4,
            "predict_samples": 4,
            "mask_steps": 20,
            "model_steps": 1,
            "mask_lr": 0.01,
            "gate_lr": 0.001,
            "model_lr": 0.001,
            "mask_optimiser": "sgd",
            "model_optimiser": "sgd",
            "adapt_steps": 20,
            "adapt_lr": 0.01,
            "init_std": 0.05,
            "init_precision": 0.0,
            "class_rows": False,
            "gate_penalty": 0.1,
            "label_prior": 0.0,
        },
    }

    def wishes(self) -> Wishes:
        """A label prior, but for the presets."""
        return Wishes(label_prior=self.label_prior)

    def init_server(self, task: Task, rng: Generator) -> Server:
        """The shared network W^0."""
        if not maskable(task.model, self.mask_layers):
            raise BadInput(
                f"the model has no layer of the kind that mask_layers = {self.mask_layers!r} asks for: set it to 'all'"
            )
        return server_step.start(first_params(task, self.weights, rng), self.server_optimiser)

    def init_client(self, task: Task, rng: Generator) -> Client:
        """A client keeps its gates gamma_k, and its mask only if it is to start from it again."""
        gamma = self.gate_init if self.adaptive_rank else math.inf
        gates = {name: gating.init(self.max_rank, gamma) for name in maskable(task.model, self.mask_layers)}
        return Client(gates=gates, masks=self._fresh_masks(task, gates, None, rng) if self.warm_start else None)

    def broadcast(self, task: Task, server: Server, client_id: int) -> Params:
        """Everybody gets W^t."""
        return server.W

    def client_update(
        self, task: Task, message: Params, client: Client, data: Data, rng: Generator
    ) -> tuple[Params, Client, Info]:
        """Adapt the mask to W^t, then W to the mask; W_k goes up, the rest stays."""
        if self.update == "joint":
            W, masks, gates, loss = self._joint(task, message, client, data, rng)
        else:
            masks, gates = self._adapt(task, message, client, data, rng, steps=self.mask_steps, lr=self.mask_lr)
            (W,), loss = descend(  # the KL and the penalty do not depend on W
                lambda W, batch: self._nll(task, W, masks, gates, batch, data, rng),
                (message,),
                self._batches(data, self.model_steps, rng),
                (Rate(self.model_optimiser, self.model_lr * task.pace, self.model_decay),),
            )
        if self.adaptive_rank:
            gates = {name: gating.prune(gamma, self.threshold) for name, gamma in gates.items()}  # Eq. (10)
        ranks = [gating.rank(gamma) for gamma in gates.values()]
        kept = Client(gates=gates, masks=masks if self.warm_start else None)
        return W, kept, {"loss": loss, "rank": sum(ranks) / len(ranks)}

    def server_aggregate(self, task: Task, server: Server, updates: Iterable[Update], rng: Generator) -> Server:
        """W^{t+1} = sum_k l_k W_k^t, l_k proportional to the clients' data (rows of classes as `class_rows` says).

        Or a step towards it.
        """
        rows = rows_of_classes(task.model, task.num_classes) if self.class_rows else ()
        mean = server_step.mean(server.W, updates, rows)
        return server_step.step(server, mean, self.server_optimiser, self.server_lr)

    def personalise(self, task: Task, message: Params, client: Client, data: Data, rng: Generator) -> Personal:
        """A mask adapted to the final W on the client's own training data; a new client starts from open gates."""
        steps = self._chosen_steps(task, message, client, data, rng) if self.adapt_holdout else self.adapt_steps
        masks, gates = self._adapt(task, message, client, data, rng, steps=steps, lr=self.adapt_lr)
        return Personal(W=message, masks=masks, gates=gates, log_prior=log_label_prior(task, data.y))

    def predict(self, task: Task, personal: Personal, x: Tensor, rng: Generator) -> Tensor:
        """The softmax under each of C masks, (C, n, classes); the same masks for all of x."""
        W, masks, gates, log_prior = personal
        noise = masking.draw(masks, self.predict_samples, rng)
        return probabilities(lambda x: mask_logits(task.model, W, masks, gates, noise, x) + log_prior, x)

    def _adapt(
        self, task: Task, W: Params, client: Client, data: Data, rng: Generator, *, steps: int, lr: float
    ) -> tuple[Masks, Gates]:
        """Fresh phi, psi, or those the client kept, then steps on (phi, psi, gamma) with W fixed."""
        (masks, gates), _ = descend(
            lambda masks, gates, batch: self._free_energy(task, W, masks, gates, batch, data, rng),
            (client.masks or self._fresh_masks(task, client.gates, data.y, rng), client.gates),
            self._batches(data, steps, rng),
            (Rate(self.mask_optimiser, lr), Rate(self.gate_optimiser, self.gate_lr)),
        )
        return masks, gates

    def _chosen_steps(self, task: Task, W: Params, client: Client, data: Data, rng: Generator) -> int:
        """Of 0, 1/4, 1/2 and all of `adapt_steps`, those after which held-out examples of the client are likeliest."""
        order = torch.randperm(len(data.y), generator=rng).to(data.y.device)
        held = round(self.adapt_holdout * len(order))
        if not 0 < held < len(order):
            return self.adapt_steps
        judge, part = (Data(x=data.x[chosen], y=data.y[chosen]) for chosen in (order[:held], order[held:]))
        seed = int(torch.randint(2**31, (), generator=rng))

        def judged(steps: int) -> float:
            same = generator(seed, "holdout")  # each number of steps begins like the others
            masks, gates = self._adapt(task, W, client, part, same, steps=steps, lr=self.adapt_lr)
            with torch.no_grad():
                return self._nll(task, W, masks, gates, judge, part, same).item()

        return min((self.adapt_steps * quarters // 4 for quarters in (0, 1, 2, 4)), key=judged)

    def _joint(
        self, task: Task, W: Params, client: Client, data: Data, rng: Generator
    ) -> tuple[Params, Masks, Gates, float]:
        """The ablation: T_L steps on (phi, psi, gamma) and W together."""
        (masks, gates, W), loss = descend(
            lambda masks, gates, W, batch: self._free_energy(task, W, masks, gates, batch, data, rng),
            (client.masks or self._fresh_masks(task, client.gates, data.y, rng), client.gates, W),
            self._batches(data, self.mask_steps, rng),
            (
                Rate(self.mask_optimiser, self.mask_lr),
                Rate(self.gate_optimiser, self.gate_lr),
                Rate(self.model_optimiser, self.model_lr * task.pace, self.model_decay),
            ),
        )
        return W, masks, gates, loss

    def _fresh_masks(self, task: Task, gates: Gates, y: Tensor | None, rng: Generator) -> Masks:
        """As sure as its examples make a client: a few steps hardly move the noise, so it starts where it belongs."""
        layers = maskable(task.model, self.mask_layers)
        if self.mask_bias:
            layers = masking.with_bias(layers, dict(task.model.named_parameters()))
        evidence = 0.0 if y is None else examples_per_class(y)
        std = (self.init_std**-2 + self.init_precision * evidence) ** -0.5
        return masking.init(layers, gates, spread=self.init_spread, std=std, rng=rng, mask_mean=self.mask_mean)

    def _batches(self, data: Data, steps: int, rng: Generator) -> Iterator[Data]:
        return batches(data, self.batch_size, steps, rng)

    def _nll(
        self, task: Task, W: Params, masks: Masks, gates: Gates, batch: Data, data: Data, rng: Generator
    ) -> Tensor:
        """-E_q[log p(batch | W o M)] per example, by C sampled masks."""
        noise = masking.draw(masks, self.samples, rng)
        logits = mask_logits(task.model, W, masks, gates, noise, batch.x) + log_label_prior(task, data.y)
        return nll(logits, batch.y, self.likelihood)

    def _free_energy(
        self, task: Task, W: Params, masks: Masks, gates: Gates, batch: Data, data: Data, rng: Generator
    ) -> Tensor:
        """F_k(W, phi_k, psi_k, lambda_k) per example, on one batch.  Eq. (8)"""
        return free_energy(
            self._nll(task, W, masks, gates, batch, data, rng),
            masks,
            gates,
            prior_std=math.sqrt(self.prior_variance),
            num_data=len(data.y),
            temperature=self.temperature,
            gate_penalty=self.gate_penalty,
            mask_mean=self.mask_mean,
        )


def examples_per_class(y: Tensor) -> float:
    """How many examples there are of a class, rare classes counted in part: n / exp(entropy of the labels)."""
    frequencies = torch.bincount(y).double() / len(y)
    return len(y) / math.exp(torch.special.entr(frequencies).sum().item())
