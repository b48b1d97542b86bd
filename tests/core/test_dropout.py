"""Noise on weights and on outputs: moments against Jacobians and Monte Carlo, the KL by hand, hooks that go away."""

import math
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lrbpfl.core import dropout
from lrbpfl.core.network import Params, forward, maskable
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.rng import generator

DRAWS = 100_000


def params(model: nn.Module) -> Params:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def log_of(v: Tensor) -> dict[str, Tensor]:
    return {"weight": v.log()}


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_hooks_with_kwargs) for module in model.modules())


def close_moments(draws: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Within five standard errors of a Gaussian's mean and variance, everywhere."""
    n = len(draws)
    assert bool(((draws.mean(0) - mean).abs() < 5 * (variance / n).sqrt() + 1e-6).all())
    assert bool(((draws.var(0) - variance).abs() < 5 * variance * (2 / n) ** 0.5 + 1e-9).all())


def test_the_second_linear_layer_carries_the_noise() -> None:
    assert dropout.stochastic_weights(cnn(10), "fc2") == ["fc2.weight"]
    layers = OrderedDict(conv=nn.Conv2d(1, 2, 3), flat=nn.Flatten(), a=nn.Linear(2, 3), b=nn.Linear(3, 4))
    assert dropout.stochastic_weights(nn.Sequential(layers), "fc2") == ["b.weight"]
    assert dropout.stochastic_weights(nn.Sequential(OrderedDict(list(layers.items())[:3])), "fc2") == ["a.weight"]
    assert dropout.stochastic_weights(nn.Linear(2, 3), "fc2") == ["weight"]


def test_or_every_layer_does() -> None:
    assert dropout.stochastic_weights(cnn(10), "all") == list(maskable(cnn(10)))


def test_a_model_without_such_a_layer_is_refused() -> None:
    with pytest.raises(BadInput, match="no Linear layer"):
        dropout.stochastic_weights(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), "fc2")
    with pytest.raises(BadInput, match="no Linear or Conv layer"):
        dropout.stochastic_weights(nn.Sequential(nn.LayerNorm(3)), "all")


def test_a_layer_that_is_never_called_is_left_out() -> None:
    """Attention reads the weight of its output layer and passes the layer by: no hook would ever be called."""
    model = nn.Sequential(OrderedDict(attend=nn.MultiheadAttention(4, 2), a=nn.Linear(4, 3)))
    assert "attend.out_proj.weight" in maskable(model)
    assert dropout.stochastic_weights(model, "fc2") == dropout.stochastic_weights(model, "all") == ["a.weight"]


def test_variances_are_cut_off_and_have_no_gradient_beyond() -> None:
    """At the ends they have one, whatever the version of torch: that of a new client is -8.5, and must get away."""
    log_variance = torch.tensor([-17.0, -8.6, -8.5, 0.0, 8.5, 8.6], requires_grad=True)
    v = dropout.variances({"w": log_variance})["w"]
    expected = torch.tensor([math.exp(-8.5), math.exp(-8.5), math.exp(-8.5), 1.0, math.exp(8.5), math.exp(8.5)])
    torch.testing.assert_close(v, expected)
    v.sum().backward()
    torch.testing.assert_close(log_variance.grad, expected * torch.tensor([0.0, 0, 1, 1, 1, 0]))


def kl(theta: float, v: float) -> float:
    return dropout.kl({"weight": torch.tensor([theta])}, log_of(torch.tensor([v]))).item()


def test_the_kl_of_a_weight() -> None:
    """log(1 + 1 / alpha) / 2: half of ln 2 at alpha = 1, falling to 0."""
    assert kl(0.3, 0.09) == pytest.approx(0.5 * math.log(2)) == pytest.approx(0.3466, abs=1e-4)
    values = [kl(1.0, alpha) for alpha in (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, 1000.0)]
    assert all(a > b for a, b in pairwise(values))
    assert kl(0.01, 1000.0) == pytest.approx(0, abs=1e-6)
    assert kl(0.0, 0.5) == 0


