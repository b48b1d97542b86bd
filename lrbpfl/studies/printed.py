"""What the LR-BPFL paper prints, in its units (accuracy in percent, errors as fractions), in the order of its columns.

The columns of the tables: CIFAR-10 2/10, CIFAR-10 5/10, CIFAR-100 5/100. New clients, noisy ones and bins are drawn,
not printed: their values are those of the authors' plotting scripts, in which errors stand in percent.
"""

CALIBRATION = {  # Table 2: (ECE, MCE); 10 % for training
    "fedavg": ((0.343, 0.495), (0.382, 0.517), (0.623, 0.745)),
    "fedbe": ((0.285, 0.464), (0.313, 0.471), (0.527, 0.657)),
    "per-fedavg": ((0.127, 0.222), (0.316, 0.438), (0.353, 0.491)),
    "pfedme": ((0.224, 0.318), (0.265, 0.445), (0.368, 0.536)),
    "metavd": ((0.215, 0.337), (0.231, 0.385), (0.343, 0.516)),
    "pfedgp": ((0.169, 0.315), (0.210, 0.333), (0.265, 0.446)),
    "pfedbayes": ((0.062, 0.287), (0.082, 0.322), (0.148, 0.256)),
    "lr-bpfl": ((0.030, 0.121), (0.037, 0.138), (0.054, 0.172)),
}
ACCURACY = {  # Table 3; 40 % for training
    "fedavg": (66.37, 68.66, 33.05),
    "fedbe": (67.05, 68.75, 34.11),
    "per-fedavg": (82.38, 68.91, 60.24),
    "pfedme": (78.14, 70.45, 47.15),
    "metavd": (67.52, 68.58, 34.23),
    "pfedgp": (67.11, 68.25, 33.29),
    "pfedbayes": (82.28, 69.43, 62.47),
    "lr-bpfl": (84.67, 72.38, 66.12),
}
ACCURACY_SMALL = {  # the table of data sizes; 10 % for training
    "fedavg": (56.45, 53.80, 19.39),
    "fedbe": (57.19, 54.42, 19.89),
    "per-fedavg": (77.04, 54.84, 45.49),
    "pfedme": (61.37, 57.53, 37.27),
    "metavd": (57.02, 54.58, 20.74),
    "pfedgp": (55.14, 52.27, 19.05),
    "pfedbayes": (80.86, 62.25, 52.11),
    "lr-bpfl": (83.30, 64.61, 54.83),
}
ADAPTIVE = {  # Table 4: (accuracy, ECE, ECE of the worst client); 10 % for training
    "without": ((82.62, 0.035, 0.130), (64.88, 0.044, 0.143), (55.64, 0.061, 0.156)),
    "with": ((83.30, 0.030, 0.096), (65.68, 0.038, 0.111), (56.49, 0.054, 0.124)),
}
COORDINATE = {  # the same columns
    "joint": ((80.79, 0.065, 0.194), (61.76, 0.154, 0.297), (52.93, 0.115, 0.246)),
    "coordinate": ADAPTIVE["with"],
}
OVERHEAD = {  # Table 1: seconds for one step, millions of parameters, megabytes sent
    "metavd": (0.026, 2.44, 9.76),
    "pfedgp": (0.023, 1.22, 4.88),
    "pfedbayes": (0.034, 2.44, 9.76),
    "lr-bpfl": (0.018, 1.27, 4.88),
}


def _fractions(*percent: float) -> tuple[float, ...]:
    return tuple(round(value / 100, 4) for value in percent)


NEW: dict[str, dict[str, tuple[float, ...]]] = {  # training clients, then new ones of alpha 0.1, 0.25, 0.5, 0.75, 1
    "ece": {
        "fedavg": _fractions(21.65, 21.52, 21.99, 21.57, 22.04, 21.47),
        "per-fedavg": _fractions(10.17, 10.35, 21.05, 24.45, 32.82, 29.67),
        "pfedbayes": _fractions(6.08, 6.64, 6.54, 5.24, 5.56, 5.65),
        "lr-bpfl": _fractions(0.98, 1.54, 1.88, 2.01, 2.24, 2.09),
    },
    "worst": {
        "per-fedavg": _fractions(23.04, 22.59, 36.46, 33.68, 34.86, 36.64),
        "pfedbayes": _fractions(27.25, 30.31, 25.34, 23.34, 18.98, 19.97),
        "lr-bpfl": _fractions(5.56, 6.84, 8.80, 7.98, 8.84, 8.11),
    },
    "accuracy": {
        "fedavg": (64.59, 64.45, 63.99, 64.48, 63.53, 64.51),
        "per-fedavg": (82.92, 78.08, 56.14, 49.56, 40.86, 40.76),
        "pfedbayes": (86.48, 76.91, 58.31, 44.35, 39.25, 36.05),
        "lr-bpfl": (88.20, 87.24, 75.18, 67.05, 60.88, 60.24),
    },
}
BINS: dict[str, tuple[float | None, ...]] = {  # the introduction's figure: accuracy in 15 bins of confidence, 2/10
    "fedavg": (
        None, None, None, 0, 0.1379, 0.2291, 0.2678, 0.3044, 0.3259, 0.3397, 0.3633, 0.3673, 0.3962, 0.4113, 0.6328,
    ),
    "per-fedavg": (
        None, None, None, None, None, 0, 0.45, 0.4821, 0.5173, 0.5326, 0.5219, 0.5318, 0.5213, 0.5582, 0.6888,
    ),
    "pfedbayes": (
        None, None, None, None, None, None, 0, 0.5264, 0.5510, 0.5428, 0.5719, 0.6384, 0.6755, 0.7033, 0.8173,
    ),
    "lr-bpfl": (
        None, None, 0, 0.2733, 0.3429, 0.4462, 0.4984, 0.5358, 0.5815, 0.6509, 0.7115, 0.7913, 0.8456, 0.9134, 0.9686,
    ),
}  # fmt: skip
NOISY: dict[str, dict[str, tuple[float, ...]]] = {  # clean, noisy; CIFAR-10 5/10, 10 % for training
    "accuracy": {
        "fedavg": (53.80, 31.66),
        "per-fedavg": (54.84, 23.52),
        "metavd": (54.58, 32.04),
        "pfedgp": (52.27, 30.27),
        "pfedbayes": (62.25, 39.49),
        "lr-bpfl": (64.61, 42.56),
    },
    "ece": {
        "fedavg": _fractions(38.21, 53.96),
        "per-fedavg": _fractions(31.64, 34.79),
        "metavd": _fractions(23.06, 32.15),
        "pfedgp": _fractions(22.95, 28.64),
        "pfedbayes": _fractions(8.17, 29.49),
        "lr-bpfl": _fractions(3.62, 3.75),
    },
}
