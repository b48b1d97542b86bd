"""Clients' sums give the scaling of all their data; what is constant stays what it is."""

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from lrbpfl.data.scaling import fit, pooled, sums
from lrbpfl.errors import BadInput
from lrbpfl.rng import generator


def test_pooled_sums_are_the_fit_of_everything_together() -> None:
    rng = generator(0)
    parts = [torch.randn(n, 3, 2, generator=rng) * 50 + 1000 for n in (1, 7, 40)]
    together, whole = pooled(map(sums, parts)), torch.cat(parts).double()
    assert torch.allclose(together.mean.double(), whole.mean(0), rtol=1e-7)
    assert torch.allclose(together.std.double(), whole.std(0, correction=0), rtol=1e-6)
    assert torch.equal(together.mean, fit(torch.cat(parts)).mean)


def test_against_scikit_learn() -> None:
    x = torch.randn(50, 4, generator=generator(1)) * torch.tensor([1e-6, 1.0, 300.0, 1e7]) + 5
    expected = StandardScaler().fit_transform(x.double().numpy())
    scaled = fit(x).apply(x)
    assert scaled.dtype == torch.float32
    assert np.allclose(scaled[:, 1:].numpy(), expected[:, 1:], atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -12345.678, 1e30, 1e-30])
def test_constant_features_have_spread_one(value: float) -> None:
    x = torch.full((1000, 2), value)
    scaling = fit(x)
    assert scaling.std.tolist() == [1.0, 1.0]
    assert scaling.apply(x).abs().max() <= 1e-6 * abs(value)


def test_a_small_spread_is_no_constant() -> None:
    x = torch.tensor([[1e-20], [3e-20]])
    assert fit(x).apply(x).flatten().tolist() == pytest.approx([-1.0, 1.0])


def test_images_are_refused() -> None:
    with pytest.raises(BadInput, match=r"torch\.uint8 cannot be standardised"):
        sums(torch.zeros(3, 1, 2, 2, dtype=torch.uint8))
