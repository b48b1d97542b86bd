"""An algorithm that breaks a promise is told which one."""

import dataclasses
import multiprocessing
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.plain import PersonalNetwork
from lrbpfl.algorithms.protocol import Info, Task, Update
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params
from lrbpfl.testing import check_algorithm
from lrbpfl.testing.form import nameable
from lrbpfl.trees import Tree

Trained = tuple[Params, None, Info]


class MutatesMessage(FedAvg):
    def client_update(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Trained:
        message["fc1.bias"].mul_(0.9)
        return super().client_update(task, message, client, data, rng)


class TrainsTemplate(FedAvg):
    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        task.model.train(not task.model.training)
        return super().predict(task, personal, x, rng)


class DrawsGlobally(FedAvg):
    def init_server(self, task: Task, rng: Generator) -> Params:
        return {name: torch.randn(w.shape) for name, w in super().init_server(task, rng).items()}


class Peeks(FedAvg):
    """Draws a global number, but does nothing with it."""

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        torch.rand(1)
        return server


class KeepsGraph(FedAvg):
    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> PersonalNetwork:
        own = super().personalise(task, message, client, data, rng)
        return own._replace(W={name: w.clone().requires_grad_() for name, w in own.W.items()})


class SendsList(FedAvg):
    def init_client(self, task: Task, rng: Generator) -> Any:
        return {"history": [0.0]}


class Half(FedAvg):
    def client_update(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Trained:
        upload, kept, info = super().client_update(task, message, client, data, rng)
        return {name: w.half() for name, w in upload.items()}, kept, info

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        return trees.mean((trees.tree_map(Tensor.float, u.upload), u.num_examples) for u in updates)  # type: ignore[no-any-return]


class Grows(FedAvg):
    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        return {**super().server_aggregate(task, server, updates, rng), "extra": torch.zeros(1)}

    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        return {name: w for name, w in server.items() if name != "extra"}


class Forgets(FedAvg):
    """Reads what a run remembers, but no file: whether a state is the very object that it made."""

    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        w = super().server_aggregate(task, server, updates, rng)
        made = isinstance(server, Made)
        return Made({name: p + 1.0 * made for name, p in w.items()})


class Made(dict[str, Tensor]):
    pass


class TakesTwo(FedAvg):
    def server_aggregate(self, task: Task, server: Params, updates: Iterable[Update], rng: Generator) -> Params:
        return super().server_aggregate(task, server, [u for u, _ in zip(updates, range(2), strict=False)], rng)


class Logits(FedAvg):
    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        return super().predict(task, personal, x, rng).log().exp() * 1.01


class OneSample(FedAvg):
    def predict(self, task: Task, personal: PersonalNetwork, x: Inputs, rng: Generator) -> Tensor:
        return super().predict(task, personal, x, rng)[0]


class NeedsTwo(FedAvg):
    def client_update(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Trained:
        if len(data.y) < 2:
            raise ValueError("too few examples")
        return super().client_update(task, message, client, data, rng)


class KnowsItsIds(FedAvg):
    def broadcast(self, task: Task, server: Params, client_id: int) -> Params:
        return [server][client_id // task.num_clients]


class AsksWhere(FedAvg):
    def client_update(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Trained:
        upload, kept, info = super().client_update(task, message, client, data, rng)
        in_worker = multiprocessing.parent_process() is not None  # however it was started
        return trees.tree_map(lambda w: w + float(in_worker), upload), kept, info


class Unnamed(FedAvg):
    def personalise(self, task: Task, message: Params, client: None, data: Data, rng: Generator) -> Tree:
        return super().personalise(task, message, client, data, rng)


class Renamed(FedAvg):
    def broadcast(self, task: Task, state: Params, client_id: int) -> Params:
        return state


@dataclasses.dataclass(frozen=True)
class ListOfRates(FedAvg):
    rates: tuple[float, ...] = (0.1, 0.2)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (MutatesMessage, "client_update changes what it is given: message, "),
        (TrainsTemplate, "predict changes what it is given: the model's training mode"),
        (DrawsGlobally, "init_server returns something else when called again"),
        (Peeks, "broadcast draws from torch's global random numbers"),
        (KeepsGraph, "personalise returns tensors that still require gradients: W/fc1.weight"),
        (SendsList, "init_client returns leaves that are no tensors: history"),
        (Half, "client_update returns an upload unlike its message: fc1.weight has dtype torch.float16"),
        (Grows, "server_aggregate returns a state whose tensors are not those of init_server"),
        (Forgets, "goes on differently when server and clients are read back"),
        (TakesTwo, "server_aggregate leaves updates behind"),
        (Logits, "predict returns probabilities that do not sum to 1"),
        (OneSample, r"predict returns shape \(100, 4\), not \(samples, 100, 4\)"),
        (NeedsTwo, "fails where this is checked: Clients with one example.*too few examples"),
        (KnowsItsIds, "fails where this is checked: A client that was never seen is served"),
        (AsksWhere, "gives other bits in worker processes"),
        (Unnamed, "personalise is annotated to return Any"),
        (Renamed, r"broadcast takes \['self', 'task', 'state', 'client_id'\]"),
        (ListOfRates, r"ListOfRates.rates is \(0.1, 0.2\)"),
    ],
)
def test_a_broken_promise_is_told(broken: type[FedAvg], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence) as caught:
        check_algorithm(broken(local_steps=2))
    assert str(caught.value).startswith(broken.__name__)


def test_an_algorithm_that_could_keep_something_is_told() -> None:
    @dataclasses.dataclass
    class Loose:
        lr: float = 0.1

    with pytest.raises(AssertionError, match="Loose is not frozen"):
        check_algorithm(Loose())  # type: ignore[arg-type]


def test_a_good_algorithm_passes_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    check_algorithm(FedAvg(local_steps=2), label_prior=1.0)
    assert torch.equal(torch.get_rng_state(), before)


class Nested(NamedTuple):
    many: dict[str, PersonalNetwork]
    one: Tensor | None


class Opaque(NamedTuple):
    anything: Any


def test_types_of_personal_models() -> None:
    assert all(map(nameable, (Nested, Tensor, dict[str, Tensor], tuple[Tensor, Nested])))
    assert not any(map(nameable, (Opaque, Any, dict, dict[int, Tensor], list[Tensor], float, dict[str, Opaque])))
