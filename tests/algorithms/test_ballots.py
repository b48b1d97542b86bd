"""The vote: what is asked, what is counted, what is chosen, and who may judge."""

import math

import pytest
import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.algorithms import ballots, evidence
from lrbpfl.algorithms.ballots import CAUTIOUS, NOISES, STEPS, Ballot, Choice
from lrbpfl.algorithms.lr_bpfl import LRBPFL, Message
from lrbpfl.algorithms.protocol import Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.rng import generator
from tests.algorithms.hand import play, start
from tests.conftest import Toy


def vote(gains: dict[Choice, list[float]]) -> Ballot:
    """One client's ballot, from each example's gain under some candidates."""
    ballot = ballots.blank()
    for place, values in {CAUTIOUS: [0.0], **gains}.items():
        each = torch.tensor(values)
        ballot.gains[place], ballot.squares[place], ballot.examples[place] = each.sum(), each.square().sum(), len(each)
    return ballot


def test_a_choice_is_beyond_its_standard_error() -> None:
    """Gains 1 and -0.6: mean 0.2, and with eight of them a standard error of 0.8 / sqrt(8) = 0.283; with 32, 0.141."""
    unsure = {(2, 1): [1.0, -0.6] * 4}
    few = ballots.count(ballots.empty(), [vote(unsure)], num_clients=8)
    assert ballots.choose(few, num_clients=8) == CAUTIOUS
    many = ballots.count(ballots.empty(), [vote(unsure)] * 4, num_clients=8)
    assert ballots.choose(many, num_clients=8) == (2, 1)


def test_the_same_examples_shown_again_are_no_more_evidence() -> None:
    """Four votes of one and the same client say what one of them says."""
    unsure = vote({(2, 1): [1.0, -0.6] * 4})
    tally = ballots.count(ballots.empty(), [unsure] * 4, num_clients=1)
    assert ballots.choose(tally, num_clients=1) == CAUTIOUS


def test_the_best_of_several_wins_and_losses_never_do() -> None:
    ballot = vote({(0, 0): [-0.1] * 20, (2, 2): [0.3] * 20, (3, 1): [0.4] * 20, (4, 0): [2.0, -2.0] * 10})
    tally = ballots.count(ballots.empty(), [ballot], num_clients=4)
    assert ballots.choose(tally, num_clients=4) == (3, 1)


def test_old_votes_fade_by_the_share_of_clients_that_spoke_and_sooner_where_nobody_is_asked() -> None:
    """Two of four clients, a window of two votes each: a quarter of what was heard goes; unasked, half of the rest."""
    old = ballots.count(ballots.empty(), [vote({(2, 1): [1.0], (3, 1): [1.0]})], num_clients=4)
    tally = ballots.count(old, [vote({(2, 1): [5.0]})] * 2, num_clients=4)
    assert tally.gains[2, 1].item() == pytest.approx(0.75 * 1.0 + 10.0)
    assert tally.examples[2, 1].item() == pytest.approx(0.75 + 2.0)
    assert tally.gains[3, 1].item() == pytest.approx(0.375)


def test_a_ballot_goes_down_with_the_choice_and_its_neighbours() -> None:
    for choice, asked in (((1, 2), [0, 1, 2]), ((0, 0), [0, 1]), ((3, 1), [1, 2, 3, 4]), ((5, 0), [1, 4, 5])):
        ballot = ballots.asking(choice)
        assert ballots.chosen(ballot) == choice and ballots.asked(ballot) == asked
        silent = ballots.asking(choice, judging=False)
        assert ballots.chosen(silent) == choice and ballots.asked(silent) == []


def test_clients_take_turns_and_a_round_without_judges_forgets_nothing() -> None:
    one = ballots.count(ballots.empty(), [vote({(2, 1): [1.0]}), ballots.blank()], num_clients=4)
    two = ballots.count(one, [ballots.blank()], num_clients=4)
    assert trees.equal(two._replace(rounds=one.rounds), one)
    rounds = [one._replace(rounds=torch.tensor(t)) for t in range(5)]
    assert [ballots.has_turn(tally, 0, (1, 2)) for tally in rounds] == [True, False, False, True, True]
    assert [ballots.has_turn(tally, 3, (3, 0)) for tally in rounds] == [False, True, True, False, False]


def test_where_masks_go_far_a_quarter_of_the_clients_judges_at_a_time() -> None:
    rounds = [ballots.empty()._replace(rounds=torch.tensor(t)) for t in range(8)]
    turns = torch.tensor([[ballots.has_turn(tally, k, (ballots.FAR, 0)) for tally in rounds] for k in range(8)])
    assert turns.sum(dim=0).tolist() == turns.sum(dim=1).tolist() == 8 * [2]


def test_a_ballot_goes_up_with_sums_of_gains_over_the_cautious_candidate() -> None:
    rng = generator(0)
    judged = {place: -torch.rand(len(NOISES), 7, generator=rng) for place in (0, 1, 2)}
    up = ballots.cast(judged)
    gains = judged[2][0] - judged[1][2]
    assert up.gains[2, 0].item() == pytest.approx(gains.sum().item(), rel=1e-5)
    assert up.squares[2, 0].item() == pytest.approx((gains**2).sum().item(), rel=1e-5)
    assert up.examples[:, 0].tolist() == [7, 7, 7, 0, 0, 0] and up.gains[CAUTIOUS] == 0


def test_judges_are_the_same_in_every_round_and_of_all_classes_alike() -> None:
    y = torch.tensor([0] * 40 + [1] * 20 + [2] * 20)
    data = Data(x=torch.arange(80.0)[:, None], y=y)
    rest, held = ballots.parts(data, 0.25, 10, generator(0, "judges"))
    assert torch.bincount(held.y).tolist() == [10, 5, 5] and len(rest.y) == 60
    assert sorted(torch.cat([rest.x, held.x]).flatten().tolist()) == list(range(80))
    again = ballots.parts(data, 0.25, 10, generator(0, "judges"))
    assert trees.equal((rest, held), again)
    assert bool((held.y == y[held.x.flatten().long()]).all())


