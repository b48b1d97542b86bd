"""Weights with independent Gaussian noise, w ~ N(theta, v): Gaussian dropout with a rate alpha = v / theta^2 for each.

In training the noise is drawn for every activation instead of every weight, the local reparameterisation of Kingma,
Salimans and Welling (NeurIPS 2015, arXiv:1506.02557): same distribution of each output, gradients that vary less.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as nnf
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lrbpfl.core.inputs import Inputs
from lrbpfl.core.network import CONV, Params, caller, maskable, parted, through, trainable
from lrbpfl.errors import BadInput

LogVariances = dict[str, Tensor]  # l by the name of a weight, of its shape
Stochastic = Literal["fc2", "all"]  # which weights carry noise

LOWEST, HIGHEST = -8.5, 8.5  # where log-variances are cut off
FLOOR = 1e-10  # of the variance of an activation, whose root has no slope at zero


def stochastic_weights(model: nn.Module, which: Stochastic) -> list[str]:
    """Names of the weights with noise: that of the second Linear layer (of the only one if there is one), or all.

    Those of Linear and Conv layers that train. The output layer of an attention block is left out: its weight is used
    without calling the layer.
    """
    modules, trained = dict(model.named_modules()), trainable(model)
    layers = {name: modules[name.rpartition(".")[0]] for name in maskable(model) if name in trained}
    layers = {name: m for name, m in layers.items() if isinstance(m, (nn.Linear, *CONV))}
    called = {name: m for name, m in layers.items() if not isinstance(m, NonDynamicallyQuantizableLinear)}
    linear = [name for name, module in called.items() if isinstance(module, nn.Linear)]
    names = list(called) if which == "all" else linear[:2][-1:]
    if not names:
        raise BadInput(f"the model has no {'Linear or Conv' if which == 'all' else 'Linear'} layer to put noise on")
    return names


def variances(log_variances: LogVariances) -> dict[str, Tensor]:
    """The variances v = exp(clamp(l, -8.5, 8.5)), at least 2.03e-4; beyond the ends l has no gradient."""
    return {name: _cut(log_v).exp() for name, log_v in log_variances.items()}


def _cut(log_v: Tensor) -> Tensor:
    """Between the ends, with a gradient of 1 at them: new clients begin there, and torch's own clamp may have none."""
    return torch.where(log_v < LOWEST, LOWEST, torch.where(log_v > HIGHEST, HIGHEST, log_v))


def kl(W: Params, log_variances: LogVariances) -> Tensor:
    """KL to the hierarchical dropout prior, the mean over noisy weights of log(1 + 1 / alpha) / 2, alpha = v / theta^2.

    theta counts as a constant: the KL moves the log-variances only.
    """
    terms = [(W[name].detach().square() / v).log1p().flatten() for name, v in variances(log_variances).items()]
    return 0.5 * torch.cat(terms).mean()


def draw(W: Params, log_variances: LogVariances, rng: Generator, scale: float = 1.0) -> Params:
    """One network from the posterior: theta + scale * sqrt(v) * eps, a fresh eps for every noisy weight."""
    noisy = {
        name: W[name] + scale * v.sqrt() * torch.randn(v.shape, generator=rng).to(v)
        for name, v in variances(log_variances).items()
    }
    return {**W, **noisy}


def noisy_logits(
    model: nn.Module,
    W: Params,
    log_variances: LogVariances,
    x: Inputs,
    *,
    samples: int,
    rng: Generator,
    scale: float = 1.0,
) -> Tensor:
    """Logits with fresh noise on the noisy layers' outputs, (samples, batch, classes).

    What a Sequential model computes before its first noisy layer is the same for all samples, and computed once.
    """
    before, after = parted(model, log_variances)
    h, rest = through(before)(W, x), caller(after)
    with noise_on_outputs(model, variances(log_variances), rng, scale):
        return torch.stack([rest(W, h) for _ in range(samples)])


@contextmanager
def noise_on_outputs(model: nn.Module, v: dict[str, Tensor], rng: Generator, scale: float = 1.0) -> Iterator[None]:
    """Inside, the named layers return y + scale * sqrt(layer(x^2; v)) * eps, a fresh eps for every activation.

    Every Linear or Conv layer that holds the named weight does so; afterwards the model is as it was.
    """
    own = dict(model.named_parameters())

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor, *, v: Tensor) -> Tensor:
        variance = _without_bias(module, (args[0] if args else kwargs["input"]).square(), v)
        eps = torch.randn(y.shape, generator=rng).to(y)
        return y + scale * variance.clamp(min=FLOOR).sqrt() * eps

    with ExitStack() as hooks:
        for name, variance in v.items():
            for module in model.modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.weight is own[name]:
                    handle = module.register_forward_hook(
                        lambda *call, variance=variance: hook(*call, v=variance), with_kwargs=True
                    )
                    hooks.callback(handle.remove)
        yield


def _without_bias(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What the layer would give with this weight and no bias; not by calling it, which would call its hooks."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        y: Tensor = layer._conv_forward(x, weight, None)
        return y
    return nnf.linear(x, weight)
