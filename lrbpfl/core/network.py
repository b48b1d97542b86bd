"""Any nn.Module as a function of the parameters that it trains, and which of its weights take a mask."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as nnf

from lrbpfl import trees
from lrbpfl.core.inputs import Inputs, device_of, length
from lrbpfl.core.modes import modal, right_mode
from lrbpfl.core.precision import rounded, widened
from lrbpfl.errors import BadInput

Params = dict[str, Tensor]
Call = Callable[[Params, Inputs], Tensor]  # the network as a function of its parameters and its inputs
Weights = Literal["kaiming", "uniform", "template"]  # where training starts
LayerKind = Literal["auto", "all", "dense", "conv"]  # auto: the dense ones, or all where there are none

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # of attention


class Layer(NamedTuple):
    """A weight that takes a mask: it has shape (outputs, inputs / groups, *kernel)."""

    outputs: int
    inputs: int
    groups: int = 1


def maskable(model: nn.Module, kind: LayerKind = "all") -> dict[str, Layer]:
    """The weights that take masks, or one kind of them, by their names; frozen ones too.

    Those of every Linear and Conv1d/2d/3d (grouped and depthwise ones too), the projections of attention and the
    weights of recurrent layers; all but those of convolutions count as dense. A weight that several layers share is
    masked once, under its first name; left alone are weights that belong to an embedding first, or are computed from
    other parameters (weight norm and other parametrisations).
    """
    if kind == "auto":
        return maskable(model, "dense") or maskable(model)
    own = dict(model.named_parameters())
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if kind == "all" or isinstance(module, CONV) is (kind == "conv"):
            found = {f"{name}.{part}" if name else part: layer for part, layer in _layers(module).items()}
            layers |= {weight: layer for weight, layer in found.items() if weight in own}
    return layers


def _layers(module: nn.Module) -> dict[str, Layer]:
    """The weights of one module that take masks."""
    if isinstance(module, nn.Linear):
        return {"weight": Layer(outputs=module.out_features, inputs=module.in_features)}
    if isinstance(module, CONV):
        return {"weight": Layer(outputs=module.out_channels, inputs=module.in_channels, groups=module.groups)}
    own = dict(module.named_parameters(recurse=False))
    names = [name for name in PROJECTIONS if name in own] if isinstance(module, nn.MultiheadAttention) else []
    if isinstance(module, RECURRENT):
        names = [name for name in own if name.startswith("weight")]
    return {name: Layer(*own[name].shape) for name in names}


def unmasked(model: nn.Module, kind: LayerKind = "auto") -> list[str]:
    """The names of parameters of two or more dimensions that carry no mask: embeddings and the like."""
    layers = maskable(model, kind)
    return [name for name, p in model.named_parameters() if p.dim() > 1 and name not in layers]


def trainable(model: nn.Module) -> Params:
    """The parameters that train and travel, as they are; frozen ones stay in the model and keep their values."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight, if there is one."""
    return weight.removesuffix("weight") + "bias"


