"""Whatever model people bring: it trains, it comes back as it was, and engines agree on it."""

from contextlib import closing

import pytest
import torch
from torch import nn

from lrbpfl import trees
from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedavg_ft import FedAvgFT
from lrbpfl.algorithms.fedbe import FedBE
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.pfedgp import PFedGP
from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.core.descent import Data
from lrbpfl.core.network import maskable, trainable
from lrbpfl.engines.loop import Round, federate
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Setup, granted
from lrbpfl.rng import generator
from tests.core.zoo import CLASSES, ZOO, made
from tests.engines.fakes import same_rounds

TINY: dict[str, Algorithm] = {
    "lr-bpfl": LRBPFL(mask_steps=2, model_steps=2, predict_samples=2, batch_size=4),
    "fedavg": FedAvg(local_steps=2, batch_size=4),
    "fedavg-ft": FedAvgFT(local_steps=2, ft_steps=2, batch_size=4),
    "pfedgp": PFedGP(local_steps=1, chains=2, predict_chains=2, sweeps=2),
}
NOISY = [name for name in ZOO if "dropout" in name]


def setup_of(name: str, algorithm: Algorithm, clients: int = 3) -> Setup:
    """Clients with a few examples of all classes."""

    def data(n: int, *path: str | int) -> Data:
        return Data(x=ZOO[name].inputs(n, generator(0, *path)), y=torch.arange(n) % CLASSES)

    parts = tuple(
        ClientData(f"c{k}", train=data(9 + k, "train", k), test=data(4, "test", k), calibration=data(2, "kept", k))
        for k in range(clients)
    )
    task = Task(model=made(name)[0], num_classes=CLASSES, public=data(8, "public").x)
    return Setup(algorithm, task, parts, seed=3)


def run(setup: Setup, workers: int = 0, rounds: int = 2) -> list[Round]:
    with closing(Processes(setup, workers) if workers else Serial(setup)) as engine:
        return list(federate(engine, rounds=rounds, cohort=2))


