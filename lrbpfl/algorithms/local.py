"""Local training: every client alone, on its own data; the baseline that federated learning has to beat.

What a client does is ClientUpdate in Algorithm 1 of FedAvg (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, AISTATS
2017, arXiv:1602.05629), from its own last network instead of the server's. Yu, Bagdasaryan and Shmatikov (Salvaging
Federated Learning by Local Adaptation, 2020, arXiv:2002.04758) show that many participants do better this way.

Departures: those of `fedavg.py`, as to steps and learning rate. Not even w_0 travels: each client draws its own (or has
the template's, if it is pretrained). A client trains in the rounds that call it, as often as in other algorithms; one
that was called too seldom, or never, as a new client, makes up for it before it predicts.
"""

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.plain import PersonalNetwork, personal_model, softmax
from lrbpfl.algorithms.protocol import STRICT, Count, Info, NonNegative, Steps, Task, Update, first_params
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, Weights


class Client(NamedTuple):
    """What a client keeps: its own network, and how far it is trained."""

    W: Params
    steps: Tensor  # (), int64


@dataclass(frozen=True, config=STRICT)
class Local:
    """A network of its own at every client; nothing travels."""

    HOLDS: ClassVar[str] = "A network that was trained on the client's own examples."

    local_steps: Steps = 20  # R, mini-batch steps a round; as FedAvg
    min_steps: Steps = 60  # a client with fewer steps behind it makes up for them before it predicts
    lr: NonNegative = 0.05  # eta, plain SGD; from rough probes, not tuned
    batch_size: Count = 32  # B; as FedAvg
    weights: Weights = "uniform"  # of each client's w_0; as FedAvg

    def init_server(self, task: Task, rng: Generator) -> None:
        """There is nothing to serve."""

    def init_client(self, task: Task, rng: Generator) -> Client:
        """A network w_0 of the client's own."""
        return Client(W=first_params(task, self.weights, rng), steps=torch.tensor(0))

    def broadcast(self, task: Task, server: None, client_id: int) -> None:
        """Nothing goes down."""

    def client_update(
        self, task: Task, message: None, client: Client, data: Data, rng: Generator
    ) -> tuple[None, Client, Info]:
        """R steps w <- w - eta grad f_k(w; batch) on the client's own network; nothing goes up."""
        W, info = self._train(task, client.W, data, rng, steps=self.local_steps)
        fault = trees.fault(W, client.W)
        if fault:  # no upload shows it to the server: skip the round here, with the last good network kept
            raise FloatingPointError(f"training diverged: {fault}")
        return None, Client(W=W, steps=client.steps + self.local_steps), info

    def server_aggregate(self, task: Task, server: None, updates: Iterable[Update], rng: Generator) -> None:
        """Nothing came up."""
        for _ in updates:  # an engine may train clients no sooner than their updates are asked for
            pass

    def personalise(self, task: Task, message: None, client: Client, data: Data, rng: Generator) -> PersonalNetwork:
        """The client's own network, with at least `min_steps` steps behind it."""
        missing = max(self.min_steps - int(client.steps), 0)
        W, _ = self._train(task, client.W, data, rng, steps=missing)
        return personal_model(task, W, data)

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        """One sample: the softmax of the client's own network, (1, n, classes)."""
        return softmax(task, personal, x)

    def _train(self, task: Task, W: Params, data: Data, rng: Generator, *, steps: int) -> tuple[Params, Info]:
        alone = FedAvg(local_steps=steps, lr=self.lr, batch_size=self.batch_size)
        W, _, info = alone.client_update(task, W, None, data, rng)
        return W, info
