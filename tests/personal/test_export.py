"""Exported files are opened by other programs here, and asked about inputs that the export did not try."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lrbpfl
from lrbpfl import trees
from lrbpfl.core.descent import Data
from lrbpfl.data import Scaling
from lrbpfl.errors import BadInput
from lrbpfl.metrics import reduce
from lrbpfl.metrics.tempering import temper
from lrbpfl.models import cnn
from lrbpfl.personal import ensemble, export
from lrbpfl.personal.ensemble import OUTPUTS, Frozen
from lrbpfl.personal.export import Exported
from lrbpfl.personal.model import PersonalModel
from tests.personal.small import personal, rows

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


def answers(path: Path, feed: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path)
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feed), strict=True))


def agree(model: PersonalModel, got: dict[str, Any], x: Any) -> None:
    assert list(got) == list(OUTPUTS)
    expected = model.predict(x)
    for name in OUTPUTS:
        np.testing.assert_allclose(np.asarray(got[name]), getattr(expected, name), atol=1e-5, rtol=0)


class Written(NamedTuple):
    """One model in both formats."""

    model: PersonalModel
    onnx: Exported
    pt2: Exported


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    model = personal("lr-bpfl", temperature=1.7, ranks="printed", max_rank=3, mask_steps=2, predict_samples=3)
    return Written(model, export.to_onnx(model, folder / "me.onnx"), export.to_pt2(model, folder / "me.pt2"))


@pytest.mark.parametrize("n", [1, 7])
def test_other_programs_say_what_the_client_says(n: int, written: Written) -> None:
    model, x = written.model, rows(n)
    agree(model, answers(written.onnx.path, {"input": x.numpy()}), x)
    agree(model, torch.export.load(written.pt2.path).module()(x), x)
    for done in (written.onnx, written.pt2):
        assert done.difference is not None and done.difference <= 1e-5


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("local", {"min_steps": 2}),
        ("metavd", {"average": "probabilities", "stochastic": "all"}),
        ("pfedbayes", {"predict_samples": 2, "adapt_steps": 2}),
    ],
)
def test_models_of_other_algorithms_leave_too(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = personal(name, **fields)
    agree(model, answers(export.to_onnx(model, tmp_path / "me.onnx").path, {"input": rows(3).numpy()}), rows(3))


def test_a_file_tells_whose_it_is_and_not_where_it_was_made(written: Written) -> None:
    for done in (written.onnx, written.pt2):
        data = done.path.read_bytes()
        assert str(next(iter(lrbpfl.__path__))).encode() not in data and b"site-packages" not in data
        assert done.path.stat().st_mode & 0o777 == 0o600 and len(data) == done.size
    extra = {"lrbpfl.json": ""}
    torch.export.load(written.pt2.path, extra_files=extra)
    props = {p.key.removeprefix("lrbpfl."): p.value for p in onnx.load(written.onnx.path).metadata_props}
    for about in (props, json.loads(extra["lrbpfl.json"])):
        assert (about["client"], json.loads(about["classes"])) == ("north", ["a", "b", "c", "d"])
        assert about["digest"] == written.model._own.digest and "torch" in json.loads(about["trained_with"])


def test_the_papers_cnn_takes_bytes_and_holds_w_once(tmp_path: Path) -> None:
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    model = personal(
        model=cnn(10), data=Data(images, torch.arange(6)), classes=10, mask_layers="all", mask_steps=1,
        predict_samples=2,
    )  # fmt: skip
    W = trees.nbytes(model._tree.W)
    done = export.to_onnx(model, tmp_path / "me.onnx")
    assert W < done.size < 1.1 * W
    agree(model, answers(done.path, {"input": images.numpy()}), images)


def test_what_would_say_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = personal("fedavg"), ensemble.reduced

    def wrong(samples: Tensor, temperature: float) -> dict[str, Tensor]:
        return {name: part + 2e-5 for name, part in right(samples, temperature).items()}

    def void(samples: Tensor, temperature: float) -> dict[str, Tensor]:
        return {name: part * torch.nan for name, part in right(samples, temperature).items()}

    for other in (wrong, void):
        monkeypatch.setattr(ensemble, "reduced", other)
        with pytest.raises(BadInput, match="differ from the client's by up to"):
            export.to_pt2(model, tmp_path / "me.pt2")
    with pytest.raises(BadInput, match="differ from the client's by up to nan"):
        export.to_onnx(model, tmp_path / "me.onnx")
    assert not list(tmp_path.iterdir())


class Peeking(nn.Module):
    """Looks at its inputs before it decides what to compute: no graph can say that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y if float(x.sum()) > 0 else -y


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'pfedgp' cannot be exported"):
        export.to_onnx(personal("pfedgp", predict_chains=2, sweeps=1), tmp_path / "me.onnx")
    with pytest.raises(BadInput, match="the model cannot be written in a graph"):
        export.to_pt2(personal("fedavg", Peeking()), tmp_path / "me.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_reduction_and_temperature_are_those_of_the_metrics(temperature: float) -> None:
    samples = torch.softmax(30 * torch.randn(3, 50, 4), dim=-1)  # some underflow to 0
    assert (samples == 0).any()
    got = ensemble.reduced(samples, temperature)
    expected = temper(reduce(samples, torch.zeros(50, dtype=torch.int64)), temperature)
    np.testing.assert_allclose(got["probability"], expected.probs, atol=1e-7)
    for name in ("total", "aleatoric", "epistemic"):
        np.testing.assert_allclose(got[name], getattr(expected, name), atol=1e-6)


def test_features_are_scaled_before_the_networks_see_them() -> None:
    model = personal(mask_steps=2)
    plain, x = Frozen(model), rows(5)
    mean, std = torch.linspace(-3, 3, 12), torch.linspace(0.5, 4, 12)
    model.scaling = Scaling(mean, std)
    got, expected = Frozen(model)(mean + std * x), plain(x)
    torch.testing.assert_close(got["probability"], expected["probability"])


class Two(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(3, 4), nn.Linear(12 + 4, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.fc(torch.cat([self.words(ids).mean(1), x], dim=1))
        return y


def test_several_inputs_keep_their_names(tmp_path: Path) -> None:
    x = {"ids": torch.randint(3, (9, 5)), "x": rows(9)}
    model = personal("lr-bpfl", Two(), Data(x, torch.arange(9) % 4), mask_steps=2, predict_samples=2)
    done = export.to_onnx(model, tmp_path / "me.onnx")
    agree(model, answers(done.path, {name: part.numpy() for name, part in x.items()}), x)
    module = torch.export.load(export.to_pt2(model, tmp_path / "me.pt2").path).module()
    agree(model, module(x), x)
