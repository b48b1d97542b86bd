"""From a configuration to everything a run needs: data dealt to clients, task, engine."""

import os
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data
from lrbpfl.data import Dataset, Split, by_labels, by_size, dirichlet, load, natural, split
from lrbpfl.data.partition import Indices
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Federation, check_federation
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import Config, DataSection
from lrbpfl.models import MODELS
from lrbpfl.rng import numpy_generator


def build_federation(config: Config, *, progress: bool = False) -> Federation:
    """Load and deal the data, make the model; everything that can be wrong is found out here."""
    dataset = load(config.data.dataset, progress=progress)
    splits = deal(dataset, config.data, config.federation.seed)
    if config.federation.cohort > len(splits):
        raise BadInput(f"federation.cohort = {config.federation.cohort}: there are only {len(splits)} clients")
    judged = config.federation.evaluate_on
    clients = tuple(
        ClientData(name=name, train=_take(dataset, part.train), test=_take(dataset, part._asdict()[judged]))
        for name, part in splits.items()
    )
    shape = tuple(dataset.x.shape[1:])
    task = Task(
        model=MODELS[config.federation.model](dataset.num_classes, shape).eval(),
        num_classes=dataset.num_classes,
        label_prior=config.federation.label_prior,
        public=_public(dataset, splits.values(), config.data),
        num_clients=len(clients),
    )
    federation = Federation(
        algorithm=config.algorithm,
        task=task,
        clients=clients,
        seed=config.federation.seed,
        device=_device(config.engine.device),
    )
    check_federation(federation)
    return federation


def build_engine(config: Config, federation: Federation) -> Engine:
    """The engine the configuration asks for."""
    if config.engine.kind == "serial":
        return Serial(federation)
    return Processes(federation, config.engine.workers or cores())


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def deal(dataset: Dataset, config: DataSection, seed: int) -> dict[str, Split]:
    """Every client's name and its training, validation and test indices into the dataset."""
    parts = _partition(dataset, config, seed)
    names = dataset.client_names if _kind(dataset, config) == "natural" else None
    splits = {}
    for k, part in enumerate(parts):
        name = names[k] if names else f"client-{k:0{len(str(len(parts) - 1))}d}"
        try:
            splits[name] = split(
                part,
                train_fraction=config.train_fraction,
                validation_fraction=config.validation_fraction,
                public_fraction=config.public_fraction or 0.0,
                rng=numpy_generator(seed, "split", k),
            )
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
    return splits


def _partition(dataset: Dataset, config: DataSection, seed: int) -> list[Indices]:
    y, classes, rng = dataset.y.numpy(), dataset.num_classes, numpy_generator(seed, "partition")

    def by_owner() -> list[Indices]:
        if dataset.owner is None:
            raise BadInput(f"data.partition = 'natural': dataset {dataset.name!r} does not say whose its examples are")
        return natural(dataset.owner)

    ways: dict[str, Callable[[], list[Indices]]] = {
        "labels": lambda: by_labels(
            y,
            num_classes=classes,
            clients=config.clients,
            labels_per_client=config.labels_per_client,
            balanced=config.balanced,
            rng=rng,
        ),
        "dirichlet": lambda: dirichlet(y, num_classes=classes, clients=config.clients, alpha=config.alpha, rng=rng),
        "size": lambda: by_size(y, clients=config.clients, skew=config.skew, rng=rng),
        "natural": by_owner,
    }
    return ways[_kind(dataset, config)]()


def _kind(dataset: Dataset, config: DataSection) -> str:
    return config.partition or ("labels" if dataset.owner is None else "natural")


def _public(dataset: Dataset, splits: Iterable[Split], config: DataSection) -> Tensor | None:
    """The inputs that clients gave to the server, without labels; None if they were not asked for any."""
    if not config.public_fraction:
        return None
    chosen = np.concatenate([part.public for part in splits])
    if not len(chosen):
        raise BadInput(f"data.public_fraction = {config.public_fraction} of each client's training examples is none")
    return dataset.x[torch.from_numpy(chosen)]


def _take(dataset: Dataset, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Data:
    chosen = torch.from_numpy(indices)
    return Data(x=dataset.x[chosen], y=dataset.y[chosen])


def _device(name: str) -> str:
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"engine.device = {name!r} cannot be used here: {reason}") from None
    return name
