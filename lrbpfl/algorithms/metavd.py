"""MetaVD (Jeon, Hong, Yun and Kim, NeurIPS 2023, arXiv:2510.20225) in its FedAvg flavour.

Client m's weights are Gaussian, w ~ N(theta, v_m): theta is shared, and a hypernetwork at the server makes the
log-variances l_m from an embedding of the client. Objective: sum_m g_m (E[log-likelihood] - beta KL), g_m = n_m / n.
What is followed step by step is the authors' public code, not an Algorithm box; "original" means that code.

Departures: local work is counted in mini-batch steps of 32 instead of epochs of 64, as in the LR-BPFL paper; weights
are never pruned. The output bias of the hypernetwork starts at a positive value: where its output is below zero, v sits
at its lower end and a client's l has no gradient, so about half the weights would start dead; its other weights start
as torch's. The KL's warm-up is stretched to start at 0 and to end at beta. The server shortens the pseudo-gradient of
hypernetwork and embeddings only: theta is the clients' mean, always.
The original's beta and server rates are kept although they suit large layers only: beta weighs a mean over weights, so
that its pull on each grows as the layer shrinks. On toy data (one seed) with 128 and 8,192 noisy weights the
log-variances ran to their limits within 20 to 45 rounds, and accuracy fell; with beta = 1 (8,192) they hardly moved.
At prediction a sample is one draw of the weights, where the code draws noise for each activation: for one example and
one noisy linear layer the distribution is the same, and no example's prediction depends on the others beside it.
Every client of the training federation predicts with its own l_m, one that was never sampled with the l_m of an
embedding that only weight decay has moved; the code gives everybody the constant -8.5 (`predict_rates`). New clients
(no embedding) get that constant; should one train, its upload moves theta, weighted as any other, and not the
hypernetwork. A client with one class takes part as any other. Nobody trains before predicting; clients keep nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.protocol import (
    STRICT,
    Count,
    Ensemble,
    Info,
    NonNegative,
    Positive,
    Steps,
    Task,
    Update,
    first_params,
    log_label_prior,
)
from lrbpfl.core import dropout
from lrbpfl.core.descent import Data, Rate, batches, descend
from lrbpfl.core.dropout import HIGHEST, LOWEST, LogVariances, Stochastic
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, Weights, forward, inputs
from lrbpfl.core.objective import nll, probabilities
from lrbpfl.errors import BadInput

Network = Callable[[Params, Tensor], Tensor]  # h(psi, embeddings (m, d_e)): (m, |l|)


class Hyper(NamedTuple):
    """What the clients' log-variances are made from."""

    network: Params  # psi
    embeddings: Tensor  # (K, d_e), e_m in row m


class Server(NamedTuple):
    """The shared network, what makes the log-variances, the momentum of the latter, and how many rounds have been."""

    theta: Params
    hyper: Hyper
    momentum: Hyper
    rounds: Tensor  # ()


class Message(NamedTuple):
    """To a client, and trained back from it."""

    W: Params  # theta
    log_variance: LogVariances  # l_m
    kl_weight: Tensor  # (), beta so far: a client cannot know the round


class PersonalNoise(NamedTuple):
    """A client's predictor: weights, their log-variances and the client's label prior."""

    W: Params
    log_variance: LogVariances
    log_prior: Tensor  # (classes,)


class NoisyEnsemble(NamedTuple):
    """A client's model with its noise drawn."""

    W: Params
    noisy: tuple[Params, ...]  # the weights with noise, one dict for each sample
    log_prior: Tensor  # (classes,)


