"""From a configuration to everything a run needs: data dealt to clients, task, engine."""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data, pace
from lrbpfl.data import (
    Corruption,
    Dataset,
    Split,
    by_labels,
    by_size,
    check_images,
    corrupt,
    deal_corruptions,
    dirichlet,
    hold_out,
    load,
    natural,
    split,
)
from lrbpfl.data.partition import Indices
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.processes import Processes
from lrbpfl.engines.serial import Serial
from lrbpfl.engines.work import ClientData, Federation, check_federation
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import Config, DataSection, FederationSection
from lrbpfl.models import MODELS
from lrbpfl.rng import numpy_generator

NEW_FRACTION = 0.2  # of every class, held out for new clients where there is no official test set


def build_federation(config: Config, *, progress: bool = False) -> Federation:
    """Load and deal the data, make the model; everything that can be wrong is found out here."""
    dataset = load(config.data.dataset, progress=progress)
    training, *new = deal_groups(dataset, config.data, config.federation.seed)
    trainers = len(training.splits)
    if config.federation.cohort > trainers:
        raise BadInput(f"federation.cohort = {config.federation.cohort}: there are only {trainers} clients")
    clients: list[ClientData] = []
    public = None
    for group in (training, *new):
        spoilt = _corrupted(dataset, group, config.federation.seed, progress)
        clients += _clients(spoilt, group, config.federation.evaluate_on)
        if group is training:
            public = _public(spoilt, group.splits.values(), config.data)
    shape = tuple(dataset.x.shape[1:])
    task = Task(
        model=MODELS[config.federation.model](dataset.num_classes, shape).eval(),
        num_classes=dataset.num_classes,
        label_prior=config.federation.label_prior or 0.0,
        public=public,
        num_clients=trainers,
        class_names=dataset.class_names,
    )
    federation = Federation(
        algorithm=config.algorithm,
        task=task,
        clients=tuple(clients),
        seed=config.federation.seed,
        device=_device(config.engine.device),
        paces=_paces(config.federation),
    )
    check_federation(federation)
    return federation


def _paces(config: FederationSection) -> tuple[float, ...]:
    return tuple(pace(config.schedule, t, config.rounds) for t in range(config.rounds))


def build_engine(config: Config, federation: Federation) -> Engine:
    """The engine the configuration asks for."""
    if config.engine.kind == "serial":
        return Serial(federation)
    return Processes(federation, config.engine.workers or cores())


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Group(NamedTuple):
    """Clients dealt together: those that train, or the new ones of one alpha."""

    splits: dict[str, Split]  # by the client's name
    corruptions: list[Corruption] | None = None  # one each
    new_alpha: float | None = None


def deal_groups(dataset: Dataset, config: DataSection, seed: int) -> list[Group]:
    """The training clients, then the new clients of each alpha, which differ in their data from one alpha to the next.

    New clients have no training client's corruption, and the same ones whatever the alpha.
    """
    training, new = deal(dataset, config, seed), deal_new(dataset, config, seed)
    if not config.corruptions:
        return [Group(training), *(Group(splits, new_alpha=alpha) for alpha, splits in new.items())]
    check_images(dataset)
    dealt = deal_corruptions(len(training) + config.new_clients, seed)
    first, rest = dealt[: len(training)], dealt[len(training) :]
    return [Group(training, first), *(Group(splits, rest, alpha) for alpha, splits in new.items())]


def deal(dataset: Dataset, config: DataSection, seed: int) -> dict[str, Split]:
    """Every training client's name and its training, validation, test and public indices into the dataset."""
    parts = _partition(dataset, config, seed)
    names = dataset.client_names if _kind(dataset, config) == "natural" else None
    streams = [numpy_generator(seed, "split", k) for k in range(len(parts))]
    return _split(names or _numbered("client", len(parts)), parts, config, config.public_fraction or 0.0, streams)


def deal_new(dataset: Dataset, config: DataSection, seed: int) -> dict[float, dict[str, Split]]:
    """For each alpha, the names and indices of new clients that share all that is held out for them.

    They give nothing to the server, and are the same whatever other alphas there are.
    """
    if not config.new_clients:
        return {}
    number, (_, held) = config.new_clients, _held_out(dataset, config, seed)
    y, groups = dataset.y.numpy()[held], {}
    for alpha in config.new_alpha:
        rng = numpy_generator(seed, "new", repr(alpha))
        try:
            parts = dirichlet(y, num_classes=dataset.num_classes, clients=number, alpha=alpha, rng=rng)
        except BadInput as error:
            raise BadInput(f"data.new_clients = {number}: {error}") from None
        names, own = _numbered(f"new-{alpha}", number), [held[part] for part in parts]
        streams = [numpy_generator(seed, "new split", repr(alpha), j) for j in range(number)]
        groups[alpha] = _split(names, own, config, 0.0, streams)
    return groups


def alphas_of_new(config: DataSection, training: int) -> dict[int, float]:
    """The alpha of every new client by its id; their ids follow those of the training clients."""
    alphas = np.repeat(config.new_alpha, config.new_clients).tolist()
    return {training + i: alpha for i, alpha in enumerate(alphas)}


def _numbered(word: str, number: int) -> list[str]:
    return [f"{word}-{k:0{len(str(number - 1))}d}" for k in range(number)]


def _split(
    names: Iterable[str],
    parts: Iterable[Indices],
    config: DataSection,
    public_fraction: float,
    streams: Iterable[np.random.Generator],
) -> dict[str, Split]:
    splits = {}
    for name, part, rng in zip(names, parts, streams, strict=True):
        try:
            splits[name] = split(
                part,
                train_fraction=config.train_fraction,
                validation_fraction=config.validation_fraction,
                public_fraction=public_fraction,
                rng=rng,
            )
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
    return splits


def _held_out(dataset: Dataset, config: DataSection, seed: int) -> tuple[Indices, Indices]:
    """What training clients share, and what new clients do."""
    everything = np.arange(len(dataset.y))
    if not config.new_clients:
        return everything, everything[:0]
    if config.new_fraction is None and dataset.num_test:
        return everything[: -dataset.num_test], everything[-dataset.num_test :]
    fraction = NEW_FRACTION if config.new_fraction is None else config.new_fraction
    return hold_out(dataset.y.numpy(), fraction=fraction, rng=numpy_generator(seed, "held out"))


def _partition(dataset: Dataset, config: DataSection, seed: int) -> list[Indices]:
    kind, (kept, _) = _kind(dataset, config), _held_out(dataset, config, seed)
    y, classes, rng = dataset.y.numpy()[kept], dataset.num_classes, numpy_generator(seed, "partition")

    def by_owner() -> list[Indices]:
        if dataset.owner is None:
            raise BadInput(f"data.partition = 'natural': dataset {dataset.name!r} does not say whose its examples are")
        if config.new_clients:
            raise BadInput(
                f"data.new_clients = {config.new_clients}: new clients are dealt by label, and a natural partition is "
                "not: name another data.partition"
            )
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
    return [kept[part] for part in ways[kind]()]


def _kind(dataset: Dataset, config: DataSection) -> str:
    return config.partition or ("labels" if dataset.owner is None else "natural")


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
        ClientData(name=name, train=_take(dataset, part.train), test=_take(dataset, part._asdict()[judged]))
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
