"""Gates of a mask: which of its ranks are open.

A layer's gates are one tensor gamma of shape (r_max,). gamma = +inf is a gate that is open for good (the first one),
gamma = -inf a gate that is closed for good: the sigmoid maps them to exactly 1 and 0 with gradient 0.

What moves gamma is one of two things. The paper prints a gradient step on the free energy with a penalty. It cannot
tell useful ranks from useless ones: what a gate scales its factors can undo, so near an optimum over Q and R the
likelihood has no slope in lambda, and the penalty pulls all gates down at one pace. `weighed` lets held-out examples
decide instead: a rank must be worth more to them than chance and a small price.
"""

import math

import torch
from torch import Tensor

GAMMA = 3.5  # where gates start; the paper's value
THRESHOLD = 0.95  # lambda-bar, Eq. (10); the paper's value
MEMORY = 0.75  # what stays of older evidence


def init(max_rank: int, gamma: float = GAMMA) -> Tensor:
    """All gates open at logit gamma, the first one for good: every mask keeps at least one rank.  (r_max,)"""
    gammas = torch.full((max_rank,), gamma)
    gammas[0] = math.inf
    return gammas


def gate_values(gamma: Tensor) -> Tensor:
    """lambda_i = sigmoid(gamma_i).  Eq. (9)"""
    return torch.sigmoid(gamma)


def is_open(gamma: Tensor) -> Tensor:
    """Which ranks are kept: 1{lambda_i > 0}, as booleans (r_max,)."""
    return gamma > -math.inf


def rank(gamma: Tensor) -> int:
    """The number of open gates, r_k = sum_i 1{lambda_i > 0}.  Eq. (6)"""
    return int(is_open(gamma).sum())


def prune(gamma: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """Close for good the gates below the threshold, lambda_i <- lambda_i 1{lambda_i >= threshold}.  Eq. (10)"""
    return torch.where(gate_values(gamma) >= threshold, gamma, torch.full_like(gamma, -math.inf))


def penalty(gamma: Tensor) -> Tensor:
    """The L2 regulariser of the printed rule: sum_i lambda_i^2 over the gates that can still close."""
    return (gate_values(gamma)[1:] ** 2).sum()


def weighed(gamma: Tensor, gains: Tensor, price: float) -> Tensor:
    """Gates after held-out examples have been heard: what each rank is worth joins most of what was heard before.

    `gains` (r_max - 1, examples): by how much each example is likelier with rank i, the i-th largest singular value of
    the mask, than with the ranks before it alone. Its worth is their sum, less the standard error of that, less a price
    for each example. What is old fades, so that the number of rounds decides nothing.
    """
    examples = gains.shape[1]
    error = gains.std(dim=1, unbiased=False) * math.sqrt(examples)
    worth = gains.sum(dim=1) - error - price * examples
    return torch.cat([gamma[:1], GAMMA + MEMORY * (gamma[1:] - GAMMA) + worth])
