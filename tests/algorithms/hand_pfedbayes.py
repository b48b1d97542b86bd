"""pFedBayes by hand: one client's round with torch's own distributions, autograd and Adam."""

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.pfedbayes import Client, Gaussians, PFedBayes
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data, batches
from lrbpfl.core.gaussian import Gaussian
from lrbpfl.rng import generator


def distribution(task: Task, name: str, rho: float = -2.0) -> Gaussians:
    """Means and standard deviations that differ from number to number."""
    rng = generator(0, name)

    def normal(p: Tensor) -> Tensor:
        return 0.3 * torch.randn(p.shape, generator=rng)

    return {name: Gaussian(normal(p), rho + normal(p)) for name, p in task.model.named_parameters()}


def moments(q: Gaussians) -> dict[str, Normal]:
    """The same distributions by torch, softplus written out."""
    return {name: Normal(g.mean, torch.log1p(torch.exp(g.rho))) for name, g in q.items()}


def copied(q: Gaussians) -> Gaussians:
    return {name: Gaussian(*(part.clone().requires_grad_() for part in g)) for name, g in q.items()}


def kept(q: Gaussians) -> Client:
    return Client(q=q, started=torch.ones(()))


class Hand:
    """Algorithm 1 at one client, tensor by tensor, with torch's own distributions, autograd and Adam."""

    def __init__(self, algorithm: PFedBayes, task: Task, data: Data, q: Gaussians, w: Gaussians, seed: str) -> None:
        self.algorithm, self.task, self.data, self.rng = algorithm, task, data, generator(0, seed)
        self.q, self.w, self.losses = copied(q), copied(w), [0.0]
        self.of_q = torch.optim.Adam(trees.leaves(self.q), lr=algorithm.personal_lr)
        self.of_w = torch.optim.Adam(trees.leaves(self.w), lr=algorithm.global_lr)

    def pull(self) -> Tensor:
        a, b = moments(self.q), moments(self.w)
        total = torch.stack([kl_divergence(a[name], b[name]).sum() for name in a]).sum()
        return self.algorithm.zeta * total / len(self.data.y)

    def personal_step(self, batch: Data) -> None:
        shapes = {name: g.mean.shape for name, g in self.q.items()}
        noise = torch.randn(self.algorithm.samples, sum(s.numel() for s in shapes.values()), generator=self.rng)
        losses = []
        for row in noise:
            pieces = zip(shapes, row.split([s.numel() for s in shapes.values()]), strict=True)
            eps = {name: piece.reshape(shapes[name]) for name, piece in pieces}
            W = {name: normal.loc + normal.scale * eps[name] for name, normal in moments(self.q).items()}
            losses.append(nnf.cross_entropy(functional_call(self.task.model, W, (batch.x,)), batch.y))
        loss = torch.stack(losses).mean() + self.pull()
        self.of_q.zero_grad()
        loss.backward()
        self.of_q.step()
        self.losses.append(loss.item())

    def global_step(self) -> None:
        self.of_w.zero_grad()
        self.pull().backward()
        self.of_w.step()

    def round(self) -> float:
        a = self.algorithm
        for batch in batches(self.data, a.batch_size, a.local_steps, self.rng):
            for _ in range(a.personal_steps):
                self.personal_step(batch)
            self.global_step()
        return sum(self.losses) / (a.local_steps * a.personal_steps)


def assert_same(a: Gaussians, b: Gaussians, tolerance: float = 1e-5) -> None:
    for name, g in a.items():
        torch.testing.assert_close(tuple(g), tuple(p.detach() for p in b[name]), rtol=0, atol=tolerance)
