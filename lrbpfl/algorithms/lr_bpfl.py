"""LR-BPFL (Zhang, Liu, Simeone, Wang, Pezaros and Zhu, AISTATS 2025, arXiv:2410.14390), Algorithm 1, and a choice.

Departures of the defaults from the paper's printed values are the fields that `PRESETS["paper"]` sets back. Where the
paper is silent: a convolution's mask spans (output channel, input channel) and is shared over kernel positions; biases
carry no mask; the first gate is fixed at one; a closed gate leaves the KL, and the prior mean follows the rank; a mask
that is made afresh goes back to the client's own first draw; gates rest while a client makes its own model.

The choice is ours. How far masks move before a client predicts, and how noisy they are, suits some data and ruins
others, so the federation finds out: a share of each client's data, kept from W, judges a few candidates
(`ballots.py`), and the message carries what serves best. W always trains under the cautious candidate.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms import average, ballots, evidence
from lrbpfl.algorithms.ballots import Ballot, Tally
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
    first_params,
    log_label_prior,
)
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data, OptimiserName, Rate, batches, descend, descent
from lrbpfl.core.gaussian import sample, widened
from lrbpfl.core.masks import Gates, Masks, Scales
from lrbpfl.core.network import LayerKind, Params, Weights, maskable, rows_of_classes
from lrbpfl.core.objective import MaskedNetwork, free_energy, masked_network, nll, probabilities
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator

Ranks = Literal["evidence", "printed", "fixed"]


class Server(NamedTuple):
    """The shared network, and the votes on how masks move (None: none are taken)."""

    W: Params
    tally: Tally | None


class Message(NamedTuple):
    """What travels: W, and the choice down or the votes up (None: neither)."""

    W: Params
    ballot: Ballot | None


class Client(NamedTuple):
    """What a client keeps: its gates, and the seed of its first draw and of what it holds out."""

    gates: Gates  # gamma_k
    seed: Tensor  # (), int64


class Personal(NamedTuple):
    """A client's model: the shared network, its private mask and its label prior."""

    W: Params
    masks: Masks  # phi_k, psi_k
    gates: Gates  # gamma_k
    log_prior: Tensor  # (classes,)


class Site(NamedTuple):
    """What stays as it is while a client computes."""

    network: MaskedNetwork
    prior_mean: Tensor  # of its factors, (n,)
    log_prior: Tensor  # (classes,)
    num_data: int  # n_k