@pytest.mark.parametrize("algorithm", TINY)
@pytest.mark.parametrize("name", ZOO)
def test_it_trains_and_the_module_is_as_it_was(name: str, algorithm: str) -> None:
    setup = setup_of(name, TINY[algorithm])
    model = setup.task.model
    own, values = dict(model.named_parameters()), trees.tree_map(torch.clone, dict(model.state_dict()))
    for module in list(model.modules())[1::2]:
        module.training = False  # a mode that no call of train or eval would leave
    modes, torch_state = [module.training for module in model.modules()], torch.get_rng_state()
    rounds = run(setup)
    assert not any(ended.failures for ended in rounds)
    assert not trees.equal(rounds[-1].server, setup.algorithm.init_server(setup.task, generator(3, "server")))
    for evaluation in rounds[-1].evaluations.values():
        assert evaluation.result is not None and evaluation.failure is None
    assert trees.equal(dict(model.state_dict()), values) and [m.training for m in model.modules()] == modes
    assert all(p is own[n] and p.grad is None for n, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("name", [*NOISY, "dict", "frozen"])
@pytest.mark.parametrize("algorithm", ["lr-bpfl", "fedavg-ft", "pfedgp"])
def test_engines_agree_on_it(name: str, algorithm: str) -> None:
    setup = setup_of(name, TINY[algorithm])
    torch.manual_seed(1)
    expected = run(setup)
    torch.manual_seed(2)
    assert same_rounds(run(setup, workers=2), expected)
    if name in NOISY and algorithm != "pfedgp":
        other = run(setup._replace(seed=4), rounds=1)
        assert not trees.equal(other[0].server, expected[0].server)


def test_the_server_s_own_dropout_follows_the_seed_too() -> None:
    """FedBE trains at the server; with clients in this process and elsewhere."""
    setup = setup_of("dropout", FedBE(local_steps=2, batch_size=4, distil_epochs=2, members=1))
    torch.manual_seed(1)
    expected = run(setup)
    torch.manual_seed(2)
    assert same_rounds(run(setup, workers=2), expected)


def test_several_inputs_move_to_the_server_row_by_row() -> None:
    """Every row stays whole: a client's inputs are those it kept and those that the server got."""
    setup = setup_of("dict", FedBE(local_steps=1, distil_epochs=1, members=1))
    inputs, y = ZOO["dict"].inputs, torch.arange(26) % CLASSES
    many = tuple(c._replace(train=Data(inputs(26, generator(0, k)), y)) for k, c in enumerate(setup.clients))
    open_task = setup._replace(task=setup.task._replace(public=None), clients=many)
    ready = granted(open_task)
    kept, gone = [client.train.x for client in ready.clients], ready.task.public

    def rows(x: dict[str, torch.Tensor]) -> set[tuple[int, ...]]:
        return {tuple(row.tolist()) for row in torch.cat([x["ids"], x["picture"].flatten(1)], dim=1)}

    assert len(gone["ids"]) == 3 and rows(gone).isdisjoint(set().union(*map(rows, kept)))
    assert rows(gone) <= set().union(*(rows(client.train.x) for client in many))
    assert not run(open_task, rounds=1)[0].failures


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_frozen_parameters_neither_travel_nor_move(algorithm: str) -> None:
    """Under every algorithm, with a frozen layer in the middle and a frozen bias of the last."""
    setup = setup_of("mlp", ALGORITHMS[algorithm]())
    for name in ("fc2.weight", "fc2.bias", "fc3.bias"):
        setup.task.model.get_parameter(name).requires_grad_(False)
    rounds = run(setup, rounds=1)
    assert not rounds[0].failures and all(e.result for e in rounds[0].evaluations.values())
    message = setup.algorithm.broadcast(setup.task, rounds[0].server, 0)
    sent = {name for name, _ in trees.named_leaves(message)}
    frozen = ("fc2.weight", "fc2.bias", "fc3.bias")
    assert not [name for name in sent if any(f"/{part}/" in f"/{name}/" for part in frozen)]
    if algorithm == "fedavg":
        assert rounds[0].bytes_up == 2 * trees.nbytes(trainable(setup.task.model))


def test_masks_lie_on_frozen_weights_and_change_predictions() -> None:
    setup = setup_of("frozen", LRBPFL(mask_steps=3, model_steps=1, batch_size=4, predict_samples=2))
    model, method = setup.task.model, setup.algorithm
    assert "fc1.weight" in maskable(model, "auto") and "fc1.weight" not in trainable(model)
    server = method.init_server(setup.task, generator(0))
    assert set(server.W) == set(trainable(model))
    data, x = setup.clients[0].train, setup.clients[0].test.x
    message, client = method.broadcast(setup.task, server, 0), method.init_client(setup.task, generator(0, "client"))
    personal = method.personalise(setup.task, message, client, data, generator(0))
    before = method.predict(setup.task, personal, x, generator(1))
    with torch.no_grad():
        model.get_parameter("fc1.weight").mul_(2.0)  # the module's own value is the one in use
    after = method.predict(setup.task, personal, x, generator(1))
    assert not torch.allclose(before, after)


def test_pfedgp_on_a_frozen_body_sends_nothing_and_a_frozen_head_does_not_matter() -> None:
    setup = setup_of("mlp", TINY["pfedgp"])
    head = setup.task.model.get_submodule("fc3")
    setup.task.model.requires_grad_(False)
    head.requires_grad_(True)
    (only,) = run(setup, rounds=1)
    assert only.bytes_up == only.bytes_down == 0 and not only.failures
    assert all(evaluation.result for evaluation in only.evaluations.values())
    setup.task.model.requires_grad_(True)
    head.requires_grad_(False)
    (only,) = run(setup, rounds=1)
    assert not only.failures and only.bytes_up > 0


def test_dropout_is_on_where_clients_train() -> None:
    """The same run with a rate of zero goes another way; with the same W, predictions are alike."""
    noisy, still = (setup_of("early dropout", TINY["lr-bpfl"]) for _ in range(2))
    layer = still.task.model.get_submodule("1")
    assert isinstance(layer, nn.Dropout)
    layer.p = 0.0
    one, other = run(noisy, rounds=1), run(still, rounds=1)
    assert not trees.equal(one[0].server, other[0].server)
    method, message = noisy.algorithm, noisy.algorithm.broadcast(noisy.task, one[0].server, 0)
    client = method.init_client(noisy.task, generator(0, "client"))
    personal = method.personalise(noisy.task, message, client, noisy.clients[0].train, generator(0))
    x = noisy.clients[0].test.x
    twice = [method.predict(setup.task, personal, x, generator(1)) for setup in (noisy, still)]
    assert torch.equal(*twice)
