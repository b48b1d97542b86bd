"""The label prior, the one formula that all algorithms share."""

import math

import pytest
import torch

from lrbpfl.algorithms.protocol import Task, log_label_prior
from tests.conftest import mlp


def test_without_a_prior_logits_stay() -> None:
    assert log_label_prior(Task(mlp(), 4), torch.tensor([0, 1])).tolist() == [0.0] * 4


@pytest.mark.parametrize("eps", [1.0, 0.5])
def test_smoothed_frequencies_by_hand(eps: float) -> None:
    """So many examples more, shared out evenly among four classes."""
    got = log_label_prior(Task(mlp(), 4, label_prior=eps), torch.tensor([2, 0, 2, 2]))
    expected = [math.log((count + eps / 4) / (4 + eps)) for count in (1, 0, 3, 0)]
    assert got.tolist() == pytest.approx(expected, rel=1e-6)
    assert got.exp().sum().item() == pytest.approx(1)


def test_what_goes_to_absent_classes_does_not_grow_with_their_number() -> None:
    y = torch.tensor([0] * 99)
    absent = [log_label_prior(Task(mlp(), classes, label_prior=1.0), y)[1:].exp().sum() for classes in (10, 1000)]
    assert [mass.item() for mass in absent] == pytest.approx([0.009, 0.00999], rel=1e-4)


def test_classes_beyond_the_labels_seen_are_counted() -> None:
    assert log_label_prior(Task(mlp(), 9, label_prior=1.0), torch.tensor([0])).shape == (9,)
