"""Many models side by side: W once, every file tried, and faults told by the name of the file."""

import json
import shutil
from pathlib import Path

import pytest

from lrbpfl import documents
from lrbpfl.errors import BadInput
from lrbpfl.personal.model import load
from lrbpfl.serving.shelf import shelf
from lrbpfl.studies.service import memory

from .conftest import NAMES, Written


@pytest.fixture
def folder(written: Written, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(written("lr-bpfl"), tmp_path / "folder"))


def places(folder: Path) -> list[set[int]]:
    """Where each tensor of W lies: of all models, and of the template."""
    models = list(shelf(folder).models.values())
    template = dict(models[0].task.model.named_parameters())
    assert all(model.task.model is models[0].task.model for model in models)
    return [{m._tree.W[name].data_ptr() for m in models} | {p.data_ptr()} for name, p in template.items()]


def test_W_is_in_memory_once(folder: Path) -> None:
    assert [len(found) for found in places(folder)] == [1] * 6


def test_W_is_in_memory_once_even_if_every_file_holds_it(folder: Path, tmp_path: Path) -> None:
    for name in NAMES:
        load(folder / f"{name}.safetensors").save(tmp_path / "whole" / f"{name}.safetensors", whole=True, half=True)
    assert not list((tmp_path / "whole").glob("W-*"))
    assert [len(found) for found in places(tmp_path / "whole")] == [1] * 6


def test_memory_is_that_of_W_and_the_masks() -> None:
    found = memory(clients=200)
    if not found:
        pytest.skip("no /proc here")
    assert found["resident_over_w_and_masks"] <= 1.2


def test_a_run_is_served_but_for_clients_without_a_model(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for k, name in enumerate(NAMES):
        (run / "clients" / f"{k:05d}").mkdir(parents=True)
        if name != "south":
            shutil.copy(folder / f"{name}.safetensors", run / "clients" / f"{k:05d}" / "personal.safetensors")
    shutil.copy(next(folder.glob("W-*")), run)
    (run / "clients.json").write_text(json.dumps(NAMES))
    found = shelf(run)
    assert list(found.models) == ["north", "east"]
    assert found.missing == ("south",)


def test_two_files_of_one_client_are_refused(folder: Path) -> None:
    shutil.copy(folder / "north.safetensors", folder / "other.safetensors")
    with pytest.raises(BadInput, match=r"north\.safetensors and .*other\.safetensors both belong .* 'north'"):
        shelf(folder)


def test_a_model_that_cannot_predict_is_named(folder: Path) -> None:
    path = folder / "south.safetensors"
    own = documents.read(path, "personal")
    tensors = {**own.tensors, "own/masks/mean": own.tensors["own/masks/mean"][:-1]}
    documents.write(path, own._replace(tensors=tensors))
    with pytest.raises(BadInput, match=r"south\.safetensors cannot be used: its tensors do not fit the model"):
        shelf(folder)


@pytest.mark.parametrize("spoil", ["W is missing", "damaged", "nothing", "no folder", "W alone"])
def test_what_cannot_be_served_is_refused(spoil: str, folder: Path) -> None:
    shared = next(folder.glob("W-*"))
    if spoil == "W is missing":
        shared.unlink()
    elif spoil == "damaged":
        (folder / "east.safetensors").write_bytes(b"0" * 100)
    elif spoil == "no folder":
        shutil.rmtree(folder)
    else:
        for path in folder.iterdir():
            if path != shared or spoil == "nothing":
                path.unlink()
    sentence = {
        "W is missing": r"east\.safetensors belongs to a shared network that is not beside it",
        "damaged": r"east\.safetensors cannot be read",
        "no folder": "there is no directory",
    }.get(spoil, "holds no personal models")
    with pytest.raises(BadInput, match=sentence):
        shelf(folder)
