"""pFedGP (Achituve, Shamsian, Navon, Chechik and Fetaya, NeurIPS 2021, arXiv:2106.15482), Section 4: full variant.

All clients share a network that embeds inputs; every client has a Gaussian process classifier of its own on the
embeddings of its own data: a tree of binary ones, as in GP-Tree (Achituve et al., ICML 2021), each with Polya-Gamma
augmentation and Gibbs sampling. Clients train the network by the predictive likelihood of one half of their data given
the other.

Departures: no inducing points. The embedding is what the model's last Linear layer would take in; that layer is neither
trained nor sent. The probability of a branch is E[sigma(f)], which treats its two sides alike; the authors' code takes
exp(E[log sigma(f)]), here a field. A tree's classes are grouped by their means of normalised embeddings. A client with
more than `max_examples` examples uses a random part of them, every class in it. No validation data choose the network.
With a label prior, the GP at a node has as its prior mean the log odds of its sides by the smoothed frequencies; the
classes that a client has never seen get their smoothed frequencies, and the tree shares out the rest. Without one, the
means are zero and so are the probabilities of classes never seen. A class with one example is only conditioned on. A
client with one class, or with nothing but single examples, has nothing to train and sends the network back as it came;
with one class it is sure of it, or as sure as its label prior. New clients, and those never drawn, fit their GPs to the
network as everybody does: clients keep nothing.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.protocol import (
    STRICT,
    Count,
    Info,
    NonNegative,
    Positive,
    Task,
    Update,
    first_params,
    log_label_prior,
)
from lrbpfl.core import class_tree, gp
from lrbpfl.core.descent import Data, OptimiserName, Rate, descend
from lrbpfl.core.gp import Given, Link
from lrbpfl.core.inputs import Inputs, take
from lrbpfl.core.network import Params, Weights, embedding, head
from lrbpfl.core.objective import probabilities
from lrbpfl.errors import BadInput


class PersonalProcesses(NamedTuple):
    """A client's predictor: the shared network, and what its GPs are conditioned on."""

    W: Params
    X: Tensor  # (N, d), normalised embeddings of the client's own data
    y: Tensor  # (N,)
    tree: Tensor  # (nodes, classes)
    means: Tensor  # (nodes,), of the GPs' priors
    omega: Tensor  # (chains, sum of the nodes' numbers of examples), one node after the other
    unseen: Tensor  # (classes,), probabilities of the classes that the client has never seen