@dataclass(frozen=True, config=STRICT)
class LRBPFL:
    """One shared deterministic network W, and a private low-rank Bayesian mask at every client."""

    label_prior: NonNegative = 1.0  # what it asks of the task: smooths class frequencies in the likelihood; paper: none
    calibration: Probability = 0.15  # share of a client's data that is kept from W and judges candidates; 0: no choice
    mask_steps: Steps = 15  # T_L, steps on (phi, psi) when W arrives, if the federation does not choose more; paper: 20
    noise: Positive = 2.0  # what multiplies a mask's std where W trains and clients predict, likewise; paper: 1
    max_rank: Count = 2  # r_max; paper: 8
    ranks: Ranks = "evidence"  # what closes gates: held-out examples, the printed penalty (paper), or nothing
    gate_penalty: NonNegative = 0.1  # weight of sum lambda^2 in F, where ranks are printed; paper: 0.1
    gate_lr: NonNegative = 0.001  # eta of gamma, likewise; paper: 0.001
    prior_variance: Positive = 0.1  # of p(Q) and p(R); paper: 0.1
    temperature: NonNegative = 0.01  # weight of the KL; paper: 1
    mask_layers: LayerKind = "auto"  # which layers carry masks, auto: Linear ones if there are any; paper: all
    samples: Count = 1  # C in training; paper: 4
    predict_samples: Count = 16  # C at prediction; paper: 4
    update: Literal["coordinate", "joint"] = "coordinate"  # masks first, then W (paper), or both at once (its ablation)
    model_steps: Steps = 20  # steps on W under the adapted mask; Algorithm 1: 1
    batch_size: Count = 32  # B; paper: 32
    mask_lr: NonNegative = 0.003  # eta of phi, psi at the first step; paper: 0.01
    mask_growth: NonNegative = 0.05  # by which share of mask_lr the rate grows with every step; paper: 0
    model_lr: NonNegative = 0.01  # eta of W; paper: 0.001
    mask_optimiser: OptimiserName = "adam"  # of phi, psi; paper: gradient descent
    model_optimiser: OptimiserName = "momentum"  # of W; paper: gradient descent
    class_rows: bool = True  # the mean of a class's row of the last layer: by how far clients moved it; paper: plain
    weights: Weights = "kaiming"  # of W^0; paper: unspecified
    init_spread: NonNegative = 0.3  # of the initial means around the prior's, apart by rank; paper: unspecified
    init_std: Positive = 0.15  # standard deviation of a fresh posterior; paper: unspecified

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "calibration": 0.0,
            "mask_steps": 20,
            "noise": 1.0,
            "max_rank": 8,
            "ranks": "printed",
            "temperature": 1.0,
            "mask_layers": "all",
            "samples": 4,
            "predict_samples": 4,
            "model_steps": 1,
            "mask_lr": 0.01,
            "mask_growth": 0.0,
            "model_lr": 0.001,
            "mask_optimiser": "sgd",
            "model_optimiser": "sgd",
            "class_rows": False,
            "init_std": 0.05,
            "init_spread": 0.01,
            "label_prior": 0.0,
        },
    }

    def wishes(self) -> Wishes:
        """A label prior, but for the presets."""
        return Wishes(label_prior=self.label_prior)

    def init_server(self, task: Task, rng: Generator) -> Server:
        """The shared network W^0, and no votes yet."""
        if not maskable(task.model, self.mask_layers):
            raise BadInput(
                f"the model has no layer of the kind that mask_layers = {self.mask_layers!r} asks for: set it to 'all'"
            )
        tally = ballots.empty() if self.calibration else None
        return Server(W=first_params(task, self.weights, rng), tally=tally)

    def init_client(self, task: Task, rng: Generator) -> Client:
        """All gates open, and a seed of its own."""
        gamma = math.inf if self.ranks == "fixed" else gating.GAMMA
        gates = {name: gating.init(self.max_rank, gamma) for name in maskable(task.model, self.mask_layers)}
        return Client(gates=gates, seed=torch.randint(2**62, (), generator=rng))

    def broadcast(self, task: Task, server: Server, client_id: int) -> Message:
        """Everybody gets W^t, the choice in force and what to judge."""
        if server.tally is None:
            return Message(W=server.W, ballot=None)
        choice = ballots.choose(server.tally, task.num_clients)
        return Message(W=server.W, ballot=ballots.asking(choice))

    def client_update(
        self, task: Task, message: Message, client: Client, data: Data, rng: Generator
    ) -> tuple[Message, Client, Info]:
        """Adapt the mask to W^t, then W to the mask; W_k goes up, and a vote where one is asked for; the rest stays."""
        asked = self._asked(message.ballot, data)
        held = None
        if asked:
            data, held = ballots.parts(
                data, self.calibration, task.num_clients, generator(int(client.seed), "held out")
            )
        gates = client.gates if asked else self._settled(client.gates)
        site = self._site(task, gates, data)
        W, ballot = message
        if self.update == "joint":
            W, gates, loss = self._joint(task, site, W, client, gates, data, rng)
        else:
            path = self._path(site, W, client, gates, data, {self.mask_steps, *asked.values()}, rng)
            masks, gates = path[self.mask_steps]
            W, loss = self._train(task, site, W, widened(masks, self.noise), gates, data, rng)
            if ballot is not None and held is not None:
                ballot, gates = self._vote(site, message, {at: path[at][0] for at in path}, gates, asked, held, rng)
        if self.ranks == "printed":
            gates = {name: gating.prune(gamma) for name, gamma in gates.items()}  # Eq. (10)
        ranks = [gating.rank(gamma) for gamma in self._settled(gates).values()]
        steps, noise = self._choice(message.ballot)
        info = {"loss": loss, "rank": sum(ranks) / len(ranks), "mask_steps": float(steps), "mask_noise": noise}
        return Message(W, ballot), Client(gates=gates, seed=client.seed), info

    def server_aggregate(self, task: Task, server: Server, updates: Iterable[Update], rng: Generator) -> Server:
        """W^{t+1} = sum_k l_k W_k^t, l_k proportional to the clients' data (rows of classes as `class_rows` says).

        And their votes, while any are taken.
        """
        votes: list[Ballot] = []

        def networks() -> Iterator[Update]:
            for update in updates:
                votes.append(update.upload.ballot)
                yield update._replace(upload=update.upload.W)

        rows = rows_of_classes(task.model, task.num_classes) if self.class_rows else ()
        W = average.mean(server.W, networks(), rows)
        tally = server.tally
        if tally is not None:
            tally = ballots.count(tally, votes, task.num_clients)
        return Server(W=W, tally=tally)

    def personalise(self, task: Task, message: Message, client: Client, data: Data, rng: Generator) -> Personal:
        """A mask adapted to the final W on all of the client's training data; gates rest, a new client's are open."""
        steps, noise = self._choice(message.ballot)
        gates = self._settled(client.gates)
        site = self._site(task, gates, data)
        masks, _ = self._path(site, message.W, client, gates, data, {steps}, rng, gates_rest=True)[steps]
        return Personal(W=message.W, masks=widened(masks, noise), gates=gates, log_prior=site.log_prior)

    def predict(self, task: Task, personal: Personal, x: Tensor, rng: Generator) -> Tensor:
        """The softmax under each of C masks, (C, n, classes); the same masks for all of x."""
        W, masks, gates, log_prior = personal
        network = masked_network(task.model, maskable(task.model, self.mask_layers), gates)
        draws, scales = sample(masks, masking.draw(masks, self.predict_samples, rng)), self._scales(gates)
        return probabilities(lambda x: network.logits(W, draws, network.before(W, x), scales) + log_prior, x)

    def _choice(self, ballot: Ballot | None) -> tuple[int, float]:
        """The number of mask steps and the noise in force."""
        steps, noise = ballots.CAUTIOUS if ballot is None else ballots.chosen(ballot)
        return self._steps(steps), self.noise * ballots.NOISES[noise]

    def _steps(self, place: int) -> int:
        return round(self.mask_steps * ballots.STEPS[place])

    def _asked(self, ballot: Ballot | None, data: Data) -> dict[int, int]:
        """The numbers of steps to be judged, by their places; who has one example has none to judge with."""
        if ballot is None or self.update == "joint" or len(data.y) < 2:
            return {}
        return {place: self._steps(place) for place in ballots.asked(ballot)}

    def _settled(self, gates: Gates) -> Gates:
        """Gates as held-out examples have left them: those of ranks that were not worth their price are closed."""
        return {name: gating.prune(gamma) for name, gamma in gates.items()} if self.ranks == "evidence" else gates

    def _scales(self, gates: Gates) -> Scales | None:
        """Lambda of the open ranks where it is trained; elsewhere a gate is open or closed."""
        if self.ranks != "printed":
            return None
        return {name: gating.gates(gamma)[gating.is_open(gamma)] for name, gamma in gates.items()}

    def _site(self, task: Task, gates: Gates, data: Data) -> Site:
        network = masked_network(task.model, maskable(task.model, self.mask_layers), gates)
        prior_mean = masking.prior_mean(network.places).to(data.y.device)
        return Site(network, prior_mean, log_label_prior(task, data.y), num_data=len(data.y))

    def _fresh_masks(self, site: Site, client: Client) -> Masks:
        """The client's own first draw: rank i begins in the same place whenever W arrives."""
        rng = generator(int(client.seed), "mask")
        masks = masking.init(site.network.places, spread=self.init_spread, std=self.init_std, rng=rng)
        return Masks(*(part.to(site.prior_mean) for part in masks))

    def _path(
        self,
        site: Site,
        W: Params,
        client: Client,
        gates: Gates,
        data: Data,
        at: set[int],
        rng: Generator,
        *,
        gates_rest: bool = False,
    ) -> dict[int, tuple[Masks, Gates]]:
        """Masks and gates after so many steps on the free energy with W fixed: one way serves all numbers of steps."""
        moving = self.ranks == "printed" and not gates_rest

        def energy(masks: Masks, *rest: Any) -> Tensor:
            batch = rest[-1]
            return self._free_energy(site, W, masks, rest[0] if moving else gates, batch.x, batch.y, rng)

        start = self._fresh_masks(site, client)
        groups = (start, gates) if moving else (start,)
        rates = (self._mask_rate(), self._gate_rate())[: len(groups)]
        steps = self._batches(site, W, data, max(at), rng)
        found: dict[int, tuple[Masks, Gates]] = {}
        for step, (reached, _) in enumerate(descent(energy, groups, steps, rates)):
            if step in at:
                masks, *others = trees.tree_map(lambda leaf: leaf.detach().clone(), reached)
                found[step] = masks, others[0] if moving else gates
        return found

    def _train(
        self, task: Task, site: Site, W: Params, masks: Masks, gates: Gates, data: Data, rng: Generator
    ) -> tuple[Params, float]:
        """Steps on W under the adapted mask; the KL and the penalty do not depend on W."""
        scales, before = self._scales(gates), site.network.before
        (W,), loss = descend(
            lambda W, batch: self._nll(site, W, masks, scales, before(W, batch.x), batch.y, rng),
            (W,),
            batches(data, self.batch_size, self.model_steps, rng),
            (Rate(self.model_optimiser, self.model_lr * task.pace),),
        )
        return W, loss

    def _joint(
        self, task: Task, site: Site, W: Params, client: Client, gates: Gates, data: Data, rng: Generator
    ) -> tuple[Params, Gates, float]:
        """The ablation: T_L steps on (phi, psi, gamma) and W together."""

        def energy(masks: Masks, gates: Gates, W: Params, batch: Data) -> Tensor:
            return self._free_energy(site, W, masks, gates, site.network.before(W, batch.x), batch.y, rng)

        (_, gates, W), loss = descend(
            energy,
            (self._fresh_masks(site, client), gates, W),
            batches(data, self.batch_size, self.mask_steps, rng),
            (self._mask_rate(), self._gate_rate(), Rate(self.model_optimiser, self.model_lr * task.pace)),
        )
        return W, gates, loss

    def _batches(self, site: Site, W: Params, data: Data, steps: int, rng: Generator) -> Iterator[Data]:
        """Batches of what comes before the masks, which no mask changes: computed once if all of it will be seen."""
        before = torch.no_grad()(site.network.before)
        if len(data.y) <= steps * self.batch_size:
            h = torch.cat([before(W, piece) for piece in torch.split(data.x, 500)])
            return batches(Data(h, data.y), self.batch_size, steps, rng)
        return (Data(before(W, batch.x), batch.y) for batch in batches(data, self.batch_size, steps, rng))

    def _nll(
        self, site: Site, W: Params, masks: Masks, scales: Scales | None, h: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        """-E_q[log p(batch | W o M)] per example, by C sampled masks."""
        draws = sample(masks, masking.draw(masks, self.samples, rng))
        return nll(site.network.logits(W, draws, h, scales) + site.log_prior, y)

    def _free_energy(
        self, site: Site, W: Params, masks: Masks, gates: Gates, h: Tensor, y: Tensor, rng: Generator
    ) -> Tensor:
        """F_k(W, phi_k, psi_k, lambda_k) per example, on one batch.  Eq. (8)"""
        F = self._nll(site, W, masks, self._scales(gates), h, y, rng)
        if self.temperature:
            kl = masking.kl_divergence(masks, site.prior_mean, math.sqrt(self.prior_variance))
            F = free_energy(F, kl, temperature=self.temperature, num_data=site.num_data)
        if self.ranks == "printed":
            F = F + self.gate_penalty / site.num_data * torch.stack([*map(gating.penalty, gates.values())]).sum()
        return F

    def _vote(
        self,
        site: Site,
        message: Message,
        reached: dict[int, Masks],
        gates: Gates,
        asked: dict[int, int],
        held: Data,
        rng: Generator,
    ) -> tuple[Ballot, Gates]:
        """What held-out examples say of masks after so many steps, and of their ranks after the steps in force."""
        W, ballot = message
        assert ballot is not None
        with torch.no_grad():
            held = Data(site.network.before(W, held.x), held.y)
        noise = masking.draw(reached[self.mask_steps], self.predict_samples, rng)
        sizes = [self.noise * size for size in ballots.NOISES]
        judged = {
            place: evidence.of_noises(site.network, W, reached[at], sizes, noise, held, site.log_prior)
            for place, at in asked.items()
        }
        if self.ranks == "evidence":
            masks = reached[self._choice(ballot)[0]]
            gates = evidence.weighed(site.network, W, masks, gates, held, site.log_prior)
        return ballots.cast(ballot, judged), gates

    def _mask_rate(self) -> Rate:
        return Rate(self.mask_optimiser, self.mask_lr, growth=self.mask_growth)

    def _gate_rate(self) -> Rate:
        return Rate("sgd", self.gate_lr if self.ranks == "printed" else 0.0)
