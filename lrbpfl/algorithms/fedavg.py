"""FedAvg (McMahan, Moore, Ramage, Hampson and Aguera y Arcas, AISTATS 2017, arXiv:1602.05629), Algorithm 1.

Departures: local work is counted in mini-batch steps instead of epochs, and the learning rate decays only by the pace
of the rounds, if at all; both as in the experiments of the LR-BPFL paper. Every client, seen or new, predicts with the
global model.
"""

from collections.abc import Iterable

from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl.algorithms import average
from lrbpfl.algorithms.plain import PersonalNetwork, objective, personal_model, softmax
from lrbpfl.algorithms.protocol import (
    STRICT,
    Count,
    Info,
    NonNegative,
    Steps,
    Task,
    Update,
    first_params,
)
from lrbpfl.core.descent import Data, Rate, batches, descend
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, Weights, rows_of_classes


@dataclass(frozen=True, config=STRICT)
class FedAvg:
    """The weighted mean of locally trained networks."""

    local_steps: Steps = 20  # R, mini-batch steps a round; 20 in the LR-BPFL paper
    lr: NonNegative = 0.1  # eta, plain SGD; 0.1 in the LR-BPFL paper
    batch_size: Count = 32  # B; 32 in the LR-BPFL paper
    weights: Weights = "uniform"  # of w_0; torch's own, with which the rate of 0.1 is stable
    class_rows: bool = False  # the mean of a class's row of the last layer: by how far clients moved it; ours

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
        """R steps w <- w - eta grad f_k(w; batch)."""
        steps = batches(data, self.batch_size, self.local_steps, rng)
        (w,), loss = descend(objective(task, data), (message,), steps, (Rate("sgd", self.lr * task.pace),))
        return w, None, {"loss": loss}

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        """w_{t+1} = sum_k (n_k / n) w_k over the clients of this round."""
        rows = rows_of_classes(task.model, task.num_classes) if self.class_rows else ()
        return average.mean(server, updates, rows)

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        """The global network as it is."""
        return personal_model(task, message, data)

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        """One sample: the softmax of the global network, (1, n, classes)."""
        return softmax(task, personal, x)
