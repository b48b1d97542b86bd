"""Gates of a mask: which of its ranks are open.

A layer's gates are one tensor gamma of shape (r_max,). gamma = +inf is a gate that is open for good (the first one),
gamma = -inf a gate that is closed for good: the sigmoid maps them to exactly 1 and 0 with gradient 0.
"""

import math

import torch
from torch import Tensor


def init(max_rank: int, gamma: float) -> Tensor:
    """All gates open at logit gamma, the first one for good: every mask keeps at least one rank.  (r_max,)"""
    gammas = torch.full((max_rank,), gamma)
    gammas[0] = math.inf
    return gammas


def gates(gamma: Tensor) -> Tensor:
    """lambda_i = sigmoid(gamma_i).  Eq. (9)"""
    return torch.sigmoid(gamma)


def is_open(gamma: Tensor) -> Tensor:
    """Which ranks are kept: 1{lambda_i > 0}, as booleans (r_max,)."""
    return gamma > -math.inf


def rank(gamma: Tensor) -> int:
    """The number of open gates, r_k = sum_i 1{lambda_i > 0}.  Eq. (6)"""
    return int(is_open(gamma).sum())


def prune(gamma: Tensor, threshold: float) -> Tensor:
    """Close for good the gates below the threshold, lambda_i <- lambda_i 1{lambda_i >= threshold}.  Eq. (10)"""
    return torch.where(gates(gamma) >= threshold, gamma, torch.full_like(gamma, -math.inf))


def penalty(gamma: Tensor) -> Tensor:
    """The L2 regulariser that makes ranks earn their place: sum_i lambda_i^2 over the gates that can still close."""
    return (gates(gamma)[1:] ** 2).sum()
