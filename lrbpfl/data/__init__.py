"""Data: datasets by name, and who gets which example."""

from lrbpfl.data.datasets import DATASETS, Dataset, check, load
from lrbpfl.data.partition import PARTITIONS, Split, by_labels, by_size, dirichlet, natural, split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Dataset",
    "Split",
    "by_labels",
    "by_size",
    "check",
    "dirichlet",
    "load",
    "natural",
    "split",
]
