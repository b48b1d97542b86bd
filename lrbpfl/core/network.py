"""Any nn.Module as a function of its parameters, and which of its layers take a mask."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as nnf
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm

from lrbpfl.errors import BadInput

Params = dict[str, Tensor]
Call = Callable[[Params, Tensor], Tensor]  # the network as a function of its parameters and its inputs
Weights = Literal["kaiming", "uniform", "template"]  # where training starts
LayerKind = Literal["auto", "all", "dense", "conv"]  # auto: the dense ones, or all where there are none


class Layer(NamedTuple):
    """A layer that takes a mask: its weight has shape (outputs, inputs / groups, *kernel)."""

    outputs: int
    inputs: int
    groups: int = 1


def maskable(model: nn.Module, kind: LayerKind = "all") -> dict[str, Layer]:
    """Every Linear and Conv1d/2d/3d (grouped and depthwise ones too), or one kind of them, by the name of its weight.

    A weight that several of them share is masked once, under its first name; left alone are weights that belong to an
    embedding first, or are computed from other parameters (weight norm and other parametrisations).
    """
    if kind == "auto":
        return maskable(model, "dense") or maskable(model)
    own = dict(model.named_parameters())
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        if weight not in own:
            continue
        if isinstance(module, nn.Linear) and kind != "conv":
            layers[weight] = Layer(outputs=module.out_features, inputs=module.in_features)
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and kind != "dense":
            layers[weight] = Layer(outputs=module.out_channels, inputs=module.in_channels, groups=module.groups)
    return layers


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight, if there is one."""
    return weight.removesuffix("weight") + "bias"


def head(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of the last layer, a Linear: its weight and, if it has one, its bias."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    if not layers:
        raise BadInput("the model has no Linear layer that could be its last")
    name, layer = list(layers.items())[-1]
    where = f"the model's last layer, {name or 'model'!r} ({type(layer).__name__}),"
    if not isinstance(layer, nn.Linear):
        raise BadInput(f"{where} is not a Linear layer")
    names = tuple(f"{name}.{part}" if name else part for part in ("weight", "bias") if getattr(layer, part) is not None)
    held = [id(p) for m in model.modules() for p in m._parameters.values()]
    own = dict(model.named_parameters())
    if any(part not in own or held.count(id(own[part])) > 1 for part in names):
        raise BadInput(f"{where} shares its parameters with another or computes them: it cannot be taken off")
    return names


def rows_of_classes(model: nn.Module, num_classes: int) -> tuple[str, ...]:
    """The names of parameters with one row for each class: the last layer's, if that is a Linear with as many outputs.

    Of other models: none.
    """
    try:
        names = head(model)
    except BadInput:
        return ()
    return names if len(dict(model.named_parameters())[names[0]]) == num_classes else ()


def check(model: nn.Module) -> None:
    """Refuse what would break a promise in silence: batch statistics and noise that no seed reaches."""
    for name, module in model.named_modules():
        where = f"layer {name or 'model'!r} ({type(module).__name__})"
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
            raise BadInput(
                f"{where} uses statistics of its batches, so its outputs would depend on who is in a batch: "
                "replace it by nn.GroupNorm or nn.LayerNorm"
            )
        drop = module.p if isinstance(module, _DropoutNd) else None
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            drop = module.dropout
        if drop:
            raise BadInput(f"{where} has dropout {drop}, whose noise would not follow the seed: set it to 0")
        if isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d | _SpectralNorm):
            raise BadInput(f"{where} changes from call to call in a way that does not follow the seed: replace it")
    if not maskable(model):
        raise BadInput("the model has no Linear or Conv layer that could take a mask")


