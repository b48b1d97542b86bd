"""What a document says: the algorithm, the task and the classes it belongs to, checked while they are read."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lrbpfl import algorithms, documents
from lrbpfl.algorithms.protocol import Algorithm, Task
from lrbpfl.documents import Document
from lrbpfl.errors import BadInput
from lrbpfl.personal import identity
from lrbpfl.personal.checks import check_fields
from lrbpfl.personal.signature import checked, shape_of

Class = int | str  # a label as its owner writes it


def algorithm_of(about: Mapping[str, Any], where: str) -> Algorithm:
    """The algorithm that a description names, with its fields."""
    said = about.get("algorithm")
    said = said if isinstance(said, dict) else {}
    name = said.get("name")
    if not isinstance(name, str) or name not in algorithms.names():
        raise BadInput(f"{where} cannot be used: it names an algorithm that is not here, {str(name)[:40]!r}")
    check_fields(said.get("fields"), where)
    try:
        return algorithms.find(name)(**said["fields"])
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{where} cannot be used: its fields of {name} are not those of this version ({reason})"
        ) from None


def classes_of(about: Mapping[str, Any], where: str) -> tuple[Class, ...]:
    """The labels as their owners write them, in the order of their numbers."""
    found = about.get("classes")
    plain = isinstance(found, list) and found and all(type(name) in (int, str) for name in found)
    if not plain or len(set(map(type, found or []))) > 1 or len(set(found or [])) < len(found or []):
        raise BadInput(f"{where} cannot be used: its description does not name its classes")
    return tuple(found or ())


def features_in(about: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the columns that a model takes in, in their order; None if it was not trained on tables."""
    found = about.get("features")
    return tuple(map(str, found)) if isinstance(found, list) and found else None


def task_of(about: Mapping[str, Any], model: nn.Module | None, where: str) -> Task:
    """The task of a description, as far as a single client needs it."""
    classes, shape = classes_of(about, where), shape_of(checked(about.get("inputs"), where))
    if documents.named(about, "label_prior", (int, float), where) < 0:
        raise BadInput(f"{where} cannot be used: its label prior is negative")
    return Task(
        model=identity.restored(about.get("model"), len(classes), shape, model, where),
        num_classes=len(classes),
        label_prior=float(about["label_prior"]),
        class_names=tuple(map(str, classes)),
    )


def message_of(shared: Document) -> dict[str, Tensor]:
    """The tensors of the message that lies in a shared document, by their names there."""
    return {name.removeprefix("message/"): leaf for name, leaf in shared.tensors.items() if name.startswith("message/")}
