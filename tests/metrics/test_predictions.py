"""Samples become means and entropies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

from lrbpfl.metrics import Predictions, pool, reduce


def softmaxes(samples: int, n: int, classes: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    noise = torch.randn(samples, n, classes, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(scale * noise, dim=2)


def entropies(probs: torch.Tensor) -> torch.Tensor:
    """Someone else's entropy; the KL to the uniform distribution is the typed way to reach it."""
    uniform = Categorical(torch.full_like(probs, 1 / probs.shape[-1]))
    return math.log(probs.shape[-1]) - kl_divergence(Categorical(probs), uniform)


def test_means_and_entropies_match_torch() -> None:
    samples = softmaxes(7, 40, 5).double()
    p = reduce(samples, torch.arange(40) % 5)
    assert_close(torch.from_numpy(p.probs), samples.mean(0))
    assert_close(torch.from_numpy(p.total), entropies(samples.mean(0)))
    assert_close(torch.from_numpy(p.aleatoric), entropies(samples).mean(0))
    assert_close(torch.from_numpy(p.epistemic), torch.from_numpy(p.total - p.aleatoric))


def test_the_result_has_the_documented_types() -> None:
    p = reduce(softmaxes(2, 3, 4), torch.tensor([0, 1, 3], dtype=torch.int32))
    assert [a.dtype.name for a in p] == ["float64", "int64", "float64", "float64"]
    assert [a.shape for a in p] == [(3, 4), (3,), (3,), (3,)]


def test_samples_are_averaged_in_float64() -> None:
    ones = torch.tensor([[[1.0, 0.0]], [[1.0 - 2**-24, 2**-24]]])  # a float32 mean rounds to 1
    assert reduce(ones, torch.tensor([0])).confidence[0] == pytest.approx(1 - 2**-25, abs=1e-12)


def test_zero_log_zero_is_zero() -> None:
    p = reduce(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([0]))
    assert p.aleatoric.tolist() == [0.0]
    assert p.total.tolist() == pytest.approx([np.log(2)])
    assert p.epistemic.tolist() == pytest.approx([np.log(2)])


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 6), st.integers(0, 1000), st.floats(0, 60))
def test_information_is_never_negative(samples: int, n: int, classes: int, seed: int, scale: float) -> None:
    p = reduce(softmaxes(samples, n, classes, seed=seed, scale=scale), torch.zeros(n, dtype=torch.long))
    assert (p.total - p.aleatoric >= -1e-12).all()
    assert (p.epistemic >= 0).all() and (p.aleatoric >= 0).all()
    assert (p.total <= np.log(classes) + 1e-12).all()
    assert (p.confidence <= 1.0).all()


def test_one_sample_holds_no_epistemic_uncertainty() -> None:
    assert reduce(softmaxes(1, 30, 4), torch.zeros(30, dtype=torch.long)).epistemic.max() == 0.0


def test_rounding_below_zero_is_cut_off() -> None:
    p = Predictions(probs=np.ones((1, 1)), y=np.zeros(1, np.int64), total=np.zeros(1), aleatoric=np.full(1, 1e-17))
    assert p.epistemic.tolist() == [0.0]


def test_float32_rounding_cannot_push_a_confidence_above_one() -> None:
    above = torch.tensor([[[1.0000001, 0.0]]])
    assert reduce(above, torch.tensor([0])).confidence.tolist() == [1.0]


def test_confidence_and_correctness() -> None:
    samples = torch.tensor([[[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]], dtype=torch.float64)
    p = reduce(samples, torch.tensor([1, 1, 0]))
    assert p.confidence.tolist() == [0.8, 0.5, 0.9]
    assert p.correct.tolist() == [True, False, True]  # a tie goes to the first class


@pytest.mark.parametrize(
    ("samples", "y", "sentence"),
    [
        (torch.ones(3, 1), torch.zeros(3, dtype=torch.long), "shape"),
        (torch.ones(0, 3, 1), torch.zeros(3, dtype=torch.long), "shape"),
        (torch.ones(1, 0, 1), torch.zeros(0, dtype=torch.long), "shape"),
        (torch.ones(1, 3, 1), torch.zeros(2, dtype=torch.long), "do not fit"),
        (torch.ones(1, 3, 1), torch.zeros(3), "integers"),
        (torch.ones(1, 3, 1), torch.ones(3, dtype=torch.long), "1 classes"),
        (torch.ones(1, 3, 1), -torch.ones(3, dtype=torch.long), "1 classes"),
        (torch.full((1, 3, 2), torch.nan), torch.zeros(3, dtype=torch.long), "finite"),
        (torch.full((1, 3, 2), torch.inf), torch.zeros(3, dtype=torch.long), "finite"),
        (torch.full((1, 3, 2), 2.0), torch.zeros(3, dtype=torch.long), "logits"),
        (torch.tensor([[[1.5, -0.5]]]), torch.zeros(1, dtype=torch.long), "logits"),
    ],
)
def test_nonsense_is_refused(samples: torch.Tensor, y: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        reduce(samples, y)


def test_pooling_keeps_every_example_in_order() -> None:
    samples, y = softmaxes(3, 9, 4), torch.arange(9) % 4
    pooled = pool([reduce(samples[:, :2], y[:2]), reduce(samples[:, 2:], y[2:])])
    for got, wanted in zip(pooled, reduce(samples, y), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_pool_needs_matching_parts() -> None:
    with pytest.raises(ValueError, match="no predictions"):
        pool([])
    one, two = (reduce(softmaxes(1, 2, c), torch.zeros(2, dtype=torch.long)) for c in (2, 3))
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        pool([one, two])
