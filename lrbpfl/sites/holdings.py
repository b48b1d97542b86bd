"""What a site brings along, none of which ever leaves it: its settings, its data, and what it allows."""

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, ValidationError

from lrbpfl.data import Dataset
from lrbpfl.data.sources import read_place
from lrbpfl.disk import usable
from lrbpfl.engines.lazy import Roster
from lrbpfl.engines.work import ClientData, Setup
from lrbpfl.errors import BadInput
from lrbpfl.experiments import config as configuration
from lrbpfl.experiments.build import checked_setup, client_of
from lrbpfl.experiments.provenance import digest
from lrbpfl.experiments.sections import Section
from lrbpfl.sites.job import DTYPES, Job
from lrbpfl.sites.letters import Refused, is_name

SETTINGS = "site.toml"


class SiteSection(Section):
    """A site's settings."""

    data: str  # where its data lie: a .csv, .parquet or .npz file, or a folder of such or of images; from this file
    client_column: str | None = None  # of a table: whose an example is; None: `client`, or all are one client's
    label_column: str | None = None  # of a table: the label; None: `label`
    store: str = "store"  # where what its clients keep and its models go; relative to this file
    # Clients are known to the hub by the names that the data have, or by the site's name and a number.
    names: Literal["own", "numbers"] = "own"
    info: bool = True  # what an algorithm tells of a client's training (its loss, its rank, ...) may leave
    scores: bool = True  # of a client's evaluation, its scores and the bins of its reliability diagram may leave
    workers: Annotated[int, Field(ge=1, le=1024)] = 1  # processes that train
    steps: Annotated[int, Field(ge=1)] | None = None  # at most, of every kind that an algorithm counts; None: any
    seconds: Annotated[float, Field(gt=0)] = 600.0  # that a worker may take over a client before it is ended
    memory: Annotated[float, Field(gt=0)] | None = None  # GiB that a worker may take; None: any


class Holding(NamedTuple):
    """What a site has at hand for a job."""

    settings: SiteSection
    dataset: Dataset  # its classes are the job's
    rows: dict[str, np.ndarray[Any, np.dtype[np.int64]]]  # of each client, by the name the hub knows


def settings_of(root: Path) -> tuple[SiteSection, Path]:
    """The settings of a site, and the folder that their paths start from."""
    path = Path(os.environ.get("LRBPFL_SITE") or root / SETTINGS)
    try:
        return SiteSection(**configuration.read(path)), path.parent
    except ValidationError as error:
        raise configuration.explain(SETTINGS, error, SiteSection.model_fields) from None


def check_steps(job: Job, settings: SiteSection) -> None:
    """Refuse more steps of training than the site allows."""
    if settings.steps is None:
        return
    fields = dataclasses.asdict(job.config.algorithm)
    asked = {name: value for name, value in fields.items() if name.endswith(("steps", "epochs")) and type(value) is int}
    if any(value > settings.steps for value in asked.values()):
        raise Refused("steps")


def hold(name: str, job: Job, settings: SiteSection, folder: Path) -> Holding:
    """Load the site's data, with labels numbered as the job says."""
    about, path = job.about, usable(folder / settings.data)
    integers: Literal["numbers", "tokens"] = "tokens" if about.kind == "tokens" else "numbers"
    dataset = read_place(path, name, client=settings.client_column, label=settings.label_column, integers=integers)
    owner, names = dataset.owner, dataset.client_names
    assert owner is not None and names is not None  # what was read from a place has them
    if about.features and dataset.feature_names:
        dataset = _in_order(dataset, dataset.feature_names, about.features)
    if tuple(dataset.x.shape[1:]) != job.shape or dataset.x.dtype != DTYPES[about.kind]:
        raise Refused("columns")
    own = [client if settings.names == "own" else f"{name}-{i}" for i, client in enumerate(names)]
    if not all(map(is_name, own)):
        raise BadInput("a client's name is too long or cannot be printed")
    rows = {client: np.flatnonzero(owner == i) for i, client in enumerate(own)}
    return Holding(settings=settings, dataset=_renumbered(dataset, about.classes), rows=rows)


def _in_order(dataset: Dataset, own: tuple[str, ...], wanted: tuple[str, ...]) -> Dataset:
    """The dataset with its columns in the job's order; whatever else the table has stays out."""
    if not set(own) >= set(wanted):
        raise Refused("columns")
    return dataset._replace(x=dataset.x[:, [own.index(feature) for feature in wanted]], feature_names=wanted)


def setup_of(job: Job, holding: Holding, ids: Mapping[str, int], total: int) -> Setup:
    """The setup of this site's clients, who are some of the federation's."""
    data, federation = job.config.data, job.config.federation
    held = {k: client_of(_part(holding, name), name, k, data, federation) for name, k in ids.items()}
    names = [f"client {k}" for k in range(total)]  # of other sites
    for name, k in ids.items():
        names[k] = name
    largest = max(held, key=lambda k: len(held[k].train.y))
    clients = Roster(names, partial(_own, held), largest=largest, sample=largest, cached=0)
    form = job.examples(1)
    public = form.x if job.about.public else form.x[:0]  # those at the hub are not known here
    return checked_setup(job.config, form, clients, public, total, digest(holding.dataset))


def _own(held: Mapping[int, ClientData], k: int) -> ClientData:
    if k not in held:
        raise BadInput(f"client {k} is at another site")
    return held[k]


def _part(holding: Holding, name: str) -> Dataset:
    """The examples of one client alone."""
    rows = holding.rows[name]
    dataset, chosen = holding.dataset, torch.from_numpy(rows)
    return dataset._replace(
        x=dataset.x[chosen],
        y=dataset.y[chosen],
        owner=np.zeros(len(rows), dtype=np.int64),
        client_names=(name,),
        trains=None if dataset.trains is None else dataset.trains[rows],
    )


def _renumbered(dataset: Dataset, classes: tuple[int | str, ...]) -> Dataset:
    """The dataset with the job's classes."""
    own = dataset.classes or dataset.class_names or tuple(range(dataset.num_classes))
    places = {str(label): i for i, label in enumerate(classes)}
    numbers = [places.get(str(label), -1) for label in own]
    y = torch.tensor(numbers, dtype=torch.int64)[dataset.y]
    if len(y) and int(y.min()) < 0:
        raise Refused("classes")
    return dataset._replace(y=y, num_classes=len(classes), classes=classes, class_names=tuple(map(str, classes)))