def head(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of the last layer, a Linear: its weight and, if it has one, its bias."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, *CONV))}
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

    Of other models: none; nor are those that are frozen.
    """
    try:
        names = head(model)
    except BadInput:
        return ()
    own = dict(model.named_parameters())
    return tuple(name for name in names if own[name].requires_grad) if len(own[names[0]]) == num_classes else ()


def init_params(model: nn.Module, rng: torch.Generator, weights: Weights) -> Params:
    """Starting values of all that trains: fresh ones in Linear and Conv layers, the template's own elsewhere.

    `kaiming`: weights N(0, 2 / fan_in), biases 0; `uniform`: both U(-b, b), b = 1 / sqrt(fan_in), which is what torch
    gives a new layer; `template`: the template's own everywhere, as for a pretrained model. A layer whose weight is
    frozen is not drawn anew.
    """
    params = {name: p.clone() for name, p in trainable(model).items()}
    for weight in () if weights == "template" else maskable(model):
        module = model.get_submodule(weight.rpartition(".")[0])
        if weight not in params or not isinstance(module, (nn.Linear, *CONV)):
            continue
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


def inputs(x: Inputs) -> Any:
    """What a network sees: uint8 images scaled to [-1, 1], anything else as it is.

    One tensor of bytes is taken for images whatever its shape; of several, those with four dimensions. Images are laid
    out with channels last, which makes convolutions on a CPU a third faster.
    """
    alone = isinstance(x, Tensor)

    def seen(part: Any) -> Any:
        if not isinstance(part, Tensor):  # between the layers of a sequence anything may pass
            return part
        if part.dtype == torch.uint8 and (alone or part.dim() == 4):
            part = part.float() / 127.5 - 1.0
        return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part

    return seen(x) if alone else trees.tree_map(seen, x)


def caller(model: nn.Module) -> Call:
    """The model as a function of parameters and inputs, made once for many calls; the module is never changed.

    It gives logits: what it returns, or what is called `logits` in it.
    """
    called = through(model)

    def call(params: Params, x: Inputs) -> Tensor:
        outputs = called(params, x)
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits", outputs)
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor):
            raise BadInput(
                f"the model returns a {type(outputs).__name__}: it should return its logits as a tensor, or as "
                "`logits` in a dict or an object"
            )
        logits: Tensor = widened(outputs)
        return logits

    return call


def through(model: nn.Module) -> Callable[[Params, Inputs], Any]:
    """What the model, or a part of one, returns with these parameters, whatever that is.

    Parameters that train must be given, frozen ones are the module's own unless they are given. A plain Sequential of
    Linear layers and layers without parameters is called layer by layer: torch's own way of putting parameters in their
    places takes longer than a small network does.
    """
    fixed, modes = _Fixed(model), modal(model)
    layers = list(model.named_children())
    plain = type(model) is nn.Sequential and len(layers) == len(model)  # no layer stands in two places
    plain = plain and not modes and all(type(m) is nn.Linear or next(m.parameters(), None) is None for _, m in layers)

    def call(params: Params, x: Inputs) -> Any:
        h = inputs(x)
        if not plain or any(m._forward_pre_hooks or m._forward_hooks for _, m in layers):
            with right_mode(model) if modes else nullcontext():
                return functional_call(model, fixed.around(params, h), *_arguments(model, h), tie_weights=False)
        for name, layer in layers:
            if isinstance(layer, nn.Linear):
                weight = fixed.value(f"{name}.weight", params, h)
                h = nnf.linear(h, weight, None if layer.bias is None else fixed.value(f"{name}.bias", params, h))
            else:
                h = layer(h)
        return h

    return rounded(call)


def forward(model: nn.Module, params: Params, x: Inputs) -> Tensor:
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


def embedding(model: nn.Module, params: Params, x: Inputs) -> Tensor:
    """What the last layer takes in, (batch, its inputs), from parameters without that layer's own.

    The model runs with the identity in the last layer's place, so that its output is what went in.
    """
    weight, *bias = head(model)
    own = dict(model.named_parameters())[weight]
    width = own.shape[1]
    identity = {weight: torch.eye(width, dtype=own.dtype, device=device_of(x))}
    zeros = {name: torch.zeros(width, dtype=own.dtype, device=device_of(x)) for name in bias}
    out = forward(model, params | identity | zeros, x)
    if out.shape != (length(x), width):
        raise BadInput(
            f"the model's last layer, {weight.removesuffix('.weight')!r}, is not the one that gives its logits"
        )
    return out


class _Fixed:
    """What a model keeps to itself, frozen parameters and buffers, beside parameters that come from outside."""

    def __init__(self, model: nn.Module) -> None:
        own = dict(model.named_parameters())
        self.places = _places(model)
        self.frozen = {name: p.detach() for name, p in own.items() if not p.requires_grad}
        self.kept = {place: self.frozen[name] for place, name in self.places.items() if name in self.frozen}
        self.kept |= dict(model.named_buffers())
        self.moved: dict[torch.device, Params] = {}  # copies where the model does not lie

    def value(self, place: str, params: Params, h: Tensor) -> Tensor:
        """The tensor that belongs in this place: the given one, or a frozen one if none is given."""
        name = self.places[place]
        return params[name] if name in params or name not in self.frozen else self.frozen[name].to(h.device)

    def around(self, params: Params, h: Inputs) -> Params:
        """The given parameters in all their places, and what lies on another device than the inputs."""
        given = {p: params[name] for p, name in self.places.items() if name in params or name not in self.frozen}
        device = next((part.device for part in trees.leaves(h) if isinstance(part, Tensor)), None)
        if device is None or not self.kept or next(iter(self.kept.values())).device == device:
            return given
        if device not in self.moved:
            self.moved[device] = {place: p.to(device) for place, p in self.kept.items()}
        return self.moved[device] | given


def _arguments(model: nn.Module, h: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple as positional arguments and a dict as keywords; a Sequential takes one argument, whatever it is."""
    if type(model) is not nn.Sequential and isinstance(h, dict):
        return (), h
    return (h if type(model) is not nn.Sequential and isinstance(h, tuple) else (h,)), {}


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