@pytest.mark.parametrize(("n", "clients", "held"), [(2, 5, 1), (3, 5, 1), (1000, 5, 60), (1000, 1000, 1), (40, 0, 6)])
def test_how_many_judge(n: int, clients: int, held: int) -> None:
    """A share of the data, but no more than the client's part of all that are needed, and never all."""
    data = Data(x=torch.zeros(n, 1), y=torch.arange(n) % 3)
    assert len(ballots.parts(data, 0.15, clients, generator(0))[1].y) == held


def test_no_network_sees_the_judges(toy: Toy) -> None:
    """Their inputs may hold anything, and the upload's network stays the same; the vote does not."""
    algorithm = LRBPFL()
    run = start(algorithm, toy)
    down, client, data = algorithm.broadcast(toy.task, run.server, 0), run.clients[0], toy.train[0]
    judges = generator(int(client.seed), "judges")
    _, held = ballots.parts(data, algorithm.calibration, toy.task.num_clients, judges)
    mine = (data.x[:, None] == held.x[None]).all(-1).any(1)
    spoilt = Data(x=torch.where(mine[:, None], -data.x, data.x), y=data.y)
    one, other = (algorithm.client_update(toy.task, down, client, d, generator(0))[0] for d in (data, spoilt))
    assert trees.equal(one.W, other.W) and not trees.equal(one.ballot, other.ballot)


def test_clients_that_swap_labels_make_the_federation_choose_far_steps(toy: Toy) -> None:
    """Half of the clients call the classes differently: no one network serves them, and masks must move."""
    swapped = {k: Data(d.x, d.y ^ 1) if k % 2 else d for k, d in toy.train.items()}
    differing = toy._replace(train=swapped)
    algorithm = LRBPFL()
    far = play(algorithm, differing, start(algorithm, differing), range(12))
    place, _ = ballots.choose(far.server.tally, toy.task.num_clients)
    assert STEPS[place] > 1


def test_votes_can_be_switched_off(toy: Toy) -> None:
    algorithm = LRBPFL(calibration=0.0)
    run = play(algorithm, toy, start(algorithm, toy), range(1))
    down = algorithm.broadcast(toy.task, run.server, 0)
    assert run.server.tally is None and down.ballot is None


def test_who_is_not_asked_keeps_its_judges_from_the_network_and_sends_a_blank_ballot(toy: Toy) -> None:
    algorithm = LRBPFL()
    run = start(algorithm, toy)
    asked, spared = (Message(run.server.W, ballots.asking(CAUTIOUS, judging=judging)) for judging in (True, False))
    ups = [algorithm.client_update(toy.task, m, run.clients[0], toy.train[0], generator(0))[0] for m in (asked, spared)]
    assert trees.equal(ups[1].ballot, ballots.blank()) and not trees.equal(ups[0].ballot, ups[1].ballot)
    down = algorithm.broadcast(toy.task, run.server, 1)
    assert down.ballot is not None and ballots.chosen(down.ballot) == CAUTIOUS and ballots.asked(down.ballot) == []


def test_a_client_with_one_example_takes_part_and_does_not_vote(toy: Toy) -> None:
    algorithm = LRBPFL()
    run = start(algorithm, toy)
    down = algorithm.broadcast(toy.task, run.server, 0)
    data = Data(toy.train[0].x[:1], toy.train[0].y[:1])
    up, _, info = algorithm.client_update(toy.task, down, run.clients[0], data, generator(0))
    assert trees.fault(up, down) is None and math.isfinite(info["loss"]) and not trees.equal(up.W, down.W)
    server = algorithm.server_aggregate(toy.task, run.server, [Update(0, 1, up)], generator(0))
    assert server.tally is not None and float(server.tally.examples.sum()) == 0.0


def test_what_can_be_cast_is_no_fault() -> None:
    """Also where every example is as likely, or as unlikely, as can be."""
    least = evidence.LEAST
    for gains in ([0.1, -3.0, 2.0], [-least] * 3, [least] * 3, [least, -least, 0.0], [0.3] * 3):
        assert ballots.fault(vote({(2, 1): gains}), num_clients=100) is None
    assert ballots.fault(ballots.blank(), num_clients=100) is None
    likely = {place: least * torch.rand(3, 3, generator=generator(place)) for place in (1, 2, 3)}
    assert ballots.fault(ballots.cast(likely), num_clients=100) is None


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("gains", 1e30, "gains more than 87 nats"),
        ("gains", -270.0, "gains more than 87 nats"),
        ("gains", 100.0, "sums of squares"),  # three examples with squares of 5 gain 3.9 at most
        ("squares", 1e30, "sums of squares"),
        ("squares", -1.0, "sums of squares"),
        ("examples", 4.0, "counts 4 examples, and a client has 3 at most"),
        ("examples", 1e30, "examples, and a client has 3 at most"),
        ("examples", 2.5, "no whole number"),
        ("examples", -1.0, "no whole number"),
        ("examples", 0.0, "gains more than"),
    ],
)
def test_what_no_client_can_have_cast_is_told(part: str, value: float, words: str) -> None:
    ballot = vote({(2, 1): [1.0, 2.0, 0.0]})
    getattr(ballot, part)[2, 1] = value
    assert words in str(ballots.fault(ballot, num_clients=100))
    assert words in str(LRBPFL().fault(Task(nn.Linear(1, 2), 2, num_clients=100), Message({}, ballot)))
