"""A new client joins: it fits what is its own to what the federation shares. Nothing is sent.

Somebody new gets the message of the last round, as everybody did, and makes its own model from it with its own data, by
the algorithm's `personalise`: with LR-BPFL a mask. A part of the data judges the model, and makes its sets.
"""

from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from lrbpfl import documents, trees
from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.core.descent import Data
from lrbpfl.core.inputs import length, take
from lrbpfl.data.labels import Label, as_labels
from lrbpfl.data.scaling import Scaling, fit
from lrbpfl.data.splits import split
from lrbpfl.data.table_files import frame_table, is_frame
from lrbpfl.data.tables import features_of
from lrbpfl.disk import usable
from lrbpfl.documents import Document
from lrbpfl.engines.work import dropout_seeded, one_thread, own_part
from lrbpfl.errors import BadInput
from lrbpfl.metrics import scores
from lrbpfl.personal.checks import check_numbers, scaling_of
from lrbpfl.personal.description import algorithm_of, classes_of, features_in, message_of, task_of
from lrbpfl.personal.model import PersonalModel
from lrbpfl.personal.pack import Parts, Told, personal_document
from lrbpfl.personal.signature import as_inputs, checked
from lrbpfl.rng import generator, numpy_generator

HOLD_OUT = 0.2  # of a new client's examples: they judge its model, and make its sets
FEWEST = 10  # examples of which a part can be held out and say anything


def find_shared(path: str | Path) -> Path:
    """The file with what clients share: itself, or the one in the directory of a finished run."""
    path = usable(path)
    if path.is_file():
        return path
    found = sorted(path.glob("W-*.safetensors"))
    if len(found) != 1:
        what = "no W-....safetensors: it is no finished run" if not found else f"{len(found)} files W-....safetensors"
        raise BadInput(f"{path} holds {what}" + (": name one of them" if found else ""))
    return found[0]


def onboard(path: str | Path, x: Any, y: Any, **how: Any) -> PersonalModel:
    """The model of a new client, from a finished run or its shared file; for `how` see `newcomer`."""
    file = find_shared(path)
    return newcomer(documents.read(file, "shared"), x, y, where=str(file), **how)


def newcomer(
    shared: Document,
    x: Any,
    y: Any,
    *,
    where: str,
    model: nn.Module | None = None,
    name: str = "new",
    hold_out: float | None = None,
    seed: int = 0,
) -> PersonalModel:
    """The model of a new client with inputs x (n, ...) and labels y (n,), made from what the federation shares.

    `hold_out` of its examples, a fifth if there are ten or more, are not trained on: they judge the model and make its
    sets. A model of your own has to be given.
    """
    check_numbers(shared, where)
    algorithm, task = algorithm_of(shared.about, where), task_of(shared.about, model, where)
    data = _data(shared.about, x, y, classes_of(shared.about, where), where)
    train, held = _parts(data, _share(hold_out, len(data.y)), numpy_generator(seed, "hold out", name))
    scaling = _scaling(shared, train.x, where)
    if scaling is not None:
        train = train._replace(x=scaling.apply(train.x))
    parts, message = _made(algorithm, task, shared, train, seed, name, where)
    told = Told(client=name, examples=len(train.y), address=(seed, "predict", name), scaling=scaling)
    made = PersonalModel(personal_document(shared, parts, message, told), shared, task.model, where)
    if held is None:
        return made
    judged = made.predictions(held.x)._replace(y=held.y.numpy())
    told = told._replace(judged="held-out", predictions=judged, scores=scores(judged, seed=seed), calibration=judged)
    return PersonalModel(personal_document(shared, parts, message, told), shared, task.model, where)


def _made(
    algorithm: Algorithm, task: Task, shared: Document, train: Data, seed: int, name: str, where: str
) -> tuple[Parts, dict[str, Tensor]]:
    """The new client's own part, and the message it is made from."""
    try:
        message = trees.typed(get_type_hints(type(algorithm).personalise)["message"], message_of(shared))
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"{where} cannot be used: it holds no message of {type(algorithm).__name__} ({error})") from None
    state = algorithm.init_client(task, generator(seed, "client", name))
    try:
        with one_thread(), dropout_seeded(seed, "personalise", name):
            personal = algorithm.personalise(task, message, state, train, generator(seed, "personalise", name))
    except BadInput:
        raise
    except Exception as error:  # a file may hold anything, and this is where it meets the model
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise BadInput(f"the new client's model cannot be made from {where} and these inputs ({reason})") from error
    return Parts(*own_part(personal, message)), dict(trees.named_leaves(message))


def _share(asked: float | None, n: int) -> float:
    if asked is not None and not 0 <= asked < 1:
        raise BadInput(f"hold_out is {asked}, and must be at least 0 and below 1")
    return (HOLD_OUT if n >= FEWEST else 0.0) if asked is None else asked


def _data(about: dict[str, Any], x: Any, y: Any, classes: tuple[Label, ...], where: str) -> Data:
    names = features_in(about)
    if names and is_frame(x):
        x = features_of(frame_table(x, "the table"), names, set())
    inputs = as_inputs(x, checked(about.get("inputs"), where))
    labels = as_labels(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, "the new client")
    if length(inputs) != len(labels) or not len(labels):
        raise BadInput(
            f"the new client has {length(inputs)} inputs and {len(labels)} labels: give as many, at least one"
        )
    place: dict[Label, int] = {value: number for number, value in enumerate(classes)}
    if labels.dtype.kind != "U" and isinstance(classes[0], str):  # numbers of classes that have names
        place = {number: number for number in range(len(classes))}
    wrong = [row for row, value in enumerate(labels.tolist()) if value not in place]
    if wrong:
        known = ", ".join(map(str, classes[:20])) + (", ..." if len(classes) > 20 else "")
        found = f"row {wrong[0]} has the label {labels[wrong[0]].item()!r}"
        raise BadInput(f"{found}, which the federation does not know; its classes: {known}")
    return Data(inputs, torch.tensor([place[value] for value in labels.tolist()], dtype=torch.int64))


def _parts(data: Data, share: float, rng: np.random.Generator) -> tuple[Data, Data | None]:
    """What the model is made from, and what judges it (nothing without a share)."""
    if not share:
        return data, None
    if len(data.y) < 2:
        raise BadInput("a new client with one example can hold nothing out: set hold_out to 0")
    found = split(np.arange(len(data.y)), train_fraction=1 - share, labels=data.y.numpy(), rng=rng)
    train, held = (torch.from_numpy(np.sort(part)) for part in (found.train, found.test))
    return Data(take(data.x, train), data.y[train]), Data(take(data.x, held), data.y[held])


def _scaling(shared: Document, x: Any, where: str) -> Scaling | None:
    """Of a new client's features: its own, or the federation's, as everybody had it."""
    how, common = shared.about.get("standardise", "no"), scaling_of(shared, where)
    if how not in ("no", "client", "pooled") or (how == "pooled") != (common is not None):
        raise BadInput(f"{where} cannot be used: it does not say on which scale clients trained")
    return fit(x) if how == "client" else common
