"""Cards say what files say, and no more."""

import json
from pathlib import Path
from typing import Any

import pytest

from lrbpfl import documents, trees
from lrbpfl.documents import Document
from lrbpfl.errors import BadInput
from lrbpfl.personal.card import card
from lrbpfl.personal.card_page import markdown
from tests.personal.small import personal

yaml = pytest.importorskip("yaml")


def front(text: str) -> dict[str, object]:
    """The front matter as Hugging Face reads it."""
    _, matter, _ = text.split("---\n", 2)
    found: dict[str, object] = yaml.safe_load(matter)
    return found


def test_a_card_counts_and_judges_as_the_model_does(tmp_path: Path) -> None:
    model = personal(mask_steps=2, max_rank=3, temperature=1.5)
    found = card(model.save(tmp_path / "me.safetensors"))
    scores = found["scores"]
    assert found["evaluated"] == {"on": "test", "examples": 30}
    assert scores["ece_low"] <= scores["ece"] <= scores["ece_high"] and scores["ece_floor"] > 0
    assert found["ranks"] == {"fc1": {"rank": 3, "of": 3}, "fc2": {"rank": 3, "of": 3}}
    assert found["shared"]["numbers"] == trees.count(model._tree.W) == 12 * 8 + 8 + 8 * 4 + 4
    assert found["own"]["numbers"] == 2 * 3 * (12 + 8 + 8 + 4) + 2 * 3 + 4  # means and rhos, gates, prior
    assert found["own"]["file_bytes"] == (tmp_path / "me.safetensors").stat().st_size
    text = markdown(found)
    assert len(text.splitlines()) <= 80 and f"| accuracy | {scores['accuracy']:.4f} |" in text
    assert "temperature: 1.5" in text and "fc1 3 of 3" in text
    index = front(text)["model-index"]
    assert isinstance(index, list) and index[0]["results"][0]["metrics"][0]["value"] == scores["accuracy"]


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("lr-bpfl", {"mask_steps": 2}, "- A mask that was fitted to the client's own examples."),
        ("pfedgp", {"predict_chains": 2, "sweeps": 1}, "- An embedding and the label of every training example"),
    ],
)
def test_a_card_tells_what_is_private(name: str, fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    text = markdown(card(personal(name, None, **fields).save(tmp_path / "me.safetensors")))
    assert sentence in text
    assert ("How frequent each class is" in text) == (name == "lr-bpfl")


def test_what_is_missing_is_said_to_be_missing(tmp_path: Path) -> None:
    model = personal("fedavg", judged=False)
    found = card(model.save(tmp_path / "me.safetensors", whole=True))
    text = markdown(found)
    assert found["scores"] is found["evaluated"] is found["shared"] is None
    assert "Not evaluated" in text and "accuracy" not in text
    assert set(front(text)) == {"library_name", "tags"}
    json.dumps(found, allow_nan=False)
    own = documents.read(tmp_path / "me.safetensors", "personal")
    silent = {key: value for key, value in own.about.items() if key not in ("holds", "examples", "versions")}
    documents.write(tmp_path / "old.safetensors", Document(silent, own.tensors))
    text = markdown(card(tmp_path / "old.safetensors"))
    assert "trained on: not said" in text and "made with: not said" in text and "as private as" in text


def test_sets_are_shown_where_a_file_has_them(tmp_path: Path) -> None:
    model = personal("fedavg")
    model.about["scores"] |= {"coverage": 0.912, "set_size": 1.5}
    text = markdown(card(model.save(tmp_path / "me.safetensors")))
    assert "| prediction sets that hold the label | 91.2% |" in text and "| 1.50 |" in text


def test_no_name_breaks_out_of_its_line(tmp_path: Path) -> None:
    model = personal("fedavg")
    nasty = 'a"b\n---\nlibrary_name: other\n# head | `x` <b>\u2028\x85\x00 \U0001f600'
    model.about["client"] = nasty
    model.about["classes"][0] = nasty
    text = markdown(card(model.save(tmp_path / "me.safetensors", whole=True)))
    assert front(text)["library_name"] == "lrbpfl"
    assert text.count("\n# ") == 1 and "<b>" not in text.split("---\n", 2)[2].replace("\\<b\\>", "")


def test_a_description_that_nobody_would_write_is_refused(tmp_path: Path) -> None:
    own = documents.read(personal("fedavg").save(tmp_path / "me.safetensors", whole=True), "personal")
    for key, value in {"versions": "no", "address": [], "inputs": {"shape": 5}, "algorithm": 3}.items():
        documents.write(tmp_path / "odd.safetensors", Document({**own.about, key: value}, own.tensors))
        with pytest.raises(BadInput, match="cannot be used"):
            card(tmp_path / "odd.safetensors")
