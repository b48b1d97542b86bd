"""FedBE (Chen and Chao, ICLR 2021, arXiv:2009.01974), Algorithm 1.

Clients train as in FedAvg. The server takes their networks for samples of a distribution over global networks, draws
more of them, averages the predictions of all on unlabelled inputs that it holds, and distils that average into one
network, which is itself an average over the last part of its training (SWA).

Departures: clients train as FedAvg does in the experiments of the LR-BPFL paper, by mini-batch steps of plain SGD at a
constant rate, where the authors take epochs with momentum, decay and a schedule. Both distributions have the paper's
form, the Gaussian without a floor under its variance; the authors' code fits the Gaussian to normalised updates and
leaves the clients' sizes out of the Dirichlet draws, neither of which is offered. Sharpened labels are normalised
before the floor and after it (authors' code: after it only), so that no temperature can press all classes to the floor.
KL is the mean over the batch; the authors' code also divides it by the number of classes, so that its steps are that
much shorter. A pass over n public inputs counts ceil(n / batch) steps, as theirs does, but all batches are of one size:
the last of a pass reaches into the next. SWA starts after a share of the steps, because public sets may be small; the
last network is always averaged in; momentum starts anew after each snapshot; and the rate stays constant (the paper
lets it cycle, the authors' code does not). If the public inputs are a share of the clients' training data
(`data.public_fraction`), those inputs, without labels, leave their clients. With a label prior, each client trains and
predicts with its own; teachers and student are compared without any.

Clients keep nothing. Each of them, be it seen, never sampled, new or of one class, predicts with the global network.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.plain import PersonalNetwork, personal_model, softmax
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
)
from lrbpfl.core.descent import Data, Rate, batches, descend
from lrbpfl.core.inputs import Inputs, length
from lrbpfl.core.network import Params, Weights, forward
from lrbpfl.core.objective import plain_logits, probabilities
from lrbpfl.errors import BadInput

FLOOR = 1e-8  # under every pseudo-label; of the authors' code


@dataclass(frozen=True, config=STRICT)
class FedBE:
    """An ensemble of networks around the clients' mean, distilled into one on unlabelled inputs at the server.

    Those are `Task.public`; without any, a share of each training client's inputs moves there.
    """

    # Of each client's training split: what the server gets, unlabelled, when nobody says otherwise; as in MetaVD's
    # re-implementation of FedBE. LR-BPFL paper: unspecified.
    PUBLIC: ClassVar[float] = 0.04

    local_steps: Steps = 20  # R, mini-batch steps a round; 20 in the LR-BPFL paper; original: 20 epochs
    lr: NonNegative = 0.01  # eta of the clients, plain SGD; 0.01 in the LR-BPFL paper; original: with momentum 0.9
    batch_size: Count = 32  # B of the clients; 32 in the LR-BPFL paper; original: 40
    weights: Weights = "uniform"  # of w_0; torch's own, as for FedAvg
    distribution: Literal["gaussian", "dirichlet"] = "gaussian"  # p(w | D) that draws come from; original has both
    members: Steps = 10  # M, draws from it that teach; 10 in the original; LR-BPFL paper: unspecified, as all below
    clients_teach: bool = True  # whether the clients' networks are teachers beside their mean and the draws; original
    spread: NonNegative = 1.0  # of the Gaussian's standard deviation; 1 in the paper, 0.1 in authors' and MetaVD's code
    alpha: Positive = 1.0  # of the Dirichlet distribution; ours: the authors' code reads it, but never declares it
    temperature: Positive = 0.5  # Temp, pseudo-labels are p^(1 / Temp); authors' code; 1 leaves them as they are
    distil_epochs: Steps = 20  # passes of the student over the public inputs; authors' code
    distil_lr: NonNegative = 1e-3  # of the student, SGD with momentum 0.9; authors' code
    distil_decay: NonNegative = 1e-5  # weight decay of the student; authors' code
    distil_batch: Count = 128  # batch of the student; authors' code
    swa_start: Probability = 500 / 1580  # share of the student's steps before SWA; ours: 500 of 1580 in authors' code
    swa_every: Count = 25  # steps from one averaged snapshot to the next; authors' code

    def wishes(self) -> Wishes:
        """Inputs to distil on."""
        return Wishes(public_fraction=self.PUBLIC)

    def init_server(self, task: Task, rng: Generator) -> Params:
        """The network w_0."""
        public_inputs(task)
        return self._fedavg().init_server(task, rng)

    def init_client(self, task: Task, rng: Generator) -> None:
        """Clients keep nothing."""

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        """Everybody gets w_t."""
        return server

    def client_update(
        self, task: Task, message: Params, client: None, data: Data, rng: Generator
    ) -> tuple[Params, None, Info]:
        """R steps w <- w - eta grad f_k(w; batch)."""
        return self._fedavg().client_update(task, message, client, data, rng)

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        """w_{t+1}: the mean of the student's snapshots, on its way from wbar to what the teachers say together."""
        x, arrived = public_inputs(task), list(updates)
        wbar = self._fedavg().server_aggregate(task, server, arrived, rng)
        p = sharpen(ensemble(task, self.teachers(wbar, arrived, rng), x), self.temperature)
        swa: Params = trees.mean((w, 1) for w in self.snapshots(task, wbar, Data(x=x, y=p), rng))
        return swa

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        """The global network as it is."""
        return personal_model(task, message, data)

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        """One sample: the softmax of the global network, (1, n, classes)."""
        return softmax(task, personal, x)

    def teachers(self, wbar: Params, arrived: Sequence[Update], rng: Generator) -> Iterator[Params]:
        """The clients' mean, M draws and the clients' own networks, one at a time."""
        if self.distribution == "gaussian":
            draws = gaussian_draws(wbar, arrived, self.spread, rng)
        else:
            draws = dirichlet_draws(arrived, self.alpha, rng)
        yield wbar
        yield from islice(draws, self.members)
        if self.clients_teach:
            yield from (update.upload for update in arrived)

    def snapshots(self, task: Task, w: Params, data: Data, rng: Generator) -> Iterator[Params]:
        """The student at the steps that SWA averages, trained from w on KL(p || q) with p = data.y (n, classes)."""

        def divergence(w: Params, batch: Data) -> Tensor:
            log_q = nnf.log_softmax(forward(task.model, w, batch.x), dim=-1)
            return nnf.kl_div(log_q, batch.y, reduction="batchmean")

        marks = self.marks(len(data.y))
        stream = batches(data, self.distil_batch, marks[-1], rng)
        for last, mark in pairwise([0, *marks]):
            rate = Rate("momentum", self.distil_lr, self.distil_decay)
            (w,), _ = descend(divergence, (w,), islice(stream, mark - last), (rate,))
            yield w

    def marks(self, n: int) -> list[int]:
        """The steps after which SWA takes a snapshot, of a student with n public inputs; the last step is one."""
        steps = self.distil_epochs * -(-n // self.distil_batch)
        start = round(self.swa_start * steps)
        return [*range(start + self.swa_every, steps, self.swa_every), steps]

    def _fedavg(self) -> FedAvg:
        return FedAvg(local_steps=self.local_steps, lr=self.lr, batch_size=self.batch_size, weights=self.weights)


def public_inputs(task: Task) -> Inputs:
    """The unlabelled inputs at the server, (n, *input); without them there is no FedBE."""
    if task.public is None or length(task.public) == 0:
        raise BadInput(
            "FedBE distils on unlabelled inputs at the server, and there are none: "
            "set data.public_fraction (e.g. 0.04), or Task.public in Python"
        )
    public: Inputs = task.public
    return public


def gaussian_draws(mu: Params, arrived: Sequence[Update], spread: float, rng: Generator) -> Iterator[Params]:
    """Networks mu + spread s eps, eps ~ N(0, 1), with s^2 = sum_k (n_k / n) (w_k - mu)^2 element by element."""
    squares = ((trees.tree_map(lambda w, m: (w - m).square(), u.upload, mu), u.num_examples) for u in arrived)
    variance = trees.mean(squares)
    while True:
        yield trees.tree_map(
            lambda m, v: m + spread * v.sqrt() * torch.randn(m.shape, generator=rng).to(m), mu, variance
        )


def dirichlet_draws(arrived: Sequence[Update], alpha: float, rng: Generator) -> Iterator[Params]:
    """Networks sum_k gamma_k n_k w_k / sum_k gamma_k n_k, with gamma ~ Dir(alpha, ..., alpha)."""
    seed = int(torch.randint(2**63 - 1, (), generator=rng))  # torch's own Dirichlet draws from the global state
    numpy_rng = np.random.default_rng(seed)
    while True:
        gammas = numpy_rng.dirichlet([alpha] * len(arrived)).tolist()
        shares = zip(arrived, gammas, strict=True)
        yield trees.mean((u.upload, gamma * u.num_examples) for u, gamma in shares if gamma > 0)


def ensemble(task: Task, teachers: Iterable[Params], x: Inputs) -> Tensor:
    """The mean of the teachers' probabilities, (n, classes)."""

    def opinion(w: Params) -> Tensor:
        return probabilities(lambda x: plain_logits(task.model, w, x), x)[0]

    mean: Tensor = trees.mean((opinion(w), 1) for w in teachers)
    return mean


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Probabilities (n, classes) to the power 1 / temperature, normalised, with a floor under each."""
    log_p = p.log()
    sharp = torch.softmax((log_p - log_p.amax(-1, keepdim=True)) / temperature, dim=-1).clamp(min=FLOOR)
    return sharp / sharp.sum(-1, keepdim=True)