@dataclass(frozen=True, config=STRICT)
class MetaVD:
    """A shared network whose weights carry as much noise as a hypernetwork finds right for the client."""

    HOLDS: ClassVar[str] = "How much noise the server found right for the client's weights."

    local_steps: Steps = 20  # R, mini-batch steps a round; 20 in the LR-BPFL paper; original: 5 epochs
    lr: NonNegative = 0.02  # of theta and l, plain SGD; original; LR-BPFL paper: unspecified
    batch_size: Count = 32  # B; 32 in the LR-BPFL paper; original: 64
    clip: Positive = 5.0  # longest gradient of theta and l together; original
    stochastic: Stochastic = "fc2"  # weights with noise: the second Linear layer's (original), or every layer's
    samples: Count = 3  # noisy passes for one batch, and networks at prediction; original
    average: Literal["logits", "probabilities"] = "logits"  # what is averaged over the samples; original: logits
    noise: NonNegative = 1.0  # scale of the noise, 1 in the original; with beta 0 and equal l_m, 0 is FedAvg
    beta: NonNegative = 10.0  # weight of the mean KL of a weight, not divided by n_m; original
    warmup: Steps = 20  # rounds in which beta grows from 0; original: the first 2% of 1000 rounds
    predict_rates: Literal["own", "constant"] = "own"  # predict with l_m (ours), or with -8.5 for everybody (original)
    hidden: Count = 200  # width of the hypernetwork's three hidden layers; original
    output_bias: float = 0.5  # of the hypernetwork at the start; ours, about ten times the spread of its outputs
    hyper_lr: NonNegative = 0.9  # of hypernetwork and embeddings at the server; original
    hyper_momentum: NonNegative = 0.6  # of the hypernetwork; original
    embedding_momentum: NonNegative = 0.3  # of the embeddings; original
    hyper_decay: NonNegative = 5e-4  # weight decay of both; original
    hyper_clip: Positive = 100.0  # longest pseudo-gradient of both together; original
    weights: Weights = "uniform"  # of theta_0; torch's own, as for FedAvg

    def init_server(self, task: Task, rng: Generator) -> Server:
        """theta_0, psi_0, and an embedding of size int(1 + K / 4) for each of K clients, from N(0, 1)."""
        clients = task.num_clients
        if clients < 1:
            raise BadInput(
                "MetaVD keeps an embedding for every client: the task must say how many clients take part "
                "(Task.num_clients)"
            )
        theta = first_params(task, self.weights, rng)
        size = sum(theta[name].numel() for name in dropout.stochastic_weights(task.model, self.stochastic))
        width = int(1 + clients / 4)
        network = init_hypernetwork([width, *[self.hidden] * 3, size], self.output_bias, rng)
        hyper = Hyper(network=network, embeddings=torch.randn(clients, width, generator=rng))
        rest = trees.tree_map(torch.zeros_like, hyper)
        return Server(theta=theta, hyper=hyper, momentum=rest, rounds=torch.zeros(()))

    def init_client(self, task: Task, rng: Generator) -> None:
        """Clients keep nothing."""

    def broadcast(self, task: Task, server: Server, client_id: int) -> Message:
        """Everybody gets theta, and l_m = clamp(h(e_m), -8.5, 8.5) - 8.5, or -8.5 throughout without an embedding."""
        theta, hyper, _, rounds = server
        noisy = {name: theta[name] for name in dropout.stochastic_weights(task.model, self.stochastic)}
        if client_id < len(hyper.embeddings):
            log_variance = unflatten(log_variances(hyper, [client_id])[0], noisy)
        else:
            log_variance = constant(noisy)
        return Message(W=theta, log_variance=log_variance, kl_weight=torch.tensor(self.kl_weight(rounds.item())))

    def client_update(
        self, task: Task, message: Message, client: None, data: Data, rng: Generator
    ) -> tuple[Message, None, Info]:
        """R steps on theta and l_m together, on the negative log-likelihood + beta KL."""
        log_prior = log_label_prior(task, data.y)

        def loss(W: Params, log_variance: LogVariances, batch: Data) -> Tensor:
            logits = dropout.noisy_logits(
                task.model, W, log_variance, batch.x, samples=self.samples, rng=rng, scale=self.noise
            )
            return nll(self._averaged(logits) + log_prior, batch.y) + message.kl_weight * dropout.kl(W, log_variance)

        steps = batches(data, self.batch_size, self.local_steps, rng)
        rate = Rate("sgd", self.lr * task.pace)
        (W, log_variance), mean = descend(loss, (message.W, message.log_variance), steps, (rate, rate), self.clip)
        return Message(W=W, log_variance=log_variance, kl_weight=message.kl_weight), None, {"loss": mean}

    def server_aggregate(self, task: Task, server: Server, updates: Iterable[Update], rng: Generator) -> Server:
        """The mean of theta_m, weighted by g_m / v_m where there is noise and by g_m elsewhere; a step on psi and e."""
        seen: list[tuple[int, int, Tensor]] = []  # client, examples and l after training: little, beside the networks

        def weighed() -> Iterator[tuple[tuple[Params, Params], int]]:
            for client_id, num_examples, (W, log_variance, _) in updates:
                seen.append((client_id, num_examples, flatten(log_variance)))
                precision = {name: 1 / v for name, v in dropout.variances(log_variance).items()}
                yield ({**W, **{name: p * W[name] for name, p in precision.items()}}, precision), num_examples

        theta, precision = trees.mean(weighed())
        theta = {**theta, **{name: theta[name] / p for name, p in precision.items()}}
        hyper, momentum = self._learn(server, seen)
        return Server(theta=theta, hyper=hyper, momentum=momentum, rounds=server.rounds + 1)

    def personalise(self, task: Task, message: Message, client: None, data: Data, rng: Generator) -> PersonalNoise:
        """The shared network with the client's own log-variances, or with the constant ones."""
        W, log_variance, _ = message
        rates = log_variance if self.predict_rates == "own" else constant(log_variance)
        return PersonalNoise(W=W, log_variance=rates, log_prior=log_label_prior(task, data.y))

    def predict(self, task: Task, personal: PersonalNoise, x: Inputs, rng: Generator) -> Tensor:
        """Softmax of the mean logits of sampled networks, (1, n, classes), or of each one's, (samples, n, classes)."""
        tensors, logits = self.ensemble(task, personal, rng)
        return probabilities(lambda x: logits(tensors, x), x)

    def ensemble(self, task: Task, personal: PersonalNoise, rng: Generator) -> Ensemble:
        """Networks that differ in their noisy weights."""
        W, log_variance, log_prior = personal
        networks = [dropout.draw(W, log_variance, rng, self.noise) for _ in range(self.samples)]
        noisy = tuple({name: w[name] for name in log_variance} for w in networks)

        def logits(own: NoisyEnsemble, x: Inputs) -> Tensor:
            x = inputs(x)
            samples = torch.stack([forward(task.model, {**own.W, **noisy}, x) for noisy in own.noisy])
            return self._averaged(samples) + own.log_prior

        return Ensemble(NoisyEnsemble(W, noisy, log_prior), logits)

    def kl_weight(self, rounds: float) -> float:
        """The KL's weight after so many rounds, p of the warm-up: beta (1 + tanh(6 (p - 1/2)) / tanh(3)) / 2.

        That is beta sigmoid(12 (p - 1/2)), the original's curve, stretched to run from 0 to beta.
        """
        p = min(rounds / self.warmup, 1.0) if self.warmup else 1.0
        return self.beta * 0.5 * (1 + math.tanh(6 * (p - 0.5)) / math.tanh(3))

    def step(
        self, hyper: Hyper, momentum: Hyper, ids: list[int], shares: Tensor, after: Tensor, network: Network
    ) -> tuple[Hyper, Hyper]:
        """SGD on psi and e along J^T sum_m g_m (l_m before - l_m after), shortened; the momentum comes back, too.

        Clients m by their `ids`, g_m as `shares` (m,), l_m after training as `after` (m, |l|).
        """
        learned = trees.tree_map(lambda p: p.detach().requires_grad_(), hyper)
        before = log_variances(learned, ids, network)
        names, leaves = zip(*trees.named_leaves(learned), strict=True)
        slopes = torch.autograd.grad(before, leaves, shares[:, None] * (before.detach() - after))
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(slope) for slope in slopes]))
        shrink = self.hyper_clip / length.clamp(min=self.hyper_clip)
        slope = trees.rebuild(hyper, dict(zip(names, slopes, strict=True)))

        def push(factor: float, *trees_of: trees.Tree) -> trees.Tree:
            return trees.tree_map(lambda m, g, p: factor * m + shrink * g + self.hyper_decay * p, *trees_of)

        momentum = Hyper(
            network=push(self.hyper_momentum, momentum.network, slope.network, hyper.network),
            embeddings=push(self.embedding_momentum, momentum.embeddings, slope.embeddings, hyper.embeddings),
        )
        return trees.tree_map(lambda p, m: p - self.hyper_lr * m, hyper, momentum), momentum

    def _learn(self, server: Server, seen: list[tuple[int, int, Tensor]]) -> tuple[Hyper, Hyper]:
        """The server's step with the clients that have an embedding; without any it rests."""
        total = sum(num_examples for _, num_examples, _ in seen)
        known = [update for update in seen if update[0] < len(server.hyper.embeddings)]
        if not known:
            return server.hyper, server.momentum
        ids, sizes, after = zip(*known, strict=True)
        shares = torch.tensor(sizes) / total
        return self.step(server.hyper, server.momentum, list(ids), shares, torch.stack(after), hypernetwork)

    def _averaged(self, logits: Tensor) -> Tensor:
        """The mean over samples as the one sample, (1, batch, classes), or the samples as they are."""
        return logits.mean(dim=0, keepdim=True) if self.average == "logits" else logits


