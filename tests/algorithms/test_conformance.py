"""Every entry of the registry keeps every promise of the protocol, and some that only ours have to keep."""

import math

import pytest
import torch

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import Message
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.metrics import scores
from lrbpfl.metrics.predictions import reduce
from lrbpfl.rng import generator
from lrbpfl.testing.case import Case, call, make_case
from lrbpfl.testing.case import probabilities as check_probabilities
from lrbpfl.testing.contracts import CONTRACTS, Check
from lrbpfl.testing.form import FORM
from lrbpfl.trees import Tree
from tests.algorithms.hand import accuracy, play, predict, start
from tests.conftest import CLASSES, Toy, blobs


@pytest.fixture(scope="session", params=list(ALGORITHMS))
def case(request: pytest.FixtureRequest, toy: Toy) -> Case:
    """Tests that take a case run once for every algorithm, with its default fields."""
    return make_case(ALGORITHMS[request.param](), toy)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_what_every_algorithm_promises(case: Case, contract: Check) -> None:
    contract(case)


def test_what_every_algorithm_looks_like(case: Case) -> None:
    for check in FORM:
        check(case.algorithm)


def test_every_round_changes_something_and_a_server_is_there_to_send(case: Case, toy: Toy) -> None:
    assert not trees.equal(play(case.algorithm, toy, case.run, range(1, 2)), case.run)
    assert bool(trees.leaves(case.message)) == bool(trees.leaves(case.run.server))


def test_another_seed_gives_another_result(case: Case, toy: Toy) -> None:
    assert not trees.equal(start(case.algorithm, toy, seed=1), start(case.algorithm, toy, seed=0))
    assert not trees.equal(call("client_update", case, seed=1), call("client_update", case, seed=0))


def network(message: Tree) -> Tree:
    """A message without what clients say about other things than the network."""
    return message._replace(ballot=None) if isinstance(message, Message) else message


def test_the_pace_of_a_round_scales_what_is_sent(case: Case) -> None:
    """At pace 0 the network comes back as it was sent, at half the pace neither so nor as at the whole one."""
    algorithm, (task, *_), _, message, client, data, *_ = case

    def trained(pace: float) -> Tree:
        upload, kept, _ = algorithm.client_update(task._replace(pace=pace), message, client, data, generator(0))
        return network(upload) if trees.leaves(message) else kept.W  # a site alone sends nothing

    sent = network(message) if trees.leaves(message) else client.W
    assert trees.equal(trained(0.0), sent)
    assert not trees.equal(trained(0.5), sent) and not trees.equal(trained(0.5), trained(1.0))


def test_a_class_that_only_the_test_split_has_is_scored(case: Case) -> None:
    """It may cost much, but not everything: NLL, ECE and the uncertainties stay finite."""
    algorithm, task, data = case.algorithm, case.task, blobs(torch.tensor([0, 1] * 15), "two classes")
    upload, kept, _ = algorithm.client_update(
        task, case.message, algorithm.init_client(task, generator(0)), data, generator(0)
    )
    assert trees.fault(upload, case.message) is None
    test = blobs(torch.tensor([3] * 10), "an unknown class")
    probs = predict(algorithm, task, case.message, kept, data, test.x)
    check_probabilities(probs, 10)
    assert all(map(math.isfinite, scores(reduce(probs, test.y), seed=0).values()))


def test_predictions_of_one_example_do_not_depend_on_the_others(case: Case) -> None:
    algorithm, task, personal, x = case.algorithm, case.task, case.personal, case.x
    together = algorithm.predict(task, personal, x, generator(0, "predict"))
    alone = algorithm.predict(task, personal, x[3:4], generator(0, "predict"))
    torch.testing.assert_close(alone, together[:, 3:4])


