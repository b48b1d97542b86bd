"""Data: datasets by name, and who gets which example."""

from lrbpfl.data.corruptions import Corruption, check_images, corrupt, deal_corruptions
from lrbpfl.data.datasets import DATASETS, Dataset, check_dataset, load
from lrbpfl.data.lazy import LazyClients, lazy_folder
from lrbpfl.data.partition import PARTITIONS, by_labels, by_size, dirichlet, hold_out, natural
from lrbpfl.data.remarks import lazy_remarks, remarks
from lrbpfl.data.scaling import Scaling
from lrbpfl.data.shifts import check_inputs, permutations, shift_inputs, shift_labels
from lrbpfl.data.sources import read_clients
from lrbpfl.data.splits import Split, split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Corruption",
    "Dataset",
    "LazyClients",
    "Scaling",
    "Split",
    "by_labels",
    "by_size",
    "check_dataset",
    "check_images",
    "check_inputs",
    "corrupt",
    "deal_corruptions",
    "dirichlet",
    "hold_out",
    "lazy_folder",
    "lazy_remarks",
    "load",
    "natural",
    "permutations",
    "read_clients",
    "remarks",
    "shift_inputs",
    "shift_labels",
    "split",
]
