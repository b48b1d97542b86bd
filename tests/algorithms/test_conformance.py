"""Every entry of the registry keeps every promise of the protocol."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import Message
from lrbpfl.algorithms.protocol import Algorithm, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.metrics import scores
from lrbpfl.metrics.predictions import reduce
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.algorithms.hand import Run, accuracy, play, predict, start
from tests.conftest import CLASSES, Toy, blobs

METHODS = ("init_server", "init_client", "broadcast", "client_update", "server_aggregate", "personalise", "predict")
NEW = 1_000_000  # the id of a client that never trained
every_method = pytest.mark.parametrize("method", METHODS)


class Case(NamedTuple):
    """An algorithm after one round, with an argument for each of its functions."""

    algorithm: Algorithm
    task: Task
    run: Run
    message: Tree
    client: Tree
    data: Data
    updates: list[Update]
    personal: Tree
    x: Tensor


@pytest.fixture(scope="session", params=list(ALGORITHMS))
def case(request: pytest.FixtureRequest, toy: Toy) -> Case:
    """Tests that take a case run once for every algorithm, with its default fields."""
    algorithm, k = ALGORITHMS[request.param](), 1
    run = play(algorithm, toy, start(algorithm, toy), range(1))
    message, client, data = algorithm.broadcast(toy.task, run.server, k), run.clients[k], toy.train[k]
    updates = []
    for i in range(3):
        upload, _, _ = algorithm.client_update(toy.task, message, client, data, generator(0, "case", i))
        updates.append(Update(client_id=k, num_examples=10 + i, upload=upload))
    personal = algorithm.personalise(toy.task, message, client, data, generator(0, "personal"))
    return Case(algorithm, toy.task, run, message, client, data, updates, personal, x=toy.test[k].x)


def call(method: str, case: Case, seed: int = 0) -> Tree:
    """What one function of the algorithm returns."""
    algorithm, task, run, message, client, data, updates, personal, x = case
    rng = generator(seed, method)
    if method == "init_server":
        return algorithm.init_server(task, rng)
    if method == "init_client":
        return algorithm.init_client(task, rng)
    if method == "broadcast":
        return algorithm.broadcast(task, run.server, 1)
    if method == "client_update":
        upload, client, info = algorithm.client_update(task, message, client, data, rng)
        return upload, client, {key: torch.tensor(value) for key, value in info.items()}
    if method == "server_aggregate":
        return algorithm.server_aggregate(task, run.server, iter(updates), rng)
    if method == "personalise":
        return algorithm.personalise(task, message, client, data, rng)
    return algorithm.predict(task, personal, x, rng)


def arguments(case: Case) -> dict[str, Any]:
    """Every tensor that a function could write to."""
    return {
        "run": case.run,
        "message": case.message,
        "client": case.client,
        "data": case.data,
        "uploads": tuple(update.upload for update in case.updates),
        "personal": case.personal,
        "x": case.x,
        "public": case.task.public,
        "module": dict(case.task.model.state_dict()),
    }


def structure(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in trees.named_leaves(tree)}


def check_probabilities(probs: Tensor, n: int) -> None:
    samples = len(probs)
    assert probs.shape == (samples, n, CLASSES) and samples >= 1
    assert bool((probs >= 0).all())
    torch.testing.assert_close(probs.sum(-1), torch.ones(samples, n))


@every_method
def test_pure(case: Case, method: str) -> None:
    before = trees.tree_map(torch.clone, arguments(case))
    parameters = dict(case.task.model.named_parameters())
    training = [module.training for module in case.task.model.modules()]
    call(method, case)
    assert trees.equal(arguments(case), before)
    assert all(p is parameters[name] and p.grad is None for name, p in case.task.model.named_parameters())
    assert [module.training for module in case.task.model.modules()] == training
    assert all(not leaf.requires_grad for leaf in trees.leaves(arguments(case) | {"module": None}))


@every_method
def test_decided_by_the_seed_and_nothing_else(case: Case, method: str) -> None:
    torch.manual_seed(1)
    one = call(method, case)
    torch.manual_seed(2)
    assert trees.equal(call(method, case), one)


def test_another_seed_gives_another_result(case: Case, toy: Toy) -> None:
    assert not trees.equal(start(case.algorithm, toy, seed=1), start(case.algorithm, toy, seed=0))
    assert not trees.equal(call("client_update", case, seed=1), call("client_update", case, seed=0))


@every_method
def test_global_random_states_are_left_alone(case: Case, method: str) -> None:
    before, numpy_before = torch.get_rng_state(), str(np.random.get_state(legacy=False))
    call(method, case)
    assert torch.equal(torch.get_rng_state(), before)
    assert str(np.random.get_state(legacy=False)) == numpy_before


@every_method
def test_results_carry_no_graph(case: Case, method: str) -> None:
    assert all(not leaf.requires_grad for leaf in trees.leaves(call(method, case)))


def through_bytes(tree: Tree, template: Tree) -> Tree:
    """Written to a file's bytes and read again, with nothing but the template to say what is where."""
    named = {name: leaf.contiguous() for name, leaf in trees.named_leaves(tree)}
    return trees.rebuild(template, load(save(named)))


