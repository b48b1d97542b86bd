"""The algorithms, one file each; our registry is this literal, and installed packages may add to it by entry points."""

import dataclasses
import inspect
import warnings

from lrbpfl import plugins
from lrbpfl.algorithms.fedavg import FedAvg
from lrbpfl.algorithms.fedavg_ft import FedAvgFT
from lrbpfl.algorithms.fedbe import FedBE
from lrbpfl.algorithms.local import Local
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.metavd import MetaVD
from lrbpfl.algorithms.per_fedavg import PerFedAvg
from lrbpfl.algorithms.pfedbayes import PFedBayes
from lrbpfl.algorithms.pfedgp import PFedGP
from lrbpfl.algorithms.pfedme import PFedMe
from lrbpfl.algorithms.protocol import Algorithm
from lrbpfl.errors import BadInput

GROUP = "lrbpfl.algorithms"  # the entry point group: a name, and the class it stands for
METHODS = [name for name, value in vars(Algorithm).items() if inspect.isfunction(value) and not name.startswith("_")]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "lr-bpfl": LRBPFL,
    "fedavg": FedAvg,
    "fedbe": FedBE,
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "pfedgp": PFedGP,
    "metavd": MetaVD,
    "pfedbayes": PFedBayes,
    "fedavg-ft": FedAvgFT,
    "local": Local,
}


def names() -> list[str]:
    """The names of all algorithms, ours first; packages are not loaded for it."""
    return plugins.names(GROUP, ALGORITHMS)


def find(name: str) -> type[Algorithm]:
    """The algorithm of this name, ours or an installed package's; only that package is loaded."""
    found: type[Algorithm] = plugins.find("algorithm", GROUP, name, ALGORITHMS)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise BadInput(f"{plugins.who('algorithm', GROUP, name)} is {found!r}, not a dataclass of hyper-parameters")
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise BadInput(f"{plugins.who('algorithm', GROUP, name)} lacks {', '.join(missing)}")
    return found


def known() -> dict[str, type[Algorithm]]:
    """All algorithms by name, ours first; a package's that cannot be had is left out with a warning that says why."""
    found = dict(ALGORITHMS)
    for name in plugins.offered(GROUP):
        try:
            found[name] = find(name)
        except BadInput as error:
            warnings.warn(str(error), stacklevel=2)
    return found
