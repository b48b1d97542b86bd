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

from lrbpfl.algorithms import average, ballots, evidence
from lrbpfl.algorithms.ballots import Ballot, Tally
from lrbpfl.algorithms.masked_client import MaskedClient, scales_of
from lrbpfl.algorithms.protocol import (
    STRICT,
    Count,
    Ensemble,
    Info,
    NonNegative,
    Positive,
    Probability,
    Steps,
    Task,
    Update,
    Wishes,
    first_params,
)
from lrbpfl.core import gates as gating
from lrbpfl.core import masks as masking
from lrbpfl.core.descent import Data, OptimiserName
from lrbpfl.core.gaussian import sample, widened
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.masks import Gates, Masks, Scales
from lrbpfl.core.network import LayerKind, Params, Weights, maskable, rows_of_classes
from lrbpfl.core.objective import masked_network, probabilities
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


class PersonalMask(NamedTuple):
    """A client's model: the shared network, its private mask and its label prior."""

    W: Params
    masks: Masks  # phi_k, psi_k
    gates: Gates  # gamma_k
    log_prior: Tensor  # (classes,)


class MaskedEnsemble(NamedTuple):
    """A client's model with its masks drawn."""

    W: Params
    draws: Tensor  # (C, n), factors of all masked layers
    scales: Scales | None
    log_prior: Tensor  # (classes,)


@dataclass(frozen=True, config=STRICT)
class LRBPFL:
    """One shared deterministic network W, and a private low-rank Bayesian mask at every client."""

    HOLDS: ClassVar[str] = "A mask that was fitted to the client's own examples."
    SUMS: ClassVar[tuple[str, ...]] = ("ballot",)

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
        """Everybody gets W^t and the choice in force, and who has its turn what to judge."""
        if server.tally is None:
            return Message(W=server.W, ballot=None)
        choice = ballots.choose(server.tally, task.num_clients)
        judging = ballots.has_turn(server.tally, client_id, choice)
        return Message(W=server.W, ballot=ballots.asking(choice, judging=judging))

    def client_update(
        self, task: Task, message: Message, client: Client, data: Data, rng: Generator
    ) -> tuple[Message, Client, Info]:
        """Adapt the mask to W^t, then W to the mask; W_k goes up, and a vote where one is asked for; the rest stays."""
        W, gates = message.W, client.gates
        ballot, held, asked = None, None, dict[int, int]()
        if message.ballot is not None:
            ballot = ballots.blank()
            if len(data.y) > 1:
                judges = generator(int(client.seed), "judges")  # the same examples in every round
                data, held = ballots.parts(data, self.calibration, task.num_clients, judges)
                places = ballots.asked(message.ballot) if self.update == "coordinate" else []
                asked = {place: self._steps(place) for place in places}
        at_work = MaskedClient.of(self, task, gates, data)
        start = at_work.fresh_masks(client.seed)
        if self.update == "joint":
            W, gates, loss = at_work.joint(W, start, rng)
        else:
            path = at_work.path(W, start, {self.mask_steps, *asked.values()}, rng)
            masks, gates = path[self.mask_steps]
            W, loss = at_work.trained(W, widened(masks, self.noise), gates, rng)
            if held and asked:
                reached = {place: path[steps][0] for place, steps in asked.items()}
                ballot, gates = self._vote(at_work, message, reached, gates, held, rng)
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

    def fault(self, task: Task, upload: Message) -> str | None:
        """Why no client can have cast the vote in this upload, or None."""
        return None if upload.ballot is None else ballots.fault(upload.ballot, task.num_clients)

    def personalise(self, task: Task, message: Message, client: Client, data: Data, rng: Generator) -> PersonalMask:
        """A mask adapted to the final W on all of the client's training data; gates rest, a new client's are open."""
        steps, noise = self._choice(message.ballot)
        at_work = MaskedClient.of(self, task, self._settled(client.gates), data)
        masks, gates = at_work.path(message.W, at_work.fresh_masks(client.seed), {steps}, rng, gates_rest=True)[steps]
        return PersonalMask(W=message.W, masks=widened(masks, noise), gates=gates, log_prior=at_work.log_prior)

    def predict(self, task: Task, personal: PersonalMask, x: Inputs, rng: Generator) -> Tensor:
        """The softmax under each of C masks, (C, n, classes); the same masks for all of x."""
        tensors, logits = self.ensemble(task, personal, rng)
        return probabilities(lambda x: logits(tensors, x), x)

    def ensemble(self, task: Task, personal: PersonalMask, rng: Generator) -> Ensemble:
        """C masks on the one W, kept as their factors."""
        W, masks, gates, log_prior = personal
        network = masked_network(task.model, maskable(task.model, self.mask_layers), gates)
        draws, scales = sample(masks, masking.draw(masks, self.predict_samples, rng)), scales_of(self, gates)

        def logits(own: MaskedEnsemble, x: Any) -> Tensor:
            return network.logits(own.W, own.draws, network.before(own.W, x), own.scales) + own.log_prior

        return Ensemble(MaskedEnsemble(W, draws, scales, log_prior), logits)

    def _choice(self, ballot: Ballot | None) -> tuple[int, float]:
        """The number of mask steps and the noise in force."""
        steps, noise = ballots.CAUTIOUS if ballot is None else ballots.chosen(ballot)
        return self._steps(steps), self.noise * ballots.NOISES[noise]

    def _steps(self, place: int) -> int:
        return round(self.mask_steps * ballots.STEPS[place])

    def _settled(self, gates: Gates) -> Gates:
        """Gates as held-out examples have left them: those of ranks that were not worth their price are closed."""
        return {name: gating.prune(gamma) for name, gamma in gates.items()} if self.ranks == "evidence" else gates

    def _vote(
        self,
        at_work: MaskedClient,
        message: Message,
        reached: dict[int, Masks],
        gates: Gates,
        held: Data,
        rng: Generator,
    ) -> tuple[Ballot, Gates]:
        """What held-out examples say of masks after so many steps, and of their ranks after the steps in force."""
        (W, ballot), network, log_prior = message, at_work.network, at_work.log_prior
        with torch.no_grad():
            held = Data(network.before(W, held.x), held.y)
        noise = masking.draw(reached[ballots.CAUTIOUS[0]], self.predict_samples, rng)  # the same for all candidates
        scales, sizes = scales_of(self, gates), [self.noise * size for size in ballots.NOISES]

        def logits(draws: Tensor) -> Tensor:
            return network.logits(W, draws, held.x, scales) + log_prior

        votes = {at: evidence.of_noises(logits, masks, sizes, noise, held.y) for at, masks in reached.items()}
        if self.ranks == "evidence" and ballot:
            masks = reached[ballots.chosen(ballot)[0]]
            gates = evidence.weighed(network, W, masks, gates, held, log_prior)
        return ballots.cast(votes), gates
