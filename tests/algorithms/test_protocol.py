"""What all algorithms share: wishes, and the label prior in one formula."""

import math

import pytest
import torch

from lrbpfl.algorithms import ALGORITHMS
from lrbpfl.algorithms.lr_bpfl import LRBPFL
from lrbpfl.algorithms.protocol import Task, Wishes, log_label_prior, wishes_of
from tests.conftest import mlp


def test_who_wishes_what() -> None:
    asked = {name: wishes_of(kind()) for name, kind in ALGORITHMS.items()}
    assert {name: wishes for name, wishes in asked.items() if wishes != Wishes()} == {
        "lr-bpfl": Wishes(label_prior=1.0),
        "fedbe": Wishes(public_fraction=0.04),
    }
    assert [wishes_of(LRBPFL(**fields)) for fields in LRBPFL.PRESETS.values()] == [Wishes()]
    assert wishes_of(LRBPFL(label_prior=0.5)) == Wishes(label_prior=0.5)


@pytest.mark.parametrize("prior", [None, 0.0])
def test_without_a_prior_logits_stay(prior: float | None) -> None:
    assert log_label_prior(Task(mlp(), 4, label_prior=prior), torch.tensor([0, 1])).tolist() == [0.0] * 4


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