def test_a_run_goes_on_from_disk_as_if_nothing_had_happened(case: Case, toy: Toy) -> None:
    algorithm = case.algorithm
    three = toy._replace(train={k: toy.train[k] for k in (0, 1, 2)})
    begin = start(algorithm, three)
    straight = play(algorithm, three, begin, range(3))
    half = play(algorithm, three, begin, range(2))
    template = start(algorithm, three, seed=99)
    restored = play(algorithm, three, through_bytes(half, template), range(2, 3))
    assert trees.equal(restored, straight)
    assert not trees.equal(straight, half)


def test_states_keep_their_structure(case: Case) -> None:
    """What was kept can always be read back with a fresh state as the template."""
    _, client, _ = call("client_update", case)
    assert structure(client) == structure(call("init_client", case))
    assert structure(call("server_aggregate", case)) == structure(call("init_server", case))


def test_the_upload_has_the_structure_of_the_message(case: Case) -> None:
    for update in case.updates:
        assert trees.fault(update.upload, case.message) is None
        assert structure(update.upload) == structure(case.message)
        assert trees.nbytes(update.upload) == trees.nbytes(case.message)
    assert bool(trees.leaves(case.message)) == bool(trees.leaves(case.run.server)), "a server is there to send"


def network(message: Tree) -> Tree:
    """A message without what clients say about other things than the network."""
    return message._replace(ballot=None) if isinstance(message, Message) else message


def test_the_pace_of_a_round_scales_what_is_sent(case: Case) -> None:
    """At pace 0 the network comes back as it was sent, at half the pace neither so nor as at the whole one."""
    algorithm, task, _, message, client, data, *_ = case

    def trained(pace: float) -> Tree:
        upload, kept, _ = algorithm.client_update(task._replace(pace=pace), message, client, data, generator(0))
        return network(upload) if trees.leaves(message) else kept.W  # a site alone sends nothing

    sent = network(message) if trees.leaves(message) else client.W
    assert trees.equal(trained(0.0), sent)
    assert not trees.equal(trained(0.5), sent) and not trees.equal(trained(0.5), trained(1.0))


def test_an_unseen_client_is_served(case: Case) -> None:
    algorithm, task = case.algorithm, case.task
    message = algorithm.broadcast(task, case.run.server, NEW)
    client = algorithm.init_client(task, generator(0, "client", NEW))
    assert structure(message) == structure(case.message)
    check_probabilities(predict(algorithm, task, message, client, case.data, case.x), len(case.x))


def test_a_client_that_was_never_drawn_is_served(case: Case, toy: Toy) -> None:
    """Client 3 belongs to the federation, and three rounds went by without it."""
    algorithm, task = case.algorithm, case.task
    others = toy._replace(train={k: toy.train[k] for k in (0, 1, 2)})
    run = play(algorithm, others, start(algorithm, others), range(3))
    message = algorithm.broadcast(task, run.server, 3)
    client = algorithm.init_client(task, generator(0, "client", 3))
    check_probabilities(predict(algorithm, task, message, client, toy.train[3], toy.test[3].x), len(toy.test[3].y))


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


def test_probabilities_are_probabilities(case: Case) -> None:
    check_probabilities(call("predict", case), len(case.x))


def test_predictions_of_one_example_do_not_depend_on_the_others(case: Case) -> None:
    algorithm, task, personal, x = case.algorithm, case.task, case.personal, case.x
    together = algorithm.predict(task, personal, x, generator(0, "predict"))
    alone = algorithm.predict(task, personal, x[3:4], generator(0, "predict"))
    torch.testing.assert_close(alone, together[:, 3:4])


def test_the_aggregate_consumes_every_update_once(case: Case) -> None:
    seen = []

    def updates() -> Iterator[Update]:
        for i, update in enumerate(case.updates):
            yield update
            seen.append(i)

    case.algorithm.server_aggregate(case.task, case.run.server, updates(), generator(0))
    assert seen == [0, 1, 2]


def test_the_aggregate_depends_on_every_upload(case: Case) -> None:
    algorithm, task, server = case.algorithm, case.task, case.run.server
    everything = algorithm.server_aggregate(task, server, case.updates, generator(0))
    for i in range(3):
        without = algorithm.server_aggregate(task, server, case.updates[:i] + case.updates[i + 1 :], generator(0))
        nothing_sent = not trees.leaves(case.updates[i].upload)
        assert trees.equal(without, everything) == nothing_sent


CLIENTS = {
    "one example": torch.tensor([2]),
    "two examples": torch.tensor([2, 0]),
    "one class": torch.full((40,), 1),
    "fewer than a batch": torch.tensor([0, 1, 1, 3, 0]),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_small_and_one_sided_clients_take_part(case: Case, kind: str) -> None:
    algorithm, task, message = case.algorithm, case.task, case.message
    data, client = blobs(CLIENTS[kind], kind), algorithm.init_client(task, generator(0))
    upload, kept, info = algorithm.client_update(task, message, client, data, generator(0))
    assert trees.fault(upload, message) is None
    assert not any(bool(leaf.isnan().any()) for leaf in trees.leaves(kept))
    assert all(type(value) is float and math.isfinite(value) for value in info.values())
    check_probabilities(predict(algorithm, task, message, kept, data, case.x), len(case.x))


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
