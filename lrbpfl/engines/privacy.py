"""What a run with noise tells about a client at most: (epsilon, delta), by the library dp-accounting."""

import math
from types import ModuleType

import numpy as np

from lrbpfl.engines.intake import Intake
from lrbpfl.errors import BadInput


def epsilon(intake: Intake, clients: int, cohort: int, rounds: int) -> float:
    """Epsilon after so many rounds, each with a cohort of this size drawn from the clients without replacement.

    It is about exchanging everything that one client holds for anything else, by which a sum of clipped moves can
    change by twice the clip: in the accountant's terms the noise multiplier is half of ours. Renyi differential privacy
    of sampling without replacement: Wang, Balle and Kasiviswanathan (AISTATS 2019, arXiv:1808.00087).
    """
    dp = library()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(intake.noise / 2))
    try:
        with np.errstate(all="ignore"):
            spent = float(accountant.compose(event, rounds).get_epsilon(intake.delta))
    except ArithmeticError:
        spent = math.inf
    if not math.isfinite(spent):
        raise BadInput(f"noise = {intake.noise!r} is too little for {rounds} rounds: no epsilon can be told")
    return spent


def library() -> ModuleType:
    """The library dp-accounting, an extra."""
    try:
        import dp_accounting
        import dp_accounting.rdp  # releases before it had an accountant for this are no use
    except ImportError:
        raise BadInput("noise needs the library that counts privacy: pip install lrbpfl[dp]") from None
    found: ModuleType = dp_accounting
    return found
