"""pFedBayes (Zhang, Li, Li, Guo and Shao, ICML 2022, arXiv:2206.07977), Algorithm 1.

Every weight has a Gaussian. Client k has a personal distribution q_k, the server a global one w, and they solve
min_w mean_k min_{q_k} E_{q_k}[-log p(D_k)] + zeta KL(q_k || w): the prior of everybody is what all have in common.

Departures: the objective is divided by n_k, so that the likelihood is a mean per example as everywhere here; Adam's
steps stay as they are. Each batch serves `personal_steps` steps on q_k before the step on w, as in the public code,
which calls itself unofficial and is what "original" means at the fields; its noise of standard deviation 0.001 and its
KL over R instead of n_k are not followed. The server weighs the sampled clients by their examples, as that code does;
the paper's mean is plain. Means start as the layers of torch do, not from N(0, 0.1^2), with which activations would
grow from layer to layer. A rho below -12 is raised to it whenever it is used, lest log s leave float32's reach. Adam
starts anew in every round. A client's q_k starts at w in its first round and stays with it from then on; whoever took
part predicts with the q_k it kept, without fine-tuning, however old it is. A client that never took part, new or not
yet sampled, starts q_k at w and takes `adapt_steps` personal steps with w as the prior before it predicts; nothing of
them is kept. Clients with one example or one class train like all others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.protocol import (
    STRICT,
    Count,
    Ensemble,
    Info,
    NonNegative,
    Steps,
    Task,
    Update,
    first_params,
    log_label_prior,
)
from lrbpfl.core.descent import Data, OptimiserName, Rate, batches, descend
from lrbpfl.core.gaussian import Gaussian, Prior, draws_and_kl, kl, prior, sample
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, Weights, forward, trainable
from lrbpfl.core.objective import nll, probabilities

MIN_RHO = -12.0  # softplus(-12) = 6e-6

Gaussians = dict[str, Gaussian]  # over every parameter, by its name


class Client(NamedTuple):
    """What a client keeps: its personal distribution, which means nothing before its first round."""

    q: Gaussians
    started: Tensor  # () 1 once it has taken part, 0 before


class PersonalDistribution(NamedTuple):
    """A client's model: its personal distribution and its label prior."""

    q: Gaussians
    log_prior: Tensor  # (classes,)


