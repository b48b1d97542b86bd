"""FedAvg with fine-tuning: every client trains the global model on its own data a little further before it predicts.

Training is Algorithm 1 of FedAvg (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, AISTATS 2017, arXiv:1602.05629).
Fine-tuning follows Yu, Bagdasaryan and Shmatikov (Salvaging Federated Learning by Local Adaptation, 2020,
arXiv:2002.04758) and Cheng, Chadha and Duchi (Fine-tuning in Federated Learning: a simple but tough-to-beat baseline,
2021, arXiv:2108.07313, where it is called FTFA).

Departures: those of `fedavg.py`; fine-tuning, too, is counted in mini-batch steps, moves all parameters, and starts
from the current global model whenever a client predicts, so clients keep nothing. New clients do the same.
"""

from collections.abc import Iterable
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.plain import PersonalNetwork, personal_model, softmax
from lrbpfl.algorithms.protocol import STRICT, Count, Info, NonNegative, Steps, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, Weights


@dataclass(frozen=True, config=STRICT)
class FedAvgFT:
    """The weighted mean of locally trained networks, fine-tuned at the client."""

    HOLDS: ClassVar[str] = "A network that was trained on the client's own examples."

    local_steps: Steps = 20  # R, mini-batch steps a round; as FedAvg
    lr: NonNegative = 0.1  # eta, plain SGD; as FedAvg
    batch_size: Count = 32  # B, in training and in fine-tuning; as FedAvg
    weights: Weights = "uniform"  # of w_0; as FedAvg
    class_rows: bool = False  # the mean of a class's row of the last layer: by how far clients moved it; ours
    ft_steps: Steps = 20  # mini-batch steps of fine-tuning before a client predicts; 0 is FedAvg
    ft_lr: NonNegative = 0.02  # of fine-tuning, plain SGD; from rough probes, not tuned

    def init_server(self, task: Task, rng: Generator) -> Params:
        """The network w_0."""
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
        """w_{t+1} = sum_k (n_k / n) w_k over the clients of this round."""
        return self._fedavg().server_aggregate(task, server, updates, rng)

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        """The global network after some more steps on the client's own training data, seen or new."""
        tuning = FedAvg(local_steps=self.ft_steps, lr=self.ft_lr, batch_size=self.batch_size)
        W, _, _ = tuning.client_update(task, message, client, data, rng)
        return personal_model(task, W, data)

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        """One sample: the softmax of the fine-tuned network, (1, n, classes)."""
        return softmax(task, personal, x)

    def _fedavg(self) -> FedAvg:
        return FedAvg(
            local_steps=self.local_steps,
            lr=self.lr,
            batch_size=self.batch_size,
            weights=self.weights,
            class_rows=self.class_rows,
        )
