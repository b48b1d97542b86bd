"""What MLflow loads: a client's model from its own file, with answers as a table."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lrbpfl.errors import BadInput
from lrbpfl.personal.factory import model_from
from lrbpfl.personal.model import PersonalModel, load


class Served:
    """A client's model as MLflow calls it."""

    def __init__(self, personal: PersonalModel) -> None:
        self.personal = personal

    def predict(self, model_input: Any, params: Any = None) -> pd.DataFrame:
        """A row for each input: label, the probability of every class, and uncertainties in nats.

        Inputs are a table (a column for each number of an input), an array, or several of these by their names.
        """
        named = getattr(self.personal, "features", None) and isinstance(model_input, pd.DataFrame)
        found = self.personal.predict(model_input if named else _inputs(model_input, self.personal.inputs))
        columns: dict[str, Any] = {"label": found.label}
        columns |= {f"probability_{name}": found.probability[:, c] for c, name in enumerate(found.classes)}
        columns |= {name: getattr(found, name) for name in ("total", "aleatoric", "epistemic")}
        return pd.DataFrame(columns)


def _load_pyfunc(data_path: str, model_config: dict[str, Any] | None = None) -> Served:
    """The model in this file; one of somebody's own is made by what the configuration names as `model`."""
    name = (model_config or {}).get("model")
    return Served(load(Path(data_path), model=model_from(name) if name else None))


def _inputs(given: Any, described: Any) -> Any:
    """What MLflow passes on, as `PersonalModel.predict` takes it."""
    if "several" in described:
        names = [f"input_{i}" for i in range(len(described["several"]))]
        parts = _by_name(given, dict(zip(names, described["several"], strict=True)))
        return tuple(parts[name] for name in names)
    if "named" in described:
        return _by_name(given, described["named"])
    return _array(given, described)


def _by_name(given: Any, described: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, dict | pd.DataFrame) or set(given) != set(described):
        raise BadInput(f"the inputs must be named {', '.join(described)}")
    return {name: _array(given[name], part) for name, part in described.items()}


def _array(given: Any, described: Any) -> Any:
    """An array; the numbers of a table's row, or of a list in a table's cell, in the shape of one input."""
    shape = tuple(described["shape"])
    if isinstance(given, pd.Series):
        given = np.array(given.tolist())
    found = given.to_numpy() if isinstance(given, pd.DataFrame) else np.asarray(given)
    flat = found.ndim == 2 and found.shape[1] == prod(shape) and len(shape) != 1
    return found.reshape(len(found), *shape) if flat else found
