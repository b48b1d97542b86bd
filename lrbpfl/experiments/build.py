"""From a configuration to everything a run needs: data dealt to clients, task, engine."""

import os
from collections.abc import Iterable

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data, pace
from lrbpfl.data import Dataset, Split, corrupt, load
from lrbpfl.data.partition import Indices
from lrbpfl.engines import registry as engines
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.work import ClientData, Setup, check_setup
from lrbpfl.errors import BadInput
from lrbpfl.experiments import promises
from lrbpfl.experiments.config import OWN, Config, DataSection, FederationSection
from lrbpfl.experiments.deal import Group, deal_groups, shift_group
from lrbpfl.models import MODELS


def build_setup(config: Config, *, progress: bool = False) -> Setup:
    """Load and deal the data, make the model; everything that can be wrong is found out here."""
    if config.federation.model == OWN:
        raise BadInput(
            "this run's data and model came from Python: go on with Federation(...).fit(directory=...) there"
        )
    dataset = load(config.data.dataset, progress=progress)
    training, *new = deal_groups(dataset, config.data, config.federation.seed)
    trainers = len(training.splits)
    if config.federation.cohort > trainers:
        raise BadInput(f"federation.cohort = {config.federation.cohort}: there are only {trainers} clients")
    clients: list[ClientData] = []
    public = None
    for group in (training, *new):
        own = _corrupted(dataset, group, config.federation.seed, progress)
        own = shift_group(own, group, config.data, config.federation.seed)
        clients += _clients(own, group, config.federation.evaluate_on)
        if group is training:
            public = _public(own, group.splits.values(), config.data)
    asked = config.federation
    promises.check_parts(asked.coverage, asked.confidence, config.data.calibration_fraction, clients)
    shape = tuple(dataset.x.shape[1:])
    task = Task(
        model=MODELS[config.federation.model](dataset.num_classes, shape).eval(),
        num_classes=dataset.num_classes,
        label_prior=config.federation.label_prior or 0.0,
        public=public,
        num_clients=trainers,
        class_names=dataset.class_names,
    )
    setup = Setup(
        algorithm=config.algorithm,
        task=task,
        clients=tuple(clients),
        seed=config.federation.seed,
        device=usable_device(config.engine.device),
        paces=_paces(config.federation),
        classes=_labels(dataset),
        features=dataset.feature_names,
    )
    check_setup(setup)
    return setup


def _labels(dataset: Dataset) -> tuple[int | str, ...] | None:
    """The labels as the data have them, unless the data also name them: then a model speaks in these names."""
    named = dataset.class_names is not None and dataset.class_names != tuple(map(str, dataset.classes or ()))
    return None if named else dataset.classes


def _paces(config: FederationSection) -> tuple[float, ...]:
    return tuple(pace(config.schedule, t, config.rounds) for t in range(config.rounds))


def build_engine(config: Config, setup: Setup) -> Engine:
    """The engine the configuration asks for."""
    workers = config.engine.workers or cores()
    make = engines.find(config.engine.kind)
    if make is Processes:
        return Processes(setup, workers, config.engine.start)
    return make(setup, workers)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def alphas_of_new(config: DataSection, training: int) -> dict[int, float]:
    """The alpha of every new client by its id; their ids follow those of the training clients."""
    alphas = np.repeat(config.new_alpha, config.new_clients).tolist()
    return {training + i: alpha for i, alpha in enumerate(alphas)}


def _corrupted(dataset: Dataset, group: Group, seed: int, progress: bool) -> Dataset:
    """The dataset with all images of these clients spoilt, each client's in its own way."""
    if group.corruptions is None:
        return dataset
    x = dataset.x.clone()
    pairs = list(zip(group.splits.values(), group.corruptions, strict=True))
    console = Console(stderr=True)
    for part, corruption in track(pairs, "corrupting images", console=console, transient=True, disable=not progress):
        own = torch.from_numpy(np.sort(np.concatenate(part)))  # in an order that no fraction changes
        x[own] = corrupt(dataset.x[own], corruption, seed)
    return dataset._replace(x=x)


def _clients(dataset: Dataset, group: Group, judged: str) -> list[ClientData]:
    return [
        ClientData(
            name=name,
            train=_take(dataset, part.train),
            test=_take(dataset, part._asdict()[judged]),
            calibration=_take(dataset, part.calibration) if len(part.calibration) else None,
        )
        for name, part in group.splits.items()
    ]


def _public(dataset: Dataset, splits: Iterable[Split], config: DataSection) -> Tensor:
    """The inputs that clients gave to the server, without labels."""
    if not config.public_fraction:
        return dataset.x[:0].clone()  # a view would keep the whole dataset
    chosen = np.concatenate([part.public for part in splits])
    if not len(chosen):
        raise BadInput(f"data.public_fraction = {config.public_fraction} of each client's training examples is none")
    return dataset.x[torch.from_numpy(chosen)]


def _take(dataset: Dataset, indices: Indices) -> Data:
    chosen = torch.from_numpy(indices)
    return Data(x=dataset.x[chosen], y=dataset.y[chosen])


def usable_device(name: str) -> str:
    """The device, if this machine has it."""
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"engine.device = {name!r} cannot be used here: {reason}") from None
    return name