def test_the_aggregate_depends_on_every_upload(case: Case) -> None:
    algorithm, task, server = case.algorithm, case.task, case.run.server
    everything = algorithm.server_aggregate(task, server, case.updates, generator(0))
    for i in range(3):
        without = algorithm.server_aggregate(task, server, case.updates[:i] + case.updates[i + 1 :], generator(0))
        nothing_sent = not trees.leaves(case.updates[i].upload)
        assert trees.equal(without, everything) == nothing_sent


def test_the_label_prior_moves_predictions_to_the_clients_classes(case: Case) -> None:
    """Mass on the classes that a client has never seen, at the start of a run."""
    algorithm, data = case.algorithm, blobs(torch.tensor([0, 1] * 20), "two classes")
    x = blobs(torch.arange(80) % CLASSES, "all classes").x

    def missing(label_prior: float) -> float:
        task = case.task._replace(label_prior=label_prior)
        server = algorithm.init_server(task, generator(0))
        message = algorithm.broadcast(task, server, 0)
        probs = predict(algorithm, task, message, algorithm.init_client(task, generator(0)), data, x)
        check_probabilities(probs, len(x))
        return probs[..., 2:].sum(-1).mean().item()

    assert missing(1.0) < 0.75 * missing(0.0) or missing(0.0) < 1e-3
    assert missing(1.0) < missing(50.0) or missing(0.0) < 1e-3


def test_the_label_prior_takes_part_in_training(case: Case) -> None:
    task = case.task._replace(label_prior=1.0)
    data = blobs(torch.tensor([1, 1, 1, 2] * 10), "unequal classes")
    args = (case.message, case.algorithm.init_client(task, generator(0)), data)
    without, kept_without, _ = case.algorithm.client_update(case.task, *args, generator(0))
    upload, kept, _ = case.algorithm.client_update(task, *args, generator(0))
    assert trees.fault(upload, case.message) is None
    assert not trees.equal((upload, kept), (without, kept_without))


def test_the_toy_is_learned(case: Case, toy: Toy) -> None:
    """Better than a client could do without looking at x; and by its rounds, unless personalising alone learns it."""
    blind = [(toy.test[k].y == data.y.mode().values).float().mean().item() for k, data in toy.train.items()]
    bar = sum(blind) / len(blind) + 0.15
    first = start(case.algorithm, toy)
    begin, end = (accuracy(case.algorithm, toy, run) for run in (first, play(case.algorithm, toy, first, range(8))))
    assert end > bar
    assert begin > bar or end > begin + 0.15


def test_uint8_images_and_deeper_models_work(case: Case) -> None:
    """Convolutions, normalisation and raw bytes, from the update to the prediction."""
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, CLASSES))
    rng = generator(0, "images")
    images = torch.randint(0, 256, (20, 1, 6, 6), generator=rng, dtype=torch.uint8)
    data = Data(x=images, y=torch.arange(20) % CLASSES)
    algorithm, task = case.algorithm, Task(model=model, num_classes=CLASSES, public=images, num_clients=1)
    message = algorithm.broadcast(task, algorithm.init_server(task, rng), 0)
    upload, kept, _ = algorithm.client_update(task, message, algorithm.init_client(task, rng), data, rng)
    assert trees.fault(upload, message) is None
    check_probabilities(predict(algorithm, task, message, kept, data, images), 20)


def test_a_pretrained_template_is_where_training_starts(case: Case) -> None:
    """Most of its numbers are in the first message, or in a client's first state (a personal head may be left out)."""
    parameters = list(case.task.model.parameters())

    def found(pretrained: bool) -> int:
        task = case.task._replace(pretrained=pretrained)
        message = case.algorithm.broadcast(task, case.algorithm.init_server(task, generator(0)), 0)
        first = trees.leaves((message, case.algorithm.init_client(task, generator(0))))
        return sum(p.numel() for p in parameters if any(torch.equal(p, leaf) for leaf in first))

    assert found(True) > 0.5 * sum(p.numel() for p in parameters) > found(False)
