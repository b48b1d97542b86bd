"""Calibrated, personalised federated learning: one shared network, a private low-rank Bayesian mask at every client."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrbpfl.algorithms.fedavg import FedAvg as FedAvg
    from lrbpfl.algorithms.fedavg_ft import FedAvgFT as FedAvgFT
    from lrbpfl.algorithms.fedbe import FedBE as FedBE
    from lrbpfl.algorithms.local import Local as Local
    from lrbpfl.algorithms.lr_bpfl import LRBPFL as LRBPFL
    from lrbpfl.algorithms.metavd import MetaVD as MetaVD
    from lrbpfl.algorithms.per_fedavg import PerFedAvg as PerFedAvg
    from lrbpfl.algorithms.pfedbayes import PFedBayes as PFedBayes
    from lrbpfl.algorithms.pfedgp import PFedGP as PFedGP
    from lrbpfl.algorithms.pfedme import PFedMe as PFedMe
    from lrbpfl.algorithms.protocol import Task as Task
    from lrbpfl.core.descent import Data as Data
    from lrbpfl.core.norms import without_batchnorm as without_batchnorm
    from lrbpfl.data.lazy import LazyClients as LazyClients
    from lrbpfl.data.sources import read_clients as read_clients
    from lrbpfl.engines.loop import federate as federate
    from lrbpfl.engines.processes import Processes as Processes
    from lrbpfl.engines.serial import Serial as Serial
    from lrbpfl.engines.work import ClientData as ClientData
    from lrbpfl.engines.work import Setup as Setup
    from lrbpfl.errors import BadInput as BadInput
    from lrbpfl.federation import Federation as Federation
    from lrbpfl.metrics import Predictions as Predictions
    from lrbpfl.metrics import debiased as debiased
    from lrbpfl.metrics import ece as ece
    from lrbpfl.metrics import floor as floor
    from lrbpfl.metrics import interval as interval
    from lrbpfl.metrics import mce as mce
    from lrbpfl.metrics import reduce as reduce
    from lrbpfl.metrics import reliability as reliability
    from lrbpfl.metrics import scores as scores
    from lrbpfl.metrics import summarise as summarise
    from lrbpfl.personal.model import PersonalModel as PersonalModel
    from lrbpfl.personal.model import Prediction as Prediction
    from lrbpfl.personal.model import load as load
    from lrbpfl.personal.onboarding import onboard as onboard

# The public names by where they live; imported when first used, so that `lrbpfl --help` need not wait for torch.
_NAMES = {
    "lrbpfl.federation": ("Federation",),
    "lrbpfl.personal.model": ("PersonalModel", "Prediction", "load"),
    "lrbpfl.personal.onboarding": ("onboard",),
    "lrbpfl.data.sources": ("read_clients",),
    "lrbpfl.data.lazy": ("LazyClients",),
    "lrbpfl.core.norms": ("without_batchnorm",),
    "lrbpfl.errors": ("BadInput",),
    "lrbpfl.algorithms.lr_bpfl": ("LRBPFL",),
    "lrbpfl.algorithms.fedavg": ("FedAvg",),
    "lrbpfl.algorithms.fedbe": ("FedBE",),
    "lrbpfl.algorithms.per_fedavg": ("PerFedAvg",),
    "lrbpfl.algorithms.pfedme": ("PFedMe",),
    "lrbpfl.algorithms.pfedgp": ("PFedGP",),
    "lrbpfl.algorithms.metavd": ("MetaVD",),
    "lrbpfl.algorithms.pfedbayes": ("PFedBayes",),
    "lrbpfl.algorithms.fedavg_ft": ("FedAvgFT",),
    "lrbpfl.algorithms.local": ("Local",),
    "lrbpfl.metrics": (
        "Predictions",
        "debiased",
        "ece",
        "floor",
        "interval",
        "mce",
        "reduce",
        "reliability",
        "scores",
        "summarise",
    ),
    "lrbpfl.algorithms.protocol": ("Task",),
    "lrbpfl.core.descent": ("Data",),
    "lrbpfl.engines.work": ("ClientData", "Setup"),
    "lrbpfl.engines.loop": ("federate",),
    "lrbpfl.engines.serial": ("Serial",),
    "lrbpfl.engines.processes": ("Processes",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lrbpfl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
