"""Calibrated, personalised federated learning: one shared network, a private low-rank Bayesian mask at every client."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrbpfl.algorithms import ALGORITHMS as ALGORITHMS
    from lrbpfl.algorithms.fedavg import FedAvg as FedAvg
    from lrbpfl.algorithms.lr_bpfl import LRBPFL as LRBPFL
    from lrbpfl.algorithms.protocol import Task as Task
    from lrbpfl.core.descent import Data as Data
    from lrbpfl.core.norms import without_batchnorm as without_batchnorm
    from lrbpfl.engines.loop import federate as federate
    from lrbpfl.engines.processes import Processes as Processes
    from lrbpfl.engines.serial import Serial as Serial
    from lrbpfl.engines.work import ClientData as ClientData
    from lrbpfl.engines.work import Setup as Setup
    from lrbpfl.errors import BadInput as BadInput

# Where the public names live. They are imported when first used, so that `lrbpfl --help` need not wait for torch.
_HOMES = {
    "ALGORITHMS": "lrbpfl.algorithms",
    "FedAvg": "lrbpfl.algorithms.fedavg",
    "LRBPFL": "lrbpfl.algorithms.lr_bpfl",
    "Task": "lrbpfl.algorithms.protocol",
    "Data": "lrbpfl.core.descent",
    "without_batchnorm": "lrbpfl.core.norms",
    "federate": "lrbpfl.engines.loop",
    "Processes": "lrbpfl.engines.processes",
    "Serial": "lrbpfl.engines.serial",
    "ClientData": "lrbpfl.engines.work",
    "Setup": "lrbpfl.engines.work",
    "BadInput": "lrbpfl.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lrbpfl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
