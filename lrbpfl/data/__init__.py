"""Data: datasets by name, and who gets which example."""

from lrbpfl.data.corruptions import Corruption, check_images, corrupt, deal_corruptions
from lrbpfl.data.datasets import DATASETS, Dataset, check, load
from lrbpfl.data.partition import PARTITIONS, Split, by_labels, by_size, dirichlet, hold_out, natural, split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Corruption",
    "Dataset",
    "Split",
    "by_labels",
    "by_size",
    "check",
    "check_images",
    "corrupt",
    "deal_corruptions",
    "dirichlet",
    "hold_out",
    "load",
    "natural",
    "split",
]
