"""What a finished run keeps: names, predictions, what clients share, and every client's own model."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from lrbpfl import documents
from lrbpfl.data import Scaling
from lrbpfl.disk import write_file
from lrbpfl.engines.work import Evaluated, Setup
from lrbpfl.experiments.config import Config, read_name
from lrbpfl.experiments.deal import NewKind
from lrbpfl.experiments.spool import Table
from lrbpfl.experiments.store import Run
from lrbpfl.metrics import Predictions
from lrbpfl.personal.model import shared_name
from lrbpfl.personal.pack import Parts, Told, newcomer_document, personal_document
from lrbpfl.trees import Tree


def read_client_names(path: Path) -> dict[int, str]:
    """The names of a run's clients, by their numbers; none if the run did not write them."""
    return _read_names(path / "clients.json")


def read_class_names(path: Path) -> dict[int, str]:
    """The names of a run's classes, by their numbers; none if the data did not name them."""
    return _read_names(path / "classes.json")


def _read_names(file: Path) -> dict[int, str]:
    return dict(enumerate(json.loads(file.read_text()))) if file.is_file() else {}


def _write_names(file: Path, names: Iterable[str]) -> None:
    write_file(file, (json.dumps(list(names)) + "\n").encode())


class Results:
    """What a finished run keeps, written as clients are judged: names, predictions, what is shared, and models."""

    def __init__(
        self, run: Run, config: Config, setup: Setup, t: int, newcomer: Tree, alphas: Mapping[int, NewKind]
    ) -> None:
        self.run, self.setup, self.t, self.alphas = run, setup, t, alphas
        self.written = 0  # clients
        self.judged, self.names = config.federation.evaluate_on, setup.names
        self.predictions = Table(run.path / "predictions.safetensors", "predictions")
        _write_names(run.path / "clients.json", self.names)
        if setup.task.class_names is not None:
            _write_names(run.path / "classes.json", setup.task.class_names)
        name = read_name(config.algorithm_name).name
        self.shared = newcomer_document(setup, name, newcomer, config.data.standardise)
        documents.write(run.path / shared_name(self.shared), self.shared)

    def add(
        self,
        k: int,
        result: Evaluated,
        message: dict[str, torch.Tensor],
        scores: Mapping[str, float],
        temperature: float,
    ) -> None:
        """One client's predictions and model."""
        told = Told(
            client=self.names[k],
            examples=result.examples,
            address=(self.setup.seed, "predict", self.t, k),
            scores=scores,
            judged=self.judged,
            predictions=result.predictions,
            temperature=temperature,
            calibration=result.calibration,
            scaling=Scaling(*result.scaling) if result.scaling else None,
        )
        own = personal_document(self.shared, Parts(result.personal, result.shared), message, told)
        documents.write(self.run.personal_file(k), own)
        self.written += 1
        self.predictions.add(self._rows(k, result.predictions))

    def finish(self) -> None:
        """All are there; where predictions stay elsewhere, there is no file of them."""
        if self.written:
            self.predictions.finish()
        else:
            self.predictions.drop()

    def _rows(self, k: int, p: Predictions) -> dict[str, torch.Tensor]:
        """Predictions as rows of a table: client, label, mean probabilities, total and aleatoric uncertainty.

        Where there are new clients, a column more: their alpha, NaN for whole sites, and 0 for training clients.
        """
        rows = {
            "client": torch.full((len(p.y),), k),
            "y": torch.from_numpy(p.y),
            "probs": torch.from_numpy(p.probs).float(),
            "total": torch.from_numpy(p.total).float(),
            "aleatoric": torch.from_numpy(p.aleatoric).float(),
        }
        if self.alphas:
            kind = self.alphas.get(k, 0.0)
            shown = math.nan if kind == "sites" else kind
            rows["new_alpha"] = torch.full((len(p.y),), shown, dtype=torch.float64)
        return rows
