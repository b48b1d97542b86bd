"""The commands about one client's own model: export, card."""

import json
import sys
from pathlib import Path

from torch import nn

from lrbpfl.disk import usable
from lrbpfl.errors import BadInput, plain
from lrbpfl.personal import card as describing
from lrbpfl.personal import export as exporting
from lrbpfl.personal.card_page import markdown
from lrbpfl.personal.export import Exported
from lrbpfl.personal.factory import model_from
from lrbpfl.personal.mlflow_model import to_mlflow
from lrbpfl.personal.model import PersonalModel, load

TARGETS = {".onnx": exporting.to_onnx, ".pt2": exporting.to_pt2}


def export(path: Path, to: str, client: str | None, model: str | None) -> None:
    """One client's model in a format of other programs."""
    kind, _, folder = to.partition(":")
    if kind != "mlflow" and Path(to).suffix not in TARGETS:
        raise BadInput(f"--to {plain(to, 80)}: name a file that ends in .onnx or .pt2, or mlflow:DIRECTORY")
    if kind == "mlflow" and not folder:
        raise BadInput(f"--to {plain(to, 80)}: name a directory after the colon")
    usable(folder if kind == "mlflow" else to)
    personal = load(path, client=client, model=network_of(model))
    done = to_mlflow(personal, folder, model=model) if kind == "mlflow" else TARGETS[Path(to).suffix](personal, to)
    _tell(personal, done)
    if kind == "mlflow" and model:
        print(f"whoever loads it must be able to import {model.partition(':')[0]}, which is not inside")


def network_of(name: str | None) -> nn.Module | None:
    """A network of somebody's own, from a module that may lie where they stand."""
    if name is None:
        return None
    sys.path.insert(0, str(Path.cwd()))
    try:
        return model_from(name)
    finally:
        sys.path.remove(str(Path.cwd()))


def _tell(personal: PersonalModel, done: Exported) -> None:
    print(f"{done.path}: the model of {personal.client!r}, {done.size / 1e6:.2f} MB, for its owner's eyes alone")
    if done.difference is None:
        print("not compared with the client's own predictions: pip install onnxruntime")
    else:
        rows = " and ".join(map(str, exporting.BATCHES))
        print(f"random inputs, {rows} rows: at most {done.difference:.1e} from the client's own predictions")


def card(path: Path, client: str | None, *, as_json: bool) -> None:
    """What one client's file says of its model."""
    found = describing.card(path, client)
    print(json.dumps(found, indent=2) if as_json else markdown(found), end="\n" if as_json else "")
