"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948), Algorithm 1.

The clients look for a network that is good after one gradient step of their own: min_w sum_k F_k(w) with
F_k(w) = f_k(w - alpha grad f_k(w)).

Departures: `hf` multiplies by the Hessian itself, by differentiating twice, where the paper takes a difference of two
gradients. The server weighs clients by their examples, as FedAvg and the code of the LR-BPFL paper do; the box takes
the plain mean. Neither alpha nor beta decays (the LR-BPFL code shrinks alpha until the last step does nothing).
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.func import grad, grad_and_value, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrbpfl import trees
from lrbpfl.algorithms.plain import Objective, PersonalNetwork, objective, personal_model, softmax
from lrbpfl.algorithms.protocol import STRICT, Count, Info, NonNegative, Steps, Task, Update, first_params
from lrbpfl.core.descent import Data, Rate, batches, descend
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.modes import learning
from lrbpfl.core.network import Params, Weights

Variant = Literal["fo", "hf"]


@dataclass(frozen=True, config=STRICT)
class PerFedAvg:
    """A network that every client adapts by one gradient step."""

    HOLDS: ClassVar[str] = "A network that was trained on the client's own examples."

    variant: Variant = "fo"  # first order (LR-BPFL's code), or with the Hessian; LR-BPFL paper: unspecified
    alpha: NonNegative = 0.01  # of the client's own step; 0.01 in the LR-BPFL paper, and in the original
    beta: NonNegative = 0.01  # of the step on w; 0.01 in the LR-BPFL paper; original: 0.001
    local_steps: Count = 20  # tau, steps a round; 20 in the LR-BPFL paper; original: 4 or 10
    personal_steps: Steps = 1  # of length alpha before a client predicts; 1 in the original
    batch_size: Count = 32  # of each of D, D', D''; 32 in the LR-BPFL paper; original: 40
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
        """Tau steps w <- w - beta grad F_k(w), each estimated from three independent batches."""
        f = objective(task, data)
        D, D1, D2 = (batches(data, self.batch_size, self.local_steps, rng) for _ in range(3))
        w, losses = message, []
        for triple in zip(D, D1, D2, strict=True):
            with learning():
                gradient, loss = meta_gradient(f, w, *triple, alpha=self.alpha, variant=self.variant)
            w = trees.tree_map(lambda w, g: w - self.beta * task.pace * g, w, gradient)
            losses.append(loss)
        return w, None, {"loss": sum(losses) / len(losses)}

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        """w_{t+1} = sum_k (n_k / n) w_k over the clients of this round."""
        mean: Params = trees.mean((u.upload, u.num_examples) for u in updates)
        return mean

    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        """One step u = w - alpha grad f_k(w; D), on a batch of the client's own training data."""
        steps = batches(data, self.batch_size, self.personal_steps, rng)
        (u,), _ = descend(objective(task, data), (message,), steps, (Rate("sgd", self.alpha),))
        return personal_model(task, u, data)

    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        """One sample: the softmax of the adapted network, (1, n, classes)."""
        return softmax(task, personal, x)


def meta_gradient(
    f: Objective, w: Params, D: Data, D1: Data, D2: Data, *, alpha: float, variant: Variant
) -> tuple[Params, float]:
    """(I - alpha Hess f(w; D'')) grad f(u; D') at u = w - alpha grad f(w; D), and f(u; D'); `fo` drops the Hessian."""
    u = trees.tree_map(lambda w, g: w - alpha * g, w, grad(f)(w, D))
    v, loss = grad_and_value(f)(u, D1)
    if variant == "hf":
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be differentiated twice
            times_hessian = vjp(lambda w: grad(f)(w, D2), w)[1]  # v' Hess = (Hess v)', by symmetry
            v = trees.tree_map(lambda v, Hv: v - alpha * Hv, v, *times_hessian(v))
    return v, loss.item()
