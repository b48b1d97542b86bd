"""pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848), Algorithm 1.

Clients descend the Moreau envelopes of their objectives: min_w sum_k F_k(w) with
F_k(w) = min_theta f_k(theta) + lambda / 2 |theta - w|^2, whose gradient is lambda (w - theta_k(w)).

Departures: theta_k is computed from w when a client predicts, which serves new clients too, so that clients keep no
state. Only the sampled clients train, and the server weighs them by their examples, as FedAvg and the authors' code
do; the box trains everybody and takes the plain mean. No rate decays. The authors' code adds a weight decay to the
inner problem, which the paper does not have: here it is a field, and off.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.plain import Objective, PersonalNetwork, objective, personal_model, softmax
from lrbpfl.algorithms.protocol import STRICT, Count, Info, NonNegative, Steps, Task, Update, first_params
from lrbpfl.core.descent import Data, Rate, batches, descend
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, Weights


@dataclass(frozen=True, config=STRICT)
class PFedMe:
    """A network in the middle of personal ones that stay near it."""

    HOLDS: ClassVar[str] = "A network that was trained on the client's own examples."

    lam: NonNegative = 15.0  # lambda, pull of theta to w; 15 in the LR-BPFL paper
    inner_steps: Count = 5  # K, steps on theta for each step on w; 5 in the original; LR-BPFL paper: unspecified
    restart: bool = False  # start theta from w at every step on w; off: go on from the last theta (authors' code)
    personal_lr: NonNegative = 0.01  # rate of theta; 0.01 in the LR-BPFL paper
    global_lr: NonNegative = 0.01  # eta, rate of w; 0.01 in the LR-BPFL paper
    decay: NonNegative = 0.0  # mu, weight decay of theta; absent from the paper, 0.001 in the authors' code
    beta: NonNegative = 1.0  # the server's step to the clients' mean; 1 in the original; LR-BPFL paper: unspecified
    local_steps: Count = 20  # R, steps on w a round; 20 in the LR-BPFL paper, and in the original
    personal_steps: Steps = 100  # on theta before a client predicts; R K, as in a round; LR-BPFL paper: unspecified
    batch_size: Count = 32  # |D|; 32 in the LR-BPFL paper; original: 20
    weights: Weights = "uniform"  # of w_0; torch's own, as for FedAvg

    def init_server(self, task: Task, rng: Generator) -> Params:
        """The network w_0."""
        return first_params(task, self.weights, rng)

    def init_client(self, task: Task, rng: Generator) -> None:
        """Clients keep nothing."""

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        """Everybody gets w_t."""
        return server

    def client_update(
        self, task: Task, message: Params, client: None, data: Data, rng: Generator
    ) -> tuple[Params, None, Info]:
        """R steps on the Moreau envelope; w_k goes up."""
        f = objective(task, data)
        steps = batches(data, self.batch_size, self.local_steps, rng)
        w, loss = self.descend_envelope(f, message, steps, pace=task.pace)
        return w, None, {"loss": loss}

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        """w_{t+1} = (1 - beta) w_t + beta sum_k (n_k / n) w_k over the clients of this round."""
        mean = trees.mean((u.upload, u.num_examples) for u in updates)
        mixed: Params = trees.tree_map(lambda w, m: torch.lerp(w, m, self.beta), server, mean)
        return mixed

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        """theta_k(w) on the client's own training data."""
        steps = batches(data, self.batch_size, self.personal_steps, rng)
        theta, _ = self.approach(objective(task, data), message, message, steps)
        return personal_model(task, theta, data)

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        """One sample: the softmax of the personal network, (1, n, classes)."""
        return softmax(task, personal, x)

    def descend_envelope(
        self, f: Objective, w: Params, data: Iterable[Data], *, pace: float = 1.0
    ) -> tuple[Params, float]:
        """One step w <- w - eta lambda (w - theta) per batch, theta by K steps; and the mean of the inner problem."""
        theta, losses = w, []
        step = self.global_lr * pace * self.lam
        for batch in data:
            theta, loss = self.approach(f, w if self.restart else theta, w, [batch] * self.inner_steps)
            w = trees.tree_map(lambda w, theta: w - step * (w - theta), w, theta)
            losses.append(loss)
        return w, sum(losses) / len(losses)

    def approach(self, f: Objective, theta: Params, w: Params, data: Iterable[Data]) -> tuple[Params, float]:
        """One step per batch on f(theta) + lambda / 2 |theta - w|^2; a new theta, and the mean of that objective."""

        def h(theta: Params, batch: Data) -> Tensor:
            pull = torch.stack([nnf.mse_loss(theta[name], w[name], reduction="sum") for name in w]).sum()
            return f(theta, batch) + self.lam / 2 * pull

        (theta,), loss = descend(h, (theta,), data, (Rate("sgd", self.personal_lr, self.decay),))
        return theta, loss