def test_the_kl_is_the_mean_over_all_weights_and_moves_only_the_variances() -> None:
    rng = generator(0, "kl")
    W = {"a": torch.randn(3, 5, generator=rng).requires_grad_(), "b": torch.randn(2, generator=rng).requires_grad_()}
    log_variances = {name: torch.randn(w.shape, generator=rng).requires_grad_() for name, w in W.items()}
    value = dropout.kl({**W, "c": torch.ones(9)}, log_variances)
    theta, log_v = (np.concatenate([t.detach().numpy().ravel() for t in tree.values()]) for tree in (W, log_variances))
    ratio = theta**2 / np.exp(log_v)
    assert value.item() == pytest.approx(0.5 * np.log(1 + ratio).mean(), rel=1e-6)
    value.backward()
    assert all(w.grad is None for w in W.values())
    slope = torch.cat([log_v.grad.flatten() for log_v in log_variances.values() if log_v.grad is not None])
    torch.testing.assert_close(slope, torch.from_numpy(-0.5 * ratio / (1 + ratio) / 17))


def test_the_outputs_of_a_linear_layer_have_the_moments_of_noisy_weights() -> None:
    """Mean x W' + b and variance x^2 v', over 1e5 draws; no two activations share their noise."""
    rng = generator(0, "linear")
    model, x, v = nn.Linear(5, 3), torch.randn(2, 5, generator=rng), torch.rand(3, 5, generator=rng)
    W = params(model)
    with dropout.noise_on_outputs(model, {"weight": v}, rng):
        y = forward(model, W, x.repeat(DRAWS, 1)).view(DRAWS, 2, 3)
    mean = x.numpy() @ W["weight"].numpy().T + W["bias"].numpy()
    close_moments(y, torch.from_numpy(mean), torch.from_numpy(x.numpy() ** 2 @ v.numpy().T))
    correlation = torch.corrcoef(y.flatten(1).T) - torch.eye(6)
    assert correlation.abs().max() < 5 / DRAWS**0.5