def init_params(model: nn.Module, rng: torch.Generator, weights: Weights) -> Params:
    """Starting parameters: fresh ones where layers take masks, the template's own elsewhere.

    `kaiming`: weights N(0, 2 / fan_in), biases 0; `uniform`: both U(-b, b), b = 1 / sqrt(fan_in), which is what torch
    gives a new layer; `template`: the template's own everywhere, as for a pretrained model.
    """
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    for weight in () if weights == "template" else maskable(model):
        scale = params[weight][0].numel() ** -0.5
        bias = bias_of(weight)
        for name in (weight, bias) if bias in params else (weight,):
            shape = params[name].shape
            if weights == "uniform":
                fresh = (2 * torch.rand(shape, generator=rng) - 1) * scale
            else:
                fresh = torch.randn(shape, generator=rng) * 2**0.5 * scale if name == weight else torch.zeros(shape)
            params[name] = fresh.to(params[name])
    return params


def inputs(x: Tensor) -> Tensor:
    """What a network sees: uint8 images scaled to [-1, 1], anything else as it is.

    Images are laid out with channels last, which makes convolutions on a CPU a third faster.
    """
    x = x.float() / 127.5 - 1.0 if x.dtype == torch.uint8 else x
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def caller(model: nn.Module) -> Call:
    """The model as a function of parameters and inputs, made once for many calls; the module is never changed.

    A plain Sequential of Linear layers and layers without parameters is called layer by layer: torch's own way of
    putting parameters in their places takes longer than a small network does.
    """
    places = _places(model)
    layers = list(model.named_children())
    plain = type(model) is nn.Sequential and len(layers) == len(model)  # no layer stands in two places
    plain = plain and all(type(m) is nn.Linear or next(m.parameters(), None) is None for _, m in layers)

    def call(params: Params, x: Tensor) -> Tensor:
        h = inputs(x)
        if not plain or any(m._forward_pre_hooks or m._forward_hooks for _, m in layers):
            held = {place: params[name] for place, name in places.items()}
            outputs: Tensor = functional_call(model, held, (h,), tie_weights=False)
            return outputs
        for name, layer in layers:
            if isinstance(layer, nn.Linear):
                bias = None if layer.bias is None else params[places[f"{name}.bias"]]
                h = nnf.linear(h, params[places[f"{name}.weight"]], bias)
            else:
                h = layer(h)
        return h

    return call


def forward(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    """Logits (batch, classes) of the model with these parameters; the module itself is never changed."""
    return caller(model)(params, x)


def parted(model: nn.Module, names: Iterable[str]) -> tuple[nn.Module, nn.Module]:
    """A Sequential model's layers before the first that holds one of these parameters, and the rest.

    Of other models, those derived from Sequential too, and where the two share a parameter: nothing and everything.
    """
    if type(model) is nn.Sequential:
        own = dict(model.named_parameters())
        wanted = {id(own[name]) for name in names}
        first = next(i for i, layer in enumerate(model) if wanted & {id(p) for p in layer.parameters()})
        parts = model[:first], model[first:]
        if all(name in own for part in parts for name, _ in part.named_parameters()):
            return parts
    return nn.Sequential(), model


def embedding(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    """What the last layer takes in, (batch, its inputs), from parameters without that layer's own.

    The model runs with the identity in the last layer's place, so that its output is what went in.
    """
    weight, *bias = head(model)
    own = dict(model.named_parameters())[weight]
    width = own.shape[1]
    identity = {weight: torch.eye(width, dtype=own.dtype, device=x.device)}
    zeros = {name: torch.zeros(width, dtype=own.dtype, device=x.device) for name in bias}
    out = forward(model, params | identity | zeros, x)
    if out.shape != (len(x), width):
        raise BadInput(
            f"the model's last layer, {weight.removesuffix('.weight')!r}, is not the one that gives its logits"
        )
    return out


def _places(model: nn.Module) -> dict[str, str]:
    """Every place that holds a parameter, once, and the parameter's name.

    Left to itself, torch visits a layer once for each of its names and, leaving, puts back the wrong tensor.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{layer}.{name}" if layer else name: first[id(p)]
        for layer, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }
