"""What a finished run keeps: names, predictions, what clients share, and every client's own model."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from lrbpfl import documents, trees
from lrbpfl.data import Scaling
from lrbpfl.disk import write_file
from lrbpfl.engines.loop import Round
from lrbpfl.engines.work import Evaluated, Setup
from lrbpfl.experiments.config import Config, read_name
from lrbpfl.experiments.deal import NewKind
from lrbpfl.experiments.store import Run
from lrbpfl.metrics import Predictions
from lrbpfl.personal.model import shared_name
from lrbpfl.personal.pack import Parts, Told, personal_document, shared_document


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


def save_results(
    run: Run,
    config: Config,
    setup: Setup,
    round: Round,
    per_client: Mapping[int, Mapping[str, float]],
    temperatures: Mapping[int, float],
    alphas: Mapping[int, NewKind],
) -> None:
    """Names, the last round's predictions, what clients share, and every client's own model."""
    _write_names(run.path / "clients.json", (client.name for client in setup.clients))
    if setup.task.class_names is not None:
        _write_names(run.path / "classes.json", setup.task.class_names)
    results = {k: e.result for k, e in round.evaluations.items() if e.result}
    if results:
        write_file(run.path / "predictions.safetensors", save(_stacked(results, alphas)), private=True)
    name, standardise = read_name(config.algorithm_name).name, config.data.standardise
    shared = shared_document(setup, name, round.server, standardise)
    documents.write(run.path / shared_name(shared), shared)
    for k, result in results.items():
        told = Told(
            client=setup.clients[k].name,
            examples=len(setup.clients[k].train.y),
            address=(setup.seed, "predict", round.t, k),
            scores=per_client[k],
            judged=config.federation.evaluate_on,
            predictions=result.predictions,
            temperature=temperatures.get(k, 1.0),
            calibration=result.calibration,
            scaling=Scaling(*scaled) if (scaled := setup.clients[k].scaling) else None,
        )
        own = personal_document(shared, Parts(result.personal, result.shared), message_of(setup, round, k), told)
        documents.write(run.personal_file(k), own)


def _stacked(results: Mapping[int, Evaluated], alphas: Mapping[int, NewKind]) -> dict[str, torch.Tensor]:
    """Everybody's predictions as one table: client, label, mean probabilities, total and aleatoric uncertainty.

    Where there are new clients, a column more: their alpha, NaN for whole sites, and 0 for training clients.
    """

    def rows(field: Callable[[int, Predictions], Any]) -> torch.Tensor:
        return torch.cat([torch.as_tensor(field(k, result.predictions)) for k, result in results.items()])

    table = {
        "client": rows(lambda k, p: torch.full((len(p.y),), k)),
        "y": rows(lambda k, p: p.y),
        "probs": rows(lambda k, p: p.probs).float(),
        "total": rows(lambda k, p: p.total).float(),
        "aleatoric": rows(lambda k, p: p.aleatoric).float(),
    }
    if alphas:
        shown = {k: math.nan if kind == "sites" else kind for k, kind in alphas.items()}
        table["new_alpha"] = rows(lambda k, p: torch.full((len(p.y),), shown.get(k, 0.0), dtype=torch.float64))
    return table


def message_of(setup: Setup, round: Round, k: int) -> dict[str, torch.Tensor]:
    """What the server sends to client k after a round, by name."""
    return dict(trees.named_leaves(setup.algorithm.broadcast(setup.task, round.server, k)))