CONVOLUTIONS = {
    "1d": (nn.Conv1d(2, 3, 3, padding=1), (2, 5)),
    "2d": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 4)),
    "3d": (nn.Conv3d(1, 2, 2), (1, 3, 2, 3)),
    "grouped": (nn.Conv2d(4, 4, 2, groups=2), (4, 3, 3)),
    "reflecting": (nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 3, 3)),
    "dilated, without bias": (nn.Conv1d(2, 2, 2, dilation=2, bias=False), (2, 5)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_outputs_of_a_convolution_have_the_moments_of_noisy_weights(kind: str) -> None:
    """A layer is linear in its weights: Var y = sum_i v_i (dy / dw_i)^2, with torch's own Jacobian."""
    model, shape = CONVOLUTIONS[kind]
    rng, draws = generator(0, kind), 20_000
    x, W = torch.randn(1, *shape, generator=rng), params(model)
    v = torch.rand(W["weight"].shape, generator=rng)
    with dropout.noise_on_outputs(model, {"weight": v}, rng):
        y = forward(model, W, x.expand(draws, *shape))
    jacobian = torch.autograd.functional.jacobian(lambda w: forward(model, {**W, "weight": w}, x)[0], W["weight"])
    variance = (jacobian.square() * v).flatten(y.dim() - 1).sum(-1)
    close_moments(y, forward(model, W, x)[0], variance)


def test_the_gradient_of_the_log_variances_is_that_of_the_noise() -> None:
    """dy / dl_i = eps x_i^2 v_i / (2 sqrt(x^2 v)), for the same eps."""
    rng = generator(0, "gradient")
    model, x = nn.Linear(4, 1), torch.randn(1, 4, generator=rng)
    W, log_v = params(model), torch.randn(1, 4, generator=rng).requires_grad_()
    y = dropout.noisy_logits(model, W, {"weight": log_v}, x, samples=1, rng=generator(1))
    y.backward()
    with torch.no_grad():
        eps, v = torch.randn(1, generator=generator(1)), log_v.exp()
        std = (x.square() * v).sum().sqrt()
        torch.testing.assert_close(y[0, 0], forward(model, W, x)[0] + std * eps)
        torch.testing.assert_close(log_v.grad, eps * x.square() * v / (2 * std))


def test_inputs_of_zero_leave_every_gradient_finite() -> None:
    model, x = nn.Linear(4, 2), torch.zeros(3, 4, requires_grad=True)
    log_v = torch.zeros(2, 4, requires_grad=True)
    dropout.noisy_logits(model, params(model), {"weight": log_v}, x, samples=2, rng=generator(0)).sum().backward()
    assert log_v.grad is not None and x.grad is not None
    assert bool(torch.isfinite(log_v.grad).all()) and bool(torch.isfinite(x.grad).all())


def test_every_sample_has_its_own_noise_and_none_without_scale() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(6, 4)
    W = params(model)
    log_variances = {"2.weight": torch.zeros(3, 5)}
    args = (model, W, log_variances, x)
    one, two = dropout.noisy_logits(*args, samples=2, rng=generator(0))
    assert one.shape == (6, 3) and not torch.equal(one, two)
    half, _ = dropout.noisy_logits(*args, samples=2, rng=generator(0), scale=0.5)
    plain = forward(model, W, x)
    torch.testing.assert_close(half - plain, (one - plain) / 2)
    assert torch.equal(dropout.noisy_logits(*args, samples=2, rng=generator(0), scale=0.0), torch.stack([plain, plain]))


class Odd(nn.Module):
    """One weight in two layers, one of them called by keyword; and it can be told to fail."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.fails = nn.Linear(3, 3), nn.Linear(3, 3), fails
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(input=x)
        if self.fails:
            raise LookupError("half way")
        out: Tensor = x - self.b(torch.zeros_like(x) + 1)
        return out


def test_every_layer_that_holds_the_weight_is_noisy() -> None:
    model, v = Odd(), torch.full((3, 3), 0.5)
    W = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    x = torch.ones(DRAWS, 3)
    y = dropout.noisy_logits(model, W, {"a.weight": v.log()}, x, samples=1, rng=generator(0))[0]
    close_moments(y, torch.zeros(3), torch.full((3,), 2 * 3 * 0.5))


def test_hooks_are_gone_afterwards_even_if_the_model_fails() -> None:
    log_variances = {"a.weight": torch.zeros(3, 3)}
    for fails in (False, True):
        model = Odd(fails)
        before, x = params(model), torch.ones(2, 3)
        with dropout.noise_on_outputs(model, dropout.variances(log_variances), generator(0)):
            assert hooks(model) > 0
        try:
            dropout.noisy_logits(model, params(model), log_variances, x, samples=2, rng=generator(0))
        except LookupError:
            assert fails
        else:
            assert not fails
        assert hooks(model) == 0
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_drawn_network_has_noise_where_it_belongs() -> None:
    rng = generator(0, "draw")
    W = {"a": torch.randn(2, 3, generator=rng), "b": torch.randn(4, generator=rng)}
    v = torch.rand(2, 3, generator=rng)
    draws = [dropout.draw(W, {"a": v.log()}, rng) for _ in range(20_000)]
    assert all(draw["b"] is W["b"] for draw in draws) and list(draws[0]) == list(W)
    close_moments(torch.stack([draw["a"] for draw in draws]), W["a"], v)
    twice = dropout.draw(W, {"a": v.log()}, generator(0), scale=2.0)["a"] - W["a"]
    torch.testing.assert_close(twice, 2 * (dropout.draw(W, {"a": v.log()}, generator(0))["a"] - W["a"]))
    assert torch.equal(dropout.draw(W, {"a": v.log()}, rng, scale=0.0)["a"], W["a"])


class Plain(nn.Module):
    """The same layers, but nobody sees that they are a sequence."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.mark.parametrize("which", ["fc2", "all"])
def test_what_comes_before_the_noise_is_computed_once(which: dropout.Stochastic) -> None:
    """With the same logits and gradients as if everything had been computed for each sample."""
    model = cnn(3, (1, 8, 8))
    first, calls = model.get_submodule("conv1"), []
    handle = first.register_forward_pre_hook(lambda module, args: calls.append(1))
    W = {name: p.requires_grad_() for name, p in params(model).items()}
    log_v = {name: torch.full_like(W[name], -4.0) for name in dropout.stochastic_weights(model, which)}
    x = torch.randn(5, 1, 8, 8)

    def logits_and_slope(model: nn.Module) -> tuple[Tensor, Tensor]:
        logits = dropout.noisy_logits(model, W, log_v, x, samples=3, rng=generator(1))
        return logits, torch.autograd.grad(logits.square().sum(), W["conv1.weight"])[0]

    got = logits_and_slope(model)
    assert len(calls) == (1 if which == "fc2" else 3)
    torch.testing.assert_close(got, logits_and_slope(Plain(model)))
    handle.remove()


def test_a_sequence_whose_parts_share_a_weight_works_too() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(OrderedDict(a=shared, b=nn.Linear(3, 3), c=shared))
    log_v = {"b.weight": torch.full((3, 3), -4.0)}
    logits = dropout.noisy_logits(model, params(model), log_v, torch.ones(2, 3), samples=2, rng=generator(0))
    assert logits.shape == (2, 2, 3)
