"""`export` and `card`, as a user meets them."""

import json
from pathlib import Path

import pytest

from lrbpfl.models import mlp
from tests.cli.conftest import Lrbpfl
from tests.personal.small import personal


def test_a_file_is_exported_and_the_difference_told(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    personal("fedavg", mlp(4, (12,))).save(tmp_path / "me.safetensors")
    outcome = lrbpfl("export", "me.safetensors", "--to", "me.pt2")
    assert outcome.code == 0 and outcome.out.startswith("me.pt2: the model of 'north', 0.0")
    assert "random inputs, 1 and 5 rows: at most" in outcome.out and (tmp_path / "me.pt2").is_file()


def test_a_network_of_ones_own_may_lie_where_one_stands(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    personal("fedavg").save(tmp_path / "me.safetensors")
    (tmp_path / "my_networks.py").write_text("from tests.personal.small import network as make\n")
    refused = lrbpfl("export", "me.safetensors", "--to", "me.pt2")
    assert refused.code == 2 and "--model package.module:callable" in refused.err
    assert lrbpfl("export", "me.safetensors", "--to", "me.pt2", "--model", "my_networks:make").code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("me.safetensors", "--to", "me.bin"), "--to me.bin: name a file that ends in .onnx or .pt2, or mlflow:"),
        (("me.safetensors", "--to", "mlflow:"), "--to mlflow:: name a directory"),
        (("me.safetensors", "--to", "me.onnx"), "there is no file me.safetensors"),
        ((".", "--to", "me.onnx", "--client", "north"), ". holds no clients.json"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], sentence: str, lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    outcome = lrbpfl("export", *arguments)
    assert outcome.code == 2 and outcome.err.startswith(f"lrbpfl: {sentence}") and outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_card_needs_no_network(lrbpfl: Lrbpfl, tmp_path: Path) -> None:
    personal("fedavg").save(tmp_path / "me.safetensors")
    page, values = lrbpfl("card", "me.safetensors"), lrbpfl("card", "me.safetensors", "--json")
    assert page.code == values.code == 0 and page.out.startswith("---\nlibrary_name: lrbpfl\n")
    assert json.loads(values.out)["client"] == "north"
