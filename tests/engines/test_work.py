"""One client's work: what it reads, what it leaves behind."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Generator, Tensor, nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.protocol import Info, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.engines.work import evaluate_client, fresh_state, keep_memory, one_thread, update_client
from lrbpfl.metrics import reduce
from lrbpfl.rng import generator
from lrbpfl.trees import Tree
from tests.engines.fakes import Scripted, line, noise


@dataclass(frozen=True)
class Views:
    """A personal model made of a whole tensor of the message, parts of it, and something new."""

    def init_server(self, task: Task, rng: Generator) -> Tree:
        return {"w": torch.randn(4, 2, generator=rng), "none": torch.empty(0)}

    def init_client(self, task: Task, rng: Generator) -> Tree:
        return None

    def broadcast(self, task: Task, server: Tree, client_id: int) -> Tree:
        return server

    def client_update(
        self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator
    ) -> tuple[Tree, Tree, Info]:
        return message, client, {}

    def server_aggregate(self, task: Task, server: Tree, updates: Iterable[Update], rng: Generator) -> Tree:
        return trees.mean((u.upload, u.num_examples) for u in updates)

    def personalise(self, task: Task, message: Tree, client: Tree, data: Data, rng: Generator) -> Tree:
        w = message["w"]
        return {
            "whole": w,
            "head": w[:2],
            "flat": w.flatten(),
            "turned": w.T,
            "bits": w.view(torch.int32),
            "tail": w[2:],
            "none": torch.empty(0, 3),
            "new": w + 1,
        }

    def predict(self, task: Task, personal: Tree, x: Tensor, rng: Generator) -> Tensor:
        return torch.softmax(personal["whole"][0], dim=0).expand(1, len(x), 2)


@pytest.mark.parametrize("name", ["views", *ALGORITHMS])
def test_own_and_shared_tensors_make_up_the_personal_model(name: str) -> None:
    federation = line(Views()) if name == "views" else noise(ALGORITHMS[name](), nn.Linear(5, 3), (5,))
    algorithm, task, clients, seed, *_ = federation
    message = algorithm.broadcast(task, algorithm.init_server(task, generator(seed, "server")), 1)
    state = fresh_state(federation, 1)
    evaluated = evaluate_client(federation, message, state, 2, 1)
    personal = algorithm.personalise(task, message, state, clients[1].train, generator(seed, "personalise", 2, 1))
    sent = dict(trees.named_leaves(message))
    rebuilt = {**evaluated.personal, **{name: sent[there] for name, there in evaluated.shared.items()}}
    assert not evaluated.personal.keys() & evaluated.shared.keys()
    assert trees.equal(trees.rebuild(personal, rebuilt), personal)
    samples = algorithm.predict(task, personal, clients[1].test.x, generator(seed, "predict", 2, 1))
    assert (evaluated.predictions.probs == reduce(samples, clients[1].test.y).probs).all()


def test_only_whole_tensors_of_the_message_are_shared() -> None:
    federation = line(Views())
    message = federation.algorithm.init_server(federation.task, generator(0))
    evaluated = evaluate_client(federation, message, None, 0, 0)
    assert evaluated.shared == {"whole": "w"}


def test_a_personal_model_is_split_into_own_and_shared_names() -> None:
    federation = line(Scripted())
    state = fresh_state(federation, 0)
    evaluated = evaluate_client(federation, {"w": torch.ones(3)}, state, 0, 0)
    assert evaluated.shared == {"w": "w"}
    assert list(evaluated.personal) == ["seen"]
    assert trees.equal(evaluated.personal["seen"], state["seen"])


def test_an_update_is_drawn_from_the_address_of_round_and_client() -> None:
    federation = line(Scripted())
    message, state = {"w": torch.zeros(3)}, fresh_state(federation, 0)
    first, again = (update_client(federation, message, state, 1, 2).upload["w"] for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first, 2 + torch.randn(3, generator=generator(federation.seed, "update", 1, 2)))
    assert not torch.equal(first, update_client(federation, message, state, 2, 2).upload["w"])


def test_an_update_has_the_pace_of_its_round() -> None:
    federation = noise(ALGORITHMS["fedavg"](), nn.Linear(5, 3), (5,))._replace(paces=(1.0, 0.0))
    message = federation.algorithm.init_server(federation.task, generator(0))
    moved = [not trees.equal(update_client(federation, message, None, t, 0).upload, message) for t in range(3)]
    assert moved == [True, False, True], "past the last pace given, a whole one"


def test_a_client_trains_on_its_training_data_and_is_judged_on_its_test_data() -> None:
    federation = line(Scripted())
    assert update_client(federation, {"w": torch.zeros(3)}, fresh_state(federation, 3), 0, 3).info == {"k": 3.0}
    evaluated = evaluate_client(federation, {"w": torch.zeros(3)}, fresh_state(federation, 3), 0, 3)
    assert evaluated.predictions.y.tolist() == federation.clients[3].test.y.tolist()


def test_one_thread_gives_the_threads_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_memory_can_be_kept_again_and_again() -> None:
    keep_memory()
    keep_memory()
    assert torch.ones(2**20).sum() == 2**20
