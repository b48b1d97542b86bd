"""Any module as a function: which layers take masks, what is refused, and that the module never changes."""

import pytest
import torch
from torch import Tensor, nn

from lrbpfl import trees
from lrbpfl.core.checks import check_model
from lrbpfl.core.network import (
    Layer,
    Weights,
    caller,
    forward,
    init_params,
    inputs,
    maskable,
    parted,
    rows_of_classes,
    unmasked,
)
from lrbpfl.core.objective import masked_network
from lrbpfl.errors import BadInput
from lrbpfl.models import cnn
from lrbpfl.rng import generator
from tests.core.networks import Residual, Tied, Transformer, kind


class Recurrent(nn.Module):
    """Its LSTM keeps a second list of its weights, beside the parameters."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.lstm, self.head = kind(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0].mean(1))
        return logits


class Cross(nn.Module):
    """Attention whose keys and values have other widths than its queries: three projections instead of one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.attention(x, x[..., :3], x[..., :2])[0].mean(1))
        return logits


def test_layers_of_the_cnn() -> None:
    convolutions = {"conv1.weight": Layer(32, 3), "conv2.weight": Layer(64, 32), "conv3.weight": Layer(128, 64)}
    dense = {"fc1.weight": Layer(512, 2048), "fc2.weight": Layer(256, 512), "fc3.weight": Layer(10, 256)}
    assert maskable(cnn(10)) == convolutions | dense
    assert maskable(cnn(10), "conv") == convolutions
    assert maskable(cnn(10), "dense") == maskable(cnn(10), "auto") == dense
    assert maskable(nn.Conv1d(3, 2, 1), "auto") == {"weight": Layer(2, 3)}


def test_layers_of_a_transformer() -> None:
    assert maskable(Transformer()) == {
        "embed.weight": Layer(8, 3),
        "encoder.self_attn.in_proj_weight": Layer(24, 8),
        "encoder.self_attn.out_proj.weight": Layer(8, 8),
        "encoder.linear1.weight": Layer(16, 8),
        "encoder.linear2.weight": Layer(8, 16),
        "head.weight": Layer(5, 8),
    }


def test_groups_are_noticed_shared_weights_take_one_mask_and_computed_ones_none() -> None:
    assert maskable(Residual())["depthwise.weight"] == Layer(8, 8, groups=8)
    assert maskable(Tied()) == {"a.weight": Layer(4, 4)}
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    assert maskable(nn.Sequential(normed, nn.Linear(4, 2))) == {"1.weight": Layer(2, 4)}


def test_recurrent_layers_and_separate_projections_take_masks() -> None:
    lstm = {"ih_l0": Layer(16, 3), "hh_l0": Layer(16, 4), "ih_l0_reverse": Layer(16, 3), "hh_l0_reverse": Layer(16, 4)}
    expected = {f"lstm.weight_{part}": layer for part, layer in lstm.items()} | {"head.weight": Layer(2, 8)}
    assert maskable(Recurrent(), "auto") == expected
    assert maskable(Recurrent(), "conv") == {}
    projections = {"q": Layer(4, 4), "k": Layer(4, 3), "v": Layer(4, 2)}
    assert maskable(Cross()) == {f"attention.{part}_proj_weight": layer for part, layer in projections.items()} | {
        "attention.out_proj.weight": Layer(4, 4),
        "head.weight": Layer(5, 4),
    }
    assert maskable(nn.GRUCell(3, 2)) == {"weight_ih": Layer(6, 3), "weight_hh": Layer(6, 2)}