def init_hypernetwork(widths: list[int], output_bias: float, rng: Generator) -> Params:
    """Linear layers between these widths, U(-b, b) with b = 1 / sqrt(inputs); the last bias is a constant."""
    psi: Params = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        bound = fan_in**-0.5
        psi[f"{i}.weight"] = torch.empty(fan_out, fan_in).uniform_(-bound, bound, generator=rng)
        psi[f"{i}.bias"] = torch.empty(fan_out).uniform_(-bound, bound, generator=rng)
    psi[f"{i}.bias"] = torch.full_like(psi[f"{i}.bias"], output_bias)
    return psi


def hypernetwork(psi: Params, embeddings: Tensor) -> Tensor:
    """h: linear layers with a leaky ReLU (slope 0.1) between them, (m, d_e) -> (m, |l|)."""
    h, last = embeddings, len(psi) // 2 - 1
    for i in range(last):
        h = nnf.leaky_relu(nnf.linear(h, psi[f"{i}.weight"], psi[f"{i}.bias"]), 0.1)
    return nnf.linear(h, psi[f"{last}.weight"], psi[f"{last}.bias"])


def log_variances(hyper: Hyper, ids: list[int], network: Network = hypernetwork) -> Tensor:
    """l_m = clamp(h(e_m), -8.5, 8.5) - 8.5 of these clients, (m, |l|)."""
    return network(hyper.network, hyper.embeddings[ids]).clamp(LOWEST, HIGHEST) + LOWEST


def constant(noisy: Params) -> LogVariances:
    """The log-variance -8.5 for every weight: the smallest variance there is."""
    return {name: torch.full_like(w, LOWEST) for name, w in noisy.items()}


def flatten(log_variance: LogVariances) -> Tensor:
    """All log-variances in one row, (|l|,)."""
    return torch.cat([piece.flatten() for piece in log_variance.values()])


def unflatten(row: Tensor, noisy: Params) -> LogVariances:
    """The inverse of `flatten`, into the shapes of the weights with noise; tensors of their own."""
    pieces = row.split([w.numel() for w in noisy.values()])
    return {name: piece.reshape(w.shape).clone() for (name, w), piece in zip(noisy.items(), pieces, strict=True)}
