"""Steps shared by the algorithms whose clients predict with one deterministic network."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lrbpfl.algorithms.protocol import Ensemble, Task, log_label_prior
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import Params, caller
from lrbpfl.core.objective import nll, plain_logits, probabilities

Objective = Callable[[Params, Data], Tensor]  # f_k(w; batch)


class PersonalNetwork(NamedTuple):
    """A client's predictor: a network and the client's label prior."""

    W: Params
    log_prior: Tensor  # (classes,)


def objective(task: Task, data: Data) -> Objective:
    """f_k: the mean cross-entropy on a batch of the client's data, with its label prior in the likelihood."""
    log_prior, logits = log_label_prior(task, data.y), caller(task.model)
    return lambda w, batch: nll((logits(w, batch.x) + log_prior)[None], batch.y)


def personal_model(task: Task, W: Params, data: Data) -> PersonalNetwork:
    """The network as the client's own predictor."""
    return PersonalNetwork(W=W, log_prior=log_label_prior(task, data.y))


def softmax(task: Task, personal: PersonalNetwork, x: Inputs) -> Tensor:
    """One sample: the softmax of the network, (1, n, classes)."""
    return probabilities(lambda x: plain_logits(task.model, personal.W, x) + personal.log_prior, x)


def ensemble(task: Task, personal: PersonalNetwork) -> Ensemble:
    """The network as an ensemble of one."""
    return Ensemble(personal, lambda own, x: plain_logits(task.model, own.W, x) + own.log_prior)
