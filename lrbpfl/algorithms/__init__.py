"""The algorithms, one file each; the registry is this literal."""

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
