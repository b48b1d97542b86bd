"""How good predictions are, and how far their confidence can be believed."""

from lrbpfl.metrics.calibration import Bins, debiased, ece, floor, interval, mce, null_gaps, reliability
from lrbpfl.metrics.predictions import Predictions, pool, reduce
from lrbpfl.metrics.scores import Summary, scores, summarise

__all__ = [
    "Bins",
    "Predictions",
    "Summary",
    "debiased",
    "ece",
    "floor",
    "interval",
    "mce",
    "null_gaps",
    "pool",
    "reduce",
    "reliability",
    "scores",
    "summarise",
]