def test_weights_without_a_mask_are_named() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Bilinear(4, 4, 4), nn.Conv1d(4, 4, 1), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    assert unmasked(model, "all") == ["0.weight", "1.weight"]
    assert unmasked(model) == ["0.weight", "1.weight", "2.weight"]
    assert unmasked(Transformer()) == unmasked(Recurrent()) == []


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Residual(), (2, 3, 6, 6)),
        (Transformer(), (2, 7, 3)),
        (Tied(), (2, 4)),
        (Recurrent(), (2, 5, 3)),
        (Recurrent(nn.GRU), (2, 5, 3)),
        (Cross(), (2, 5, 4)),
    ],
    ids=kind,
)
@pytest.mark.parametrize("frozen", [False, True])
def test_every_layer_feels_its_mask(model: nn.Module, shape: tuple[int, ...], frozen: bool) -> None:
    """Halving one layer's factors Q changes the logits as halving its weight does, on the ways that are fast too."""
    model.requires_grad_(not frozen)
    if frozen:
        list(model.parameters())[-1].requires_grad_(True)
    W, x = init_params(model, generator(0, "W"), "kaiming"), torch.randn(shape, generator=generator(0, "x"))
    own = {name: p.detach() for name, p in model.named_parameters()} | W
    network = masked_network(model, maskable(model), {name: torch.tensor([torch.inf]) for name in maskable(model)})
    places, ones = network.places, torch.ones(1, sum(network.places.sizes))
    plain = network.logits(W, ones, network.before(W, x))
    torch.testing.assert_close(plain[0], forward(model, W, x))
    for at, name in enumerate(places.layers):
        halved = [torch.full((size,), 0.5 if i == 2 * at else 1.0) for i, size in enumerate(places.sizes)]  # its Q
        other = network.logits(W, torch.cat(halved)[None], network.before(W, x))
        assert not torch.allclose(other, plain, atol=1e-4)
        torch.testing.assert_close(other[0], forward(model, W | {name: own[name] / 2}, x))


def with_layer(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), layer)


