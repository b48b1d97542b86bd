"""Fine-tuned FedAvg against FedAvg, torch's own SGD and a step by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedavg_ft import FedAvgFT
from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data, batches
from lrbpfl.core.network import Params
from lrbpfl.rng import generator
from tests.algorithms.hand import play, predict, start
from tests.conftest import Toy, blobs


@pytest.fixture(scope="module")
def server(toy: Toy) -> Params:
    W: Params = play(FedAvg(), toy, start(FedAvg(), toy), range(3)).server
    return W


def test_training_is_fedavgs_bit_for_bit(toy: Toy, server: Params) -> None:
    """Fine-tuning never enters what is shared."""
    for algorithm in (FedAvgFT(), FedAvgFT(ft_steps=0), FedAvgFT(ft_lr=0.5)):
        assert trees.equal(play(algorithm, toy, start(algorithm, toy), range(3)).server, server)
    fields: dict[str, Any] = {"local_steps": 3, "lr": 0.03, "batch_size": 5, "weights": "kaiming"}
    one, two = (play(a, toy, start(a, toy), range(2)).server for a in (FedAvgFT(**fields), FedAvg(**fields)))
    assert trees.equal(one, two) and not trees.equal(one, server)


@pytest.mark.parametrize("label_prior", [0.0, 0.5])
@pytest.mark.parametrize("nothing", [{"ft_steps": 0}, {"ft_lr": 0.0}])
def test_without_fine_tuning_it_predicts_as_fedavg_bit_for_bit(
    toy: Toy, server: Params, nothing: dict[str, Any], label_prior: float
) -> None:
    task = toy.task._replace(label_prior=label_prior)
    for k, data in toy.train.items():
        expected = predict(FedAvg(), task, server, None, data, toy.test[k].x)
        assert torch.equal(predict(FedAvgFT(**nothing), task, server, None, data, toy.test[k].x), expected)
        assert not torch.equal(predict(FedAvgFT(), task, server, None, data, toy.test[k].x), expected)


def test_fine_tuning_is_plain_sgd_from_the_global_network_bit_for_bit(toy: Toy, server: Params) -> None:
    algorithm = FedAvgFT(ft_steps=5, ft_lr=0.03, batch_size=16)
    model = copy.deepcopy(toy.task.model)
    model.load_state_dict(server)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.03, fused=True)
    for batch in batches(toy.train[1], 16, 5, generator(0, "tune")):
        optimiser.zero_grad()
        nnf.cross_entropy(model(batch.x), batch.y).backward()
        optimiser.step()
    personal = algorithm.personalise(toy.task, server, None, toy.train[1], generator(0, "tune"))
    assert trees.equal(personal.W, {name: p.detach() for name, p in model.named_parameters()})


def test_one_step_of_fine_tuning_by_hand() -> None:
    """One example (x, y) at w = 0 of a linear network, whose label prior makes p = (2/3, 1/3) or, without, (1/2, 1/2).

    The step is -ft_lr (p - onehot(y)) x, and the prediction adds the log prior again.
    """
    zero, x = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}, torch.tensor([[3.0]])
    data, algorithm = Data(x=x, y=torch.tensor([0])), FedAvgFT(ft_steps=1, ft_lr=0.1)
    for label_prior, frequencies in ((0.0, [0.5, 0.5]), (2.0, [2 / 3, 1 / 3])):
        task = Task(model=nn.Linear(1, 2), num_classes=2, label_prior=label_prior)
        p = torch.tensor(frequencies)
        step = -0.1 * (p - torch.tensor([1.0, 0.0]))
        personal = algorithm.personalise(task, zero, None, data, generator(0))
        torch.testing.assert_close(personal.W, {"weight": 3 * step[:, None], "bias": step})
        expected = torch.softmax(3 * 3 * step + step + p.log(), dim=0)
        torch.testing.assert_close(algorithm.predict(task, personal, x, generator(0)), expected[None, None])


def test_fine_tuning_fits_the_clients_own_data(toy: Toy, server: Params) -> None:
    for data in toy.train.values():
        before, after = (
            nnf.nll_loss(predict(algorithm, toy.task, server, None, data, data.x)[0].log(), data.y).item()
            for algorithm in (FedAvg(), FedAvgFT())
        )
        assert after < before


def test_a_new_client_is_tuned_as_one_of_the_old(toy: Toy, server: Params) -> None:
    """Clients keep nothing: who took part and who did not is the same, given the same data."""
    assert all(state is None for state in play(FedAvgFT(), toy, start(FedAvgFT(), toy), range(1)).clients.values())
    for labels in (torch.tensor([1]), torch.full((40,), 1), torch.tensor([0, 1, 1, 3, 0])):
        data, x = blobs(labels, "new"), toy.test[0].x
        tuned = predict(FedAvgFT(), toy.task, server, None, data, x)
        assert not torch.equal(tuned, predict(FedAvg(), toy.task, server, None, data, x))
        torch.testing.assert_close(tuned.sum(-1), torch.ones(1, len(x)))
