"""A client's model as a directory that MLflow can load and serve; inside lies its own file, and no pickle."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lrbpfl import trees
from lrbpfl.disk import PRIVATE_FILE, PRIVATE_FOLDER
from lrbpfl.errors import BadInput
from lrbpfl.personal.ensemble import OUTPUTS
from lrbpfl.personal.export import Answer, Exported, difference, told
from lrbpfl.personal.model import PersonalModel

LOADER = "lrbpfl.personal.mlflow_loader"
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_UV_AUTO_DETECT": "false",  # or files of the project one happens to stand in are copied
}


def to_mlflow(personal: PersonalModel, folder: str | Path, *, model: str | None = None) -> Exported:
    """Write an MLflow model (flavour python_function) for its owner's eyes alone; the folder must not exist yet.

    A network of one's own is named by what makes it, `package.module:callable`.
    """
    folder = Path(folder)
    _check(personal, folder, model)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))  # for its owner alone
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}") from None
    try:
        file = personal.save(aside / "personal.safetensors", whole=True)
        with _settings():
            _save(personal, aside / "model", file, model)
            found = difference(personal, _loaded(aside / "model"))
        size = _make_private(aside / "model")
        (aside / "model").rename(folder)
    finally:
        shutil.rmtree(aside)
    return Exported(folder, size, found)


def _check(personal: PersonalModel, folder: Path, model: str | None) -> None:
    missing = [name for name in ("mlflow", "pandas") if not find_spec(name)]
    if missing:
        raise BadInput(f"an MLflow model needs {' and '.join(missing)}: pip install 'lrbpfl[export]'")
    if folder.exists():
        raise BadInput(f"{folder} exists already: name a directory that does not")
    if model is None and personal.about["model"].get("name") is None:
        raise BadInput(
            "the client's model is a network of your own, and whoever loads it must be able to make it: "
            "name what makes it, as in --model package.module:callable"
        )


def _save(personal: PersonalModel, folder: Path, file: Path, model: str | None) -> None:
    """Let MLflow write its own description around our file."""
    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    label = DataType.string if isinstance(personal.classes[0], str) else DataType.long
    numbers = [*(f"probability_{name}" for name in personal.classes), "total", "aleatoric", "epistemic"]
    columns = [ColSpec(label, "label"), *(ColSpec(DataType.double, name) for name in numbers)]
    torch_version = version("torch").partition("+")[0]
    pyfunc.save_model(
        str(folder),
        loader_module=LOADER,
        data_path=str(file),
        pip_requirements=[f"lrbpfl=={version('lrbpfl')}", f"torch=={torch_version}", "pandas"],
        # Inputs are checked by the model itself: MLflow would refuse 64-bit numbers where 32 are meant.
        signature=ModelSignature(outputs=Schema(columns)),
        metadata={**told(personal), "inputs": personal.inputs},
        model_config={"model": model} if model else None,
    )


def _loaded(folder: Path) -> Answer:
    """The model as MLflow loads it."""
    from mlflow import pyfunc

    loaded = pyfunc.load_model(str(folder))

    def answer(x: Any) -> dict[str, Any]:
        names = {f"input_{i}": part for i, part in enumerate(x)} if isinstance(x, tuple) else x
        table = loaded.predict(trees.tree_map(lambda leaf: leaf.numpy(), names))
        probability = table.filter(regex="^probability_").to_numpy()
        return {"probability": probability, **{name: table[name].to_numpy() for name in OUTPUTS[1:]}}

    return answer


def _make_private(folder: Path) -> int:
    """Close the folder to others, and count its bytes."""
    folder.chmod(PRIVATE_FOLDER)
    size = 0
    for path in folder.rglob("*"):
        path.chmod(PRIVATE_FOLDER if path.is_dir() else PRIVATE_FILE)
        size += path.stat().st_size if path.is_file() else 0
    return size


@contextmanager
def _settings() -> Iterator[None]:
    """MLflow without telemetry and chatter; settings that somebody made stay."""
    fresh = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in fresh:
            del os.environ[name]
