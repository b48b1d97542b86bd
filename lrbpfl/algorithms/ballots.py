"""How far masks move and how noisy they are, put to the vote.

A candidate is a number of steps and a size of the noise, as multiples of the cautious ones. A client judges candidates
on examples that no network has seen: what travels up is, for each, by how much these are likelier than under the
cautious candidate, summed, the sum of the squares, and how many there were. The server pools the sums over clients and
rounds, and takes the candidate whose mean gain, less its standard error, is the largest, or else the cautious one.
Judging takes time, so clients take turns: one half of them is asked at a time, or a quarter where masks go far.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lrbpfl.algorithms.evidence import LEAST
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import take

STEPS = (0.0, 1.0, 2.0, 3.0, 6.0, 10.0)  # times the cautious number
NOISES = (1 / 6, 1 / 2, 1.0)  # times the cautious size
CAUTIOUS = (1, 2)  # places of 1 and 1
FAR = 4  # the place from which on masks go far
VOTERS = 300  # examples that judge, over all clients: more would cost more training data than they tell
ROUNDING = 1e-3  # a share by which sums in float32 may miss what they are bounded by
WINDOW = 2  # votes of a client, on average, that count at a time: networks get better, and old votes speak of old ones

Choice = tuple[int, int]  # places in STEPS and NOISES


class Ballot(NamedTuple):
    """What travels, each (STEPS, NOISES).

    Down: a 1 in `gains` at the candidate in force, a 1 in `examples` at those to be judged. Up: the sums over held-out
    examples.
    """

    gains: Tensor
    squares: Tensor
    examples: Tensor


class Tally(NamedTuple):
    """What the server has heard, older votes counting less, each (STEPS, NOISES)."""

    gains: Tensor
    squares: Tensor
    examples: Tensor
    votes: Tensor  # clients that judged the candidate
    rounds: Tensor  # (), int64, so far


def empty() -> Tally:
    """No votes yet."""
    zeros = (torch.zeros(len(STEPS), len(NOISES), dtype=torch.float64) for _ in Tally._fields[:-1])
    return Tally(*[*zeros, torch.zeros((), dtype=torch.int64)])


def has_turn(tally: Tally, client_id: int, choice: Choice) -> bool:
    """Whether the client is to judge in this round, should it take part: even and odd ones, two rounds each.

    Where masks go far, which takes a judge long, a quarter of the clients at a time.
    """
    groups = 4 if choice[0] >= FAR else 2
    return (client_id + (int(tally.rounds) + 1) // 2) % groups == 0  # // 2: rounds themselves may go by even and odd


def blank() -> Ballot:
    """A ballot that says nothing."""
    return Ballot(*(torch.zeros(len(STEPS), len(NOISES)) for _ in Ballot._fields))


def asking(choice: Choice, *, judging: bool = True) -> Ballot:
    """The ballot that goes down: the choice in force, and what to judge, if anything.

    That is all noises at the cautious steps, at the chosen ones, and at those next to them: masks go further one step
    at a time, and nobody tries far ways for nothing.
    """
    ballot = blank()
    ballot.gains[choice] = 1.0
    if judging:
        ballot.examples[[CAUTIOUS[0], *range(max(choice[0] - 1, 0), min(choice[0] + 2, len(STEPS)))]] = 1.0
    return ballot


def chosen(ballot: Ballot) -> Choice:
    """The candidate in force."""
    place = int(ballot.gains.argmax())
    return place // len(NOISES), place % len(NOISES)


def asked(ballot: Ballot) -> list[int]:
    """The places in STEPS that are to be judged, all noises each."""
    return ballot.examples.any(dim=1).nonzero().flatten().tolist()


def cast(judged: dict[int, Tensor]) -> Ballot:
    """The ballot that goes up, from log-likelihoods (NOISES, examples) by places in STEPS, the cautious among them."""
    up = blank()
    for place, likely in judged.items():
        gains = likely - judged[CAUTIOUS[0]][CAUTIOUS[1]]
        up.gains[place] = gains.sum(dim=1)
        up.squares[place] = gains.square().sum(dim=1)
        up.examples[place] = gains.shape[1]
    return up


def fault(ballot: Ballot, num_clients: int) -> str | None:
    """Why no client can have cast this ballot, or None: one vote has its bounds, whoever casts it.

    A client has its part of VOTERS at most. A log-likelihood lies between LEAST and 0, so no example gains or loses
    more than that; and the sum of squares is at least the square of the sum over the number (Cauchy and Schwarz).
    """
    gains, squares, examples = (part.double() for part in ballot)
    most, widest, slack = _most(num_clients), -LEAST * (1 + ROUNDING), 1 + ROUNDING
    if bool((examples < 0).any()) or bool((examples != examples.round()).any()):
        return "its vote counts examples that are no whole number"
    if bool((examples > most).any()):
        return f"its vote counts {examples.max():g} examples, and a client has {most:g} at most"
    if bool((gains.abs() > widest * examples).any()):
        return f"its vote gains more than {widest:.0f} nats with an example, which none can"
    if bool((squares > widest**2 * examples).any()) or bool((gains**2 > slack * examples * squares + ROUNDING).any()):
        return "its vote has sums of squares that cannot be"
    return None


def count(tally: Tally, ballots: Iterable[Ballot], num_clients: int) -> Tally:
    """The tally after a round: what was heard fades by the share of clients that has just spoken.

    Twice as fast where they were not asked: what was said of another network must not stand for ever.
    """
    *heard, _ = empty()
    speakers = 0
    for ballot in ballots:
        fresh = (*ballot, (ballot.examples > 0).to(ballot.examples))
        heard = [total + part.double().cpu() for total, part in zip(heard, fresh, strict=True)]
        speakers += int(ballot.examples.any())
    if not speakers:
        return tally._replace(rounds=tally.rounds + 1)
    keep = max(1 - speakers / (WINDOW * num_clients), 0.0) if num_clients else 1.0
    *_, votes = heard
    kept = torch.where(votes > 0, keep, keep / 2)
    totals = (kept * old + new for old, new in zip(tally[:-1], heard, strict=True))
    return Tally(*[*totals, tally.rounds + 1])


def choose(tally: Tally, num_clients: int) -> Choice:
    """The candidate with the largest mean gain less its standard error; the cautious one if none of them is above 0.

    A client that votes twice shows the same examples again: in the standard error they count once.
    """
    heard = tally.examples.clamp(min=1.0)
    mean = tally.gains / heard
    repeats = (tally.votes / num_clients).clamp(min=1.0) if num_clients else torch.ones_like(mean)
    error = ((tally.squares / heard - mean.square()).clamp(min=0.0) * repeats / heard).sqrt()
    worth = torch.where(tally.examples > 0, mean - error, torch.full_like(mean, -math.inf))
    worth[CAUTIOUS] = 0.0
    place = int(worth.argmax())
    return (place // len(NOISES), place % len(NOISES)) if worth.max() > 0 else CAUTIOUS


def parts(data: Data, share: float, num_clients: int, rng: Generator) -> tuple[Data, Data]:
    """The data without and with those that judge: a share of every class, as nearly as whole numbers allow.

    Never more than the client's part of VOTERS, at least one, and one is left; from the same generator always the same.
    """
    n = len(data.y)
    held = int(min(max(round(share * n), 1), _most(num_clients), n - 1))
    y = data.y.cpu()
    turn = torch.empty(n, dtype=torch.float64)  # when an example's turn comes, its class spread over (0, 1)
    for label in y.unique():
        mine = (y == label).nonzero().flatten()
        places = torch.randperm(len(mine), generator=rng) + torch.rand(1, generator=rng, dtype=torch.float64)
        turn[mine] = places / len(mine)
    order = turn.argsort(stable=True).to(data.y.device)
    rest, voters = order[held:].sort().values, order[:held].sort().values
    return Data(take(data.x, rest), data.y[rest]), Data(take(data.x, voters), data.y[voters])


def _most(num_clients: int) -> float:
    """A client's part of VOTERS; without end if nobody said how many clients there are."""
    return math.ceil(VOTERS / num_clients) if num_clients else math.inf