REFUSED = {
    "batch norm 1d": (nn.BatchNorm1d(4), "BatchNorm1d", "GroupNorm"),
    "stateless batch norm": (nn.BatchNorm2d(4, track_running_stats=False), "BatchNorm2d", "GroupNorm"),
    "synchronised batch norm": (nn.SyncBatchNorm(4), "SyncBatchNorm", "GroupNorm"),
    "instance norm with statistics": (nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d", "GroupNorm"),
    "lazy": (nn.LazyLinear(4), "LazyLinear", "call the model once"),
    "random slopes": (nn.RReLU(), "RReLU", "replace it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_layer_and_the_way_out(case: str) -> None:
    layer, kind, advice = REFUSED[case]
    with pytest.raises(BadInput) as caught:
        check_model(with_layer(layer))
    sentence = str(caught.value)
    assert "layer '1'" in sentence and f"({kind})" in sentence and advice in sentence and "\n" not in sentence


def test_nested_layers_are_named_in_full() -> None:
    model = Transformer()
    model.encoder.register_module("norm1", nn.BatchNorm1d(8))
    with pytest.raises(BadInput, match=r"'encoder\.norm1'.*without_batchnorm"):
        check_model(model)


@pytest.mark.parametrize("model", [nn.Sequential(), nn.ReLU(), nn.Embedding(3, 4), nn.GroupNorm(2, 4)], ids=kind)
def test_a_model_without_a_layer_to_mask_is_refused(model: nn.Module) -> None:
    with pytest.raises(BadInput, match="no Linear or Conv"):
        check_model(model)


@pytest.mark.parametrize(
    "model",
    [
        cnn(10),
        Residual(),
        Transformer(),
        Tied(),
        with_layer(nn.InstanceNorm2d(4)),
        with_layer(nn.Dropout(0.3)),
        with_layer(nn.LSTM(4, 4, num_layers=2)),
    ],
    ids=kind,
)
def test_what_keeps_every_promise_is_accepted(model: nn.Module) -> None:
    check_model(model)


@pytest.mark.parametrize("kind", [Residual, Recurrent])
def test_forward_uses_the_given_parameters(kind: type[nn.Module]) -> None:
    """Those of recurrent layers too."""
    model, other = kind(), kind()
    x = torch.randn((2, 3, 6, 6) if kind is Residual else (2, 5, 3), generator=generator(0, "x"))
    W = {name: torch.randn(p.shape, generator=generator(0, name)) for name, p in model.named_parameters()}
    own = model(x)
    other.load_state_dict(W)
    torch.testing.assert_close(forward(model, W, x), other(x))
    assert not torch.allclose(forward(model, W, x), own) and torch.equal(model(x), own)


def test_forward_follows_shared_weights_and_shared_layers() -> None:
    model, x = Tied(), torch.randn(2, 4, generator=generator(0, "x"))
    W = {name: torch.randn(p.shape, generator=generator(0, name)) for name, p in model.named_parameters()}
    assert list(W) == ["a.weight", "a.bias", "b.bias"]
    weight, a, b = W.values()
    for _ in range(2):
        torch.testing.assert_close(forward(model, W, x), ((x @ weight.T + a) @ weight.T + b) @ weight.T + a)


@pytest.mark.parametrize(("model", "shape"), [(Residual(), (2, 3, 6, 6)), (Tied(), (2, 4))], ids=kind)
def test_forward_leaves_module_and_parameters_alone(model: nn.Module, shape: tuple[int, ...]) -> None:
    before, own = trees.tree_map(torch.clone, dict(model.state_dict())), dict(model.named_parameters())
    W = init_params(model, generator(0, "W"), "kaiming")
    given, copy = dict(W), trees.tree_map(torch.clone, W)
    forward(model, W, torch.randn(shape))
    assert trees.equal(dict(model.state_dict()), before)
    assert all(p is own[name] and p.grad is None for name, p in model.named_parameters())
    assert all(W[name] is given[name] for name in given) and trees.equal(W, copy)


def test_images_are_scaled_and_laid_out_anew_without_another_change() -> None:
    x = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(inputs(x), torch.tensor([-1.0, -0.6, 1.0]))
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    assert torch.equal(inputs(images), images.float() / 127.5 - 1)


def test_other_inputs_stay() -> None:
    for x in (torch.randn(2, 3), torch.randn(2, 3, 4, 4), torch.arange(4), torch.randn(2, dtype=torch.float64)):
        assert trees.equal(inputs(x), x)


def test_fresh_parameters_are_decided_by_the_generator() -> None:
    model = Residual()
    first = init_params(model, generator(0), "kaiming")
    for p in model.parameters():
        nn.init.constant_(p, 7.0)
    again, other = init_params(model, generator(0), "kaiming"), init_params(model, generator(1), "kaiming")
    for name in first:
        drawn = name.removesuffix("weight") in ("stem.", "depthwise.", "head.")
        assert torch.equal(first[name], again[name]) is (drawn or name.endswith(("stem.bias", "head.bias")))
        assert not (drawn and torch.equal(first[name], other[name]))


def test_fresh_weights_are_kaiming_and_biases_zero() -> None:
    model = cnn(10)
    W = init_params(model, generator(0), "kaiming")
    assert W.keys() == dict(model.named_parameters()).keys()
    for name, p in W.items():
        if name.endswith("bias"):
            assert not p.any()
        else:
            fan_in = p[0].numel()
            assert p.var().item() == pytest.approx(2 / fan_in, rel=5 * (2 / p.numel()) ** 0.5)
            assert abs(p.mean()) < 4 * (2 / fan_in / p.numel()) ** 0.5
    grouped = init_params(nn.Conv2d(64, 640, 3, groups=64), generator(0), "kaiming")["weight"]
    assert grouped.var().item() == pytest.approx(2 / 9, rel=0.1)


def test_other_parameters_keep_the_templates_values() -> None:
    model = Residual()
    nn.init.constant_(model.norm.weight, 3.0)
    assert bool((init_params(model, generator(0), "kaiming")["norm.weight"] == 3).all())


@pytest.mark.parametrize("weights", ["kaiming", "uniform", "template"])
def test_frozen_parameters_stay_in_the_model(weights: Weights) -> None:
    """They are not among those that train, and calls use the module's own; a missing one that trains is noticed."""
    model, x = cnn(10), torch.randn(2, 3, 32, 32)
    for name in ("conv1.weight", "conv1.bias", "fc2.weight", "fc3.bias"):
        model.get_parameter(name).requires_grad_(False)
    W = init_params(model, generator(0), weights)
    assert list(W) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert torch.equal(W["fc2.bias"], model.get_parameter("fc2.bias")), "a layer with a frozen weight is not drawn anew"
    loaded = cnn(10)
    loaded.load_state_dict({**dict(model.state_dict()), **W})
    torch.testing.assert_close(forward(model, W, x), loaded(x))
    assert rows_of_classes(model, 10) == ("fc3.weight",)
    with pytest.raises(KeyError):
        forward(model, {name: p for name, p in W.items() if name != "fc1.weight"}, x)


def test_a_frozen_linear_layer_of_a_plain_sequence_is_its_own() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(4, 6)
    model[0].requires_grad_(False)
    W = init_params(model, generator(0), "kaiming")
    assert list(W) == ["2.weight", "2.bias"]
    torch.testing.assert_close(forward(model, W, x), torch.relu(model[0](x)) @ W["2.weight"].T)
    with pytest.raises(KeyError):
        forward(model, {"2.bias": W["2.bias"]}, x)


def test_of_several_inputs_only_images_are_scaled() -> None:
    mask, image = torch.ones(2, 5, dtype=torch.uint8), torch.full((2, 1, 3, 3), 255, dtype=torch.uint8)
    seen = inputs((mask, image))
    assert torch.equal(seen[0], mask) and torch.equal(seen[1], torch.ones(2, 1, 3, 3))


class First(nn.Module):
    """The outputs of a recurrent layer without its state."""

    def forward(self, found: tuple[Tensor, ...]) -> Tensor:
        return found[0][:, -1, :, None]


def test_what_passes_between_the_layers_of_a_sequence_may_be_anything() -> None:
    """Here a tuple whose parts have other rows than examples, where masks begin after it."""
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True), First(), nn.Conv1d(4, 2, 1), nn.Flatten())
    W, x = init_params(model, generator(0), "uniform"), torch.randn(5, 6, 3)
    network = masked_network(model, maskable(model, "conv"), {"2.weight": torch.tensor([torch.inf])})
    found = network.logits(W, torch.ones(1, sum(network.places.sizes)), network.before(W, x))
    torch.testing.assert_close(found[0], forward(model, W, x))


def test_pretrained_parameters_are_the_templates() -> None:
    model = cnn(10)
    own = dict(model.named_parameters())
    W = init_params(model, generator(0), "template")
    assert trees.equal(W, own)
    assert all(not p.requires_grad and p.data_ptr() != own[name].data_ptr() for name, p in W.items())


def test_uniform_weights_and_biases_have_torchs_bounds() -> None:
    model = cnn(10)
    W = init_params(model, generator(0), "uniform")
    for name, p in model.named_parameters():
        bound = W[name.removesuffix("bias").removesuffix("weight") + "weight"][0].numel() ** -0.5
        assert W[name].abs().max().item() <= bound
        assert W[name].var().item() == pytest.approx(bound**2 / 3, rel=0.5)
        assert p.abs().max().item() <= bound + 1e-6  # torch's own draw obeys the same bound
        assert not torch.equal(W[name], p)


class Own(nn.Sequential):
    """A sequence that computes something else than its layers in turn, and is built in a way of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv1d(1, width, 1), nn.Flatten(), nn.Linear(4 * width, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[2](self[1](self[0](x)).square())
        return out


def test_a_plain_sequence_is_parted_before_the_first_layer_asked_for() -> None:
    inner = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    plain, x = nn.Sequential(nn.Conv1d(1, 3, 1), nn.Tanh(), inner, nn.Linear(5, 2)), torch.randn(5, 1, 4)
    for name, first in {"3.bias": 3, "2.1.weight": 2, "0.weight": 0}.items():
        before, after = parted(plain, [name, "3.weight"])
        assert [*before.children(), *after.children()] == list(plain) and len(list(before.children())) == first
        torch.testing.assert_close(after(before(x)), plain(x))
        names = [*dict(before.named_parameters()), *dict(after.named_parameters())]
        assert names == list(dict(plain.named_parameters()))


def shared() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Linear(4, 4), layer)


@pytest.mark.parametrize(("model", "name"), [(Own(3), "2.weight"), (Residual(), "head.weight"), (shared(), "1.weight")])
def test_other_models_and_sequences_that_share_a_parameter_are_not(model: nn.Module, name: str) -> None:
    before, after = parted(model, [name])
    assert after is model and not list(before.children())


def test_layer_by_layer_is_the_same_as_all_at_once() -> None:
    """A plain Sequential, one with a shared layer, one without a bias: the same bits as torch's own substitution."""
    shared = nn.Linear(6, 6)
    for model in (
        nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
        nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 3, bias=False)),
    ):
        params = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        x = torch.randn(4, 6)
        assert torch.equal(caller(model)(params, x), torch.func.functional_call(model, params, (x,)))


def test_hooks_are_heard() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    heard: list[int] = []
    call = caller(model)
    handle = model[0].register_forward_hook(lambda module, args, out: heard.append(len(out)))
    call(dict(model.named_parameters()), torch.zeros(4, 6))
    handle.remove()
    call(dict(model.named_parameters()), torch.zeros(4, 6))
    assert heard == [4]