@dataclass(frozen=True, config=STRICT)
class PFedGP:
    """A shared embedding, and a Gaussian process classifier at every client."""

    HOLDS: ClassVar[str] = "An embedding and the label of every training example that the client's model uses."

    output_scale: Positive = 8.0  # of the RBF kernel, fixed; 8 in the original (code); LR-BPFL paper: unspecified
    length_scale: Positive = 1.0  # of the RBF kernel, fixed; 1 in the original (code); LR-BPFL paper: unspecified
    chains: Count = 20  # Gibbs chains in training; 20 in the original
    predict_chains: Count = 30  # Gibbs chains at prediction; 30 in the original
    sweeps: Count = 5  # of a chain; 5 in the original
    link: Link = "mean"  # of a branch's probability: E[sigma(f)] (ours), or "exp-log" (original)
    local_steps: Count = 3  # a round, each on all data; original: 1, on CIFAR-10 3; LR-BPFL paper: 20, on mini-batches
    lr: NonNegative = 0.05  # eta; 0.05 in the LR-BPFL paper, and in the original
    optimiser: OptimiserName = "momentum"  # SGD with momentum 0.9, fresh each round; original
    decay: NonNegative = 0.001  # weight decay; 0.001 in the original
    clip: Positive = 50.0  # longest gradient; 50 in the original
    max_examples: Count = 600  # of a client, anew for each step, as GPs cost N^3; one of every class stays; ours
    weights: Weights = "uniform"  # of w_0; torch's own, as for FedAvg

    def init_server(self, task: Task, rng: Generator) -> Params:
        """The network w_0 without its last layer."""
        gp.sampler()
        last, params = head(task.model), first_params(task, self.weights, rng)
        if (outputs := len(task.model.get_parameter(last[0]))) != task.num_classes:
            raise BadInput(
                f"the model's last Linear layer has {outputs} outputs, not one for each of {task.num_classes} classes"
            )
        return {name: p for name, p in params.items() if name not in last}

    def init_client(self, task: Task, rng: Generator) -> None:
        """Clients keep nothing."""

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        """Everybody gets w_t."""
        return server

    def client_update(
        self, task: Task, message: Params, client: None, data: Data, rng: Generator
    ) -> tuple[Params, None, Info]:
        """A tree of the client's classes by w_t, then steps on w with half of the data given the other half."""
        classes = len(data.y.unique())
        if not message or classes == 1 or min(len(data.y), self.max_examples) <= classes:
            return message, None, {"loss": 0.0}
        part = self._part(data, rng)
        with torch.no_grad():
            tree = class_tree.build(self._embed(task, message, part.x), part.y, task.num_classes)
        means = self._prior_means(task, tree, data)
        (w,), loss = descend(
            lambda w, part: self._loss(self._embed(task, w, part.x), part.y, tree, means, rng),
            (message,),
            (self._part(data, rng) for _ in range(self.local_steps)),
            (Rate(self.optimiser, self.lr * task.pace, self.decay),),
            clip=self.clip,
        )
        return w, None, {"loss": loss}

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        """w_{t+1} = the plain mean of w_k over the clients of this round."""
        mean: Params = trees.mean((u.upload, 1) for u in updates)
        return mean

    @torch.no_grad()
    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalProcesses:
        """Tree and Gibbs chains on the client's own training data; the network stays as it is."""
        x, y = self._part(data, rng)
        X = self._embed(task, message, x)
        tree = class_tree.build(X, y, task.num_classes)
        means = self._prior_means(task, tree, data)
        omegas = [
            self._gibbs(self._covariance(X[own]), kappa, m, self.predict_chains, rng)
            for own, kappa, m in _nodes(y, tree, means)
        ]
        omega = torch.cat([X.new_zeros(self.predict_chains, 0), *omegas], dim=1)
        return PersonalProcesses(W=message, X=X, y=y, tree=tree, means=means, omega=omega, unseen=_unseen(task, data))

    @torch.no_grad()
    def predict(self, task: Task, personal: PersonalProcesses, x: Inputs, rng: Generator) -> Tensor:
        """One sample for each chain, (chains, n, classes): the products along the tree's paths."""
        W, X, y, tree, means, omega, unseen = personal
        nodes = list(_nodes(y, tree, means))
        omegas = omega.split([len(own) for own, _, _ in nodes], dim=1)
        givens = [
            gp.condition(self._covariance(X[own]), kappa, w, m)
            for (own, kappa, m), w in zip(nodes, omegas, strict=True)
        ]
        seen = torch.zeros_like(unseen).index_fill(0, y, 1.0)

        def log_probabilities(x: Inputs) -> Tensor:
            new = self._embed(task, W, x)
            left = [self._left(g, X[own], new, m) for g, (own, _, m) in zip(givens, nodes, strict=True)]
            probs = class_tree.class_probabilities(tree, left, seen.expand(len(omega), len(new), -1))
            return (probs * (1 - unseen.sum()) + unseen).log().float()

        return probabilities(log_probabilities, x)

    def _embed(self, task: Task, w: Params, x: Inputs) -> Tensor:
        """Embeddings of length one, (n, d)."""
        return nnf.normalize(embedding(task.model, w, x).double(), dim=-1)

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return gp.rbf(a, b, output_scale=self.output_scale, length_scale=self.length_scale)

    def _covariance(self, X: Tensor) -> Tensor:
        return gp.jittered(self._kernel(X, X))

    def _gibbs(self, K: Tensor, kappa: Tensor, mean: Tensor, chains: int, rng: Generator) -> Tensor:
        return gp.gibbs(K, kappa, mean=mean, chains=chains, sweeps=self.sweeps, rng=rng)

    def _left(self, given: Given, X: Tensor, new: Tensor, mean: Tensor) -> Tensor:
        """The probability of a node's left side at new points, for each chain: (chains, n)."""
        mu, variance = gp.predictive(given, self._kernel(X, new), self.output_scale + gp.JITTER, mean)
        return gp.probability(mu, variance, self.link)

    def _loss(self, X: Tensor, y: Tensor, tree: Tensor, means: Tensor, rng: Generator) -> Tensor:
        """Sum over the nodes of the mean cross-entropy of one half of the examples, given the other half.

        The draws of omega are no part of the graph: gradients reach the network through the kernel.
        """
        losses = []
        for own, kappa, mean in _nodes(y, tree, means):
            given, held = _halves(y[own], rng)
            if len(held):
                K = self._covariance(X[own[given]])
                omega = self._gibbs(K.detach(), kappa[given], mean, self.chains, rng)
                posterior = gp.condition(K, kappa[given], omega, mean)
                left = self._left(posterior, X[own[given]], X[own[held]], mean).mean(0)
                losses.append(-torch.log(torch.where(kappa[held] > 0, left, 1 - left) + 1e-12).mean())
        return torch.stack(losses).sum()

    def _prior_means(self, task: Task, tree: Tensor, data: Data) -> Tensor:
        """The log odds of every node's left side by the label prior, (nodes,); zeros without one."""
        if not task.label_prior:
            return torch.zeros(len(tree), dtype=torch.float64, device=tree.device)
        frequencies = log_label_prior(task, data.y).double().exp()
        left, right = ((tree == side).double() @ frequencies for side in (1, -1))
        return torch.log(left / right)

    def _part(self, data: Data, rng: Generator) -> Data:
        """All data, or a random part of `max_examples` of them (at least one of every class)."""
        if len(data.y) <= self.max_examples:
            return data
        order = torch.randperm(len(data.y), generator=rng).to(data.y.device)
        firsts = torch.stack([order[data.y[order] == c][0] for c in data.y.unique()])
        others = order[~torch.isin(order, firsts)]
        chosen = torch.cat([firsts, others])[: max(self.max_examples, len(firsts))]
        return Data(x=take(data.x, chosen), y=data.y[chosen])


def _nodes(y: Tensor, tree: Tensor, means: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every node's examples (indices), their kappa (+1/2 on the left, -1/2 on the right) and its prior mean."""
    for side, mean in zip(tree, means, strict=True):
        own = side[y].nonzero()[:, 0]
        yield own, side[y[own]].double() / 2, mean


def _halves(y: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
    """Indices of one random half of every class, rounded up, and of the other."""
    order = torch.randperm(len(y), generator=rng).to(y.device)
    classes = [order[y[order] == c] for c in y.unique()]
    return torch.cat([c[: (len(c) + 1) // 2] for c in classes]), torch.cat([c[(len(c) + 1) // 2 :] for c in classes])


def _unseen(task: Task, data: Data) -> Tensor:
    """The smoothed frequencies of the classes that the client has never seen, 0 for the others: (classes,)."""
    frequencies = log_label_prior(task, data.y).double().exp() * bool(task.label_prior)
    return frequencies.index_fill(0, data.y, 0.0)