@dataclass(frozen=True, config=STRICT)
class PFedBayes:
    """Personal distributions over all weights, pulled to a global one that is their prior."""

    HOLDS: ClassVar[str] = "A distribution over networks that was fitted to the client's own examples."

    zeta: NonNegative = 10.0  # weight of the KL; 10 in the LR-BPFL paper, and in the original
    personal_lr: NonNegative = 0.001  # eta_1, rate of q; 0.001 in the LR-BPFL paper, and in the original
    global_lr: NonNegative = 0.001  # eta_2, rate of w; 0.001 in the LR-BPFL paper, and in the original
    personal_optimiser: OptimiserName = "adam"  # of q; original; LR-BPFL paper: unspecified
    global_optimiser: OptimiserName = "adam"  # of w; original; LR-BPFL paper: unspecified
    local_steps: Count = 20  # R, batches a round; 20 in the LR-BPFL paper, and in the original
    personal_steps: Count = 5  # on q for each batch, before one on w; 5 in the original; LR-BPFL paper: unspecified
    samples: Count = 1  # M, networks drawn for each step on q; 1 in the original; LR-BPFL paper: unspecified
    predict_samples: Count = 4  # networks drawn for a prediction; 4 in the code of the LR-BPFL paper; original: 1
    adapt_steps: Steps = 100  # on q before a client that never took part predicts; ours: as many as in a round
    beta: NonNegative = 1.0  # the server's step to the clients' mean; 1 in the original; LR-BPFL paper: unspecified
    batch_size: Count = 32  # b; 32 in the LR-BPFL paper
    init_rho: Annotated[float, Ge(MIN_RHO)] = -3.0  # of w_0, s = 0.049; original; LR-BPFL paper: unspecified
    weights: Weights = "uniform"  # of the means of w_0; ours: torch's own, as for FedAvg

    def init_server(self, task: Task, rng: Generator) -> Gaussians:
        """The global distribution w_0."""
        means = first_params(task, self.weights, rng)
        return {name: Gaussian(mean=m, rho=torch.full_like(m, self.init_rho)) for name, m in means.items()}

    def init_client(self, task: Task, rng: Generator) -> Client:
        """Nothing yet: the place of a personal distribution."""
        zeros = {name: torch.zeros_like(p) for name, p in trainable(task.model).items()}
        return Client(q={name: Gaussian(z, z.clone()) for name, z in zeros.items()}, started=torch.zeros(()))

    def broadcast(self, task: Task, server: Gaussians, client_id: int) -> Gaussians:
        """Everybody gets w_t."""
        return server

    def client_update(
        self, task: Task, message: Gaussians, client: Client, data: Data, rng: Generator
    ) -> tuple[Gaussians, Client, Info]:
        """For each of R batches, steps on q_k with w fixed, then one on w with q_k fixed; w_k goes up, q_k stays."""
        known: Prior | None = None  # of w as it is now

        def objective(q: Gaussian, w: Gaussian, batch: Data | None) -> Tensor:
            nonlocal known
            if batch is None:
                known = None  # w is about to move
                pull = self._pull(kl(_fixed(q), p=w), data)
                return pull - pull.detach()  # a gradient without a value: the loss is that of the personal steps
            known = known or prior(w)
            return self._personal_loss(task, q, known, message, batch, data, rng)

        (q, w), loss = descend(
            objective,
            (_flat(client.q if client.started else message), _flat(message)),
            self._schedule(batches(data, self.batch_size, self.local_steps, rng)),
            (Rate(self.personal_optimiser, self.personal_lr), Rate(self.global_optimiser, self.global_lr * task.pace)),
        )
        kept = Client(q=_named(q, message), started=torch.ones_like(client.started))
        return _named(w, message), kept, {"loss": loss * (self.personal_steps + 1) / self.personal_steps}

    def server_aggregate(self, task: Task, server: Gaussians, updates: Iterable[Update], rng: Generator) -> Gaussians:
        """(1 - beta) w_t + beta sum_k (n_k / n) w_k, of means and of rhos."""
        mean = trees.mean((u.upload, u.num_examples) for u in updates)
        mixed: Gaussians = trees.tree_map(lambda w, m: torch.lerp(w, m, self.beta), server, mean)
        return mixed

    def personalise(
        self, task: Task, message: Gaussians, client: Client, data: Data, rng: Generator
    ) -> PersonalDistribution:
        """The q_k that the client kept; without one, personal steps from w with w as the prior."""
        q = client.q if client.started else self._adapt(task, message, data, rng)
        return PersonalDistribution(q=q, log_prior=log_label_prior(task, data.y))

    def predict(self, task: Task, personal: PersonalDistribution, x: Inputs, rng: Generator) -> Tensor:
        """The softmax of each of the networks drawn from q_k, (samples, n, classes); the same networks for all of x."""
        tensors, logits = self.ensemble(task, personal, rng)
        return probabilities(lambda x: logits(tensors, x), x)

    def ensemble(self, task: Task, personal: PersonalDistribution, rng: Generator) -> Ensemble:
        """Networks drawn from q_k."""
        q = _flat(personal.q)
        networks = tuple(_weights(sample(q, noise), personal.q) for noise in _noise(q, self.predict_samples, rng))

        def logits(own: tuple[tuple[Params, ...], Tensor], x: Any) -> Tensor:
            networks, log_prior = own
            return _logits(task, networks, x) + log_prior

        return Ensemble((networks, personal.log_prior), logits)

    def _adapt(self, task: Task, w: Gaussians, data: Data, rng: Generator) -> Gaussians:
        """`adapt_steps` personal steps from w, with w as the prior."""
        start = _flat(w)
        fixed = prior(start)
        (q,), _ = descend(
            lambda q, batch: self._personal_loss(task, q, fixed, w, batch, data, rng),
            (start,),
            batches(data, self.batch_size, self.adapt_steps, rng),
            (Rate(self.personal_optimiser, self.personal_lr),),
        )
        return _named(q, w)

    def _schedule(self, data: Iterable[Data]) -> Iterator[Data | None]:
        """Each batch for as many steps as q_k takes on it, and then None for the step on w."""
        for batch in data:
            yield from [batch] * self.personal_steps
            yield None

    def _personal_loss(
        self, task: Task, q: Gaussian, w: Prior, names: Gaussians, batch: Data, data: Data, rng: Generator
    ) -> Tensor:
        """Omega_k / n_k: -E_q[log p(batch)] per example by M drawn networks, and the pull to w."""
        draws, divergence = draws_and_kl(q, _noise(q, self.samples, rng), p=w)
        logits = _logits(task, [_weights(draw, names) for draw in draws], batch.x)
        return nll(logits + log_label_prior(task, data.y), batch.y) + self._pull(divergence, data)

    def _pull(self, divergence: Tensor, data: Data) -> Tensor:
        """The KL per example of the client, zeta KL(q_k || w) / n_k."""
        return self.zeta / len(data.y) * divergence


def _logits(task: Task, networks: Sequence[Params], x: Inputs) -> Tensor:
    """(networks, batch, classes)."""
    return torch.stack([forward(task.model, W, x) for W in networks])


def _noise(q: Gaussian, samples: int, rng: Generator) -> Tensor:
    """Standard normal noise (samples, P), drawn in one go: that is much cheaper than tensor by tensor."""
    return torch.randn(samples, len(q.mean), generator=rng).to(q.mean)


def _fixed(q: Gaussian) -> Gaussian:
    return Gaussian(mean=q.mean.detach(), rho=q.rho.detach())


def _flat(named: Gaussians) -> Gaussian:
    """All parameters in one vector (P,), and no rho below its floor."""
    mean, rho = (torch.cat([part.flatten() for part in parts]) for parts in zip(*named.values(), strict=True))
    return Gaussian(mean=mean, rho=rho.clamp(min=MIN_RHO))


def _weights(flat: Tensor, names: Gaussians) -> Params:
    """The vector (P,) cut into tensors of these names and shapes; views."""
    pieces = flat.split([q.mean.numel() for q in names.values()])
    return {name: piece.view(q.mean.shape) for (name, q), piece in zip(names.items(), pieces, strict=True)}


def _named(flat: Gaussian, names: Gaussians) -> Gaussians:
    """The inverse of `_flat`, in memory of its own."""
    means, rhos = _weights(flat.mean, names), _weights(flat.rho, names)
    return {name: Gaussian(mean=means[name].clone(), rho=rhos[name].clone()) for name in names}
