"""From a configuration to everything a run needs: data dealt to clients, task, engine."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from lrbpfl.algorithms.protocol import Task
from lrbpfl.core.descent import Data, pace
from lrbpfl.data import (
    DATASETS,
    Dataset,
    LazyClients,
    Scaling,
    Split,
    corrupt,
    lazy_folder,
    lazy_remarks,
    load,
    remarks,
    scaling,
)
from lrbpfl.data.clients import Known
from lrbpfl.data.partition import Indices
from lrbpfl.engines import registry as engines
from lrbpfl.engines.lazy import Roster
from lrbpfl.engines.loop import Engine
from lrbpfl.engines.options import Options
from lrbpfl.engines.work import ClientData, Setup, check_setup
from lrbpfl.errors import BadInput, plain, shown
from lrbpfl.experiments import promises
from lrbpfl.experiments.config import OWN, Config
from lrbpfl.experiments.deal import Group, NewKind, deal_groups, deal_one, is_natural, settled, shift_group
from lrbpfl.experiments.provenance import digest
from lrbpfl.experiments.sections import COHORT, DataSection, FederationSection
from lrbpfl.models import make
from lrbpfl.states import States

AT_SITES = "<sites>"  # stands for the dataset where no machine holds more than its own part


class Built(NamedTuple):
    """A configuration in which nothing is left open, what it runs on, and what is worth saying about the data."""

    config: Config
    setup: Setup
    remarks: list[str]


def build(config: Config, *, progress: bool = False) -> Built:
    """Load and deal the data, make the model; everything that can be wrong is found out here."""
    if config.federation.model == OWN:
        raise BadInput(
            "this run's data and model came from Python: go on with Federation(...).fit(directory=...) there"
        )
    if config.data.dataset == AT_SITES:
        raise BadInput("this run's data lie at their sites: go on with the lrbpfl sites run that it came from")
    if source := _lazily(config.data):
        return _build_lazily(config, source)
    dataset = load_data(config.data, progress=progress)
    data = settled(dataset, config.data, config.federation.seed)
    groups = deal_groups(dataset, data, config.federation.seed)
    cohort = cohort_of(config.federation, len(groups[0].splits))
    federation = config.federation.model_copy(update={"cohort": cohort})
    config = dataclasses.replace(config, data=data, federation=federation)
    found = data_remarks(dataset, data, groups[0])
    return Built(config=config, setup=_setup(config, dataset, groups, progress), remarks=found)


def _lazily(config: DataSection) -> LazyClients | None:
    """The data, if they are a large folder and nothing asks for everybody's at once; None: they are loaded now."""
    at_once = (config.partition not in (None, "natural"), config.standardise == "pooled", config.shift != "none")
    others = (config.corruptions, config.new_clients, config.new_sites, config.public_fraction)
    named = (config.client_column, config.label_column, config.dataset in DATASETS, not config.dataset)
    return None if any((*at_once, *others, *named)) else lazy_folder(Path(config.dataset))


def _build_lazily(config: Config, source: LazyClients) -> Built:
    """The same as of clients loaded now, but that all except the first are loaded, dealt and checked when needed."""
    cohort = cohort_of(config.federation, len(source))
    config = dataclasses.replace(config, federation=config.federation.model_copy(update={"cohort": cohort}))
    known, first = source.opened()
    assert source.census is not None
    load = partial(_load_client, source, known, config.data, config.federation)
    clients = Roster(source.names, load, largest=int(source.census.sizes.argmax()))
    own = deal_one(first, source.names[0], 0, config.data, config.federation.seed)
    found = lazy_remarks(first, source.census, train=own.train, standardise=config.data.standardise)
    setup = checked_setup(config, first, clients, first.x[:0].clone(), len(clients), source.digest)
    return Built(config=config, setup=setup, remarks=found)


def _load_client(
    source: LazyClients, known: Known, config: DataSection, federation: FederationSection, k: int
) -> ClientData:
    return client_of(source.dataset(k, known), source.names[k], k, config, federation)


def client_of(dataset: Dataset, name: str, k: int, config: DataSection, federation: FederationSection) -> ClientData:
    """Natural client k, whose examples alone the dataset holds, with the parts it would have among all others."""
    group = Group({name: deal_one(dataset, name, k, config, federation.seed)})
    dataset, scalings = _standardised(dataset, group, config, None)
    (client,) = _clients(dataset, group, federation.evaluate_on, scalings)
    return client


def build_setup(config: Config, *, progress: bool = False) -> Setup:
    """What a configuration runs on."""
    return build(config, progress=progress).setup


def load_data(config: DataSection, *, progress: bool = False) -> Dataset:
    """The data that a configuration names."""
    return load(config.dataset, progress=progress, client=config.client_column, label=config.label_column)


def data_hash(config: DataSection) -> str:
    """The hash of the data that `build` would give to this configuration's setup; they are read once in a process."""
    source = _lazily(config)
    return source.digest if source else _data_hash(config.dataset, config.client_column, config.label_column)


@cache
def _data_hash(dataset: str, client: str | None, label: str | None) -> str:
    return digest(load(dataset, client=client, label=label))


def cohort_of(config: FederationSection, clients: int) -> int:
    """How many of these clients take part in a round."""
    if config.cohort is not None and config.cohort > clients:
        raise BadInput(f"federation.cohort = {config.cohort}: there are only {clients} clients")
    return min(COHORT, clients) if config.cohort is None else config.cohort


def data_remarks(dataset: Dataset, config: DataSection, training: Group) -> list[str]:
    """What is worth saying about the data: of clients only where they are the data's own."""
    train = np.concatenate([part.train for part in training.splits.values()])
    kept = dataset if is_natural(dataset, config) else dataset._replace(owner=None)
    return remarks(kept, train=train, standardise=config.standardise)


def _setup(config: Config, dataset: Dataset, groups: list[Group], progress: bool) -> Setup:
    training, seed = groups[0], config.federation.seed
    clients: list[ClientData] = []
    public = common = None
    for group in groups:
        own = _corrupted(dataset, group, seed, progress)
        own = shift_group(own, group, config.data, seed)
        if group is training and config.data.standardise == "pooled":
            common = _pooled(own, group)
        own, scalings = _standardised(own, group, config.data, common)
        clients += _clients(own, group, config.federation.evaluate_on, scalings)
        if group is training:
            public = _public(own, group.splits.values(), config.data)
    assert public is not None
    return checked_setup(config, dataset, tuple(clients), public, len(training.splits), digest(dataset))


def checked_setup(
    config: Config, dataset: Dataset, clients: Sequence[ClientData], public: Tensor, training: int, data: str
) -> Setup:
    """The setup of these clients, of whom so many train; the dataset tells what classes and inputs are like."""
    asked = config.federation
    promises.check_parts(asked.coverage, asked.confidence, config.data.calibration_fraction, clients)
    shape = tuple(dataset.x.shape[1:])
    task = Task(
        model=make(config.federation.model, dataset.num_classes, shape).eval(),
        num_classes=dataset.num_classes,
        label_prior=config.federation.label_prior or 0.0,
        public=public,
        num_clients=training,
        class_names=dataset.class_names,
    )
    setup = Setup(
        algorithm=config.algorithm,
        task=task,
        clients=clients,
        seed=config.federation.seed,
        device=usable_device(config.engine.device),
        paces=_paces(config.federation),
        classes=_classes(dataset),
        features=dataset.feature_names,
        data=data,
        precision=config.federation.precision,
        threads=config.federation.threads,
    )
    check_setup(setup)
    return setup


def _classes(dataset: Dataset) -> tuple[int | str, ...] | None:
    """The labels as their owners write them; their names where they are just 0, 1, ... and have any."""
    plain = dataset.classes is None or dataset.classes == tuple(range(dataset.num_classes))
    return dataset.class_names if plain else dataset.classes


def _paces(config: FederationSection) -> tuple[float, ...]:
    return tuple(pace(config.schedule, t, config.rounds) for t in range(config.rounds))


def build_engine(config: Config, setup: Setup, states: States) -> Engine:
    """The engine the configuration asks for, over what clients keep."""
    asked = config.engine
    workers = asked.workers if asked.workers or asked.address else cores()
    options = Options(workers=workers, start=asked.start, deadline=asked.deadline, address=asked.address)
    return engines.find(asked.kind)(setup, options, states)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def alphas_of_new(config: DataSection, training: int) -> dict[int, NewKind]:
    """The alpha of every new client by its id, or "sites"; their ids follow those of the training clients."""
    kinds: list[NewKind] = ["sites" for _ in config.new_sites]
    kinds += np.repeat(config.new_alpha, config.new_clients).tolist()
    return {training + i: kind for i, kind in enumerate(kinds)}


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


def _pooled(dataset: Dataset, group: Group) -> Scaling:
    """The scaling of all these clients' training parts, from their sums."""
    _check_scalable(dataset, "pooled")
    return scaling.pooled(scaling.sums(_take(dataset, part.train).x) for part in group.splits.values())


def _standardised(
    dataset: Dataset, group: Group, config: DataSection, common: Scaling | None
) -> tuple[Dataset, dict[str, Scaling]]:
    """The dataset with these clients' inputs standardised, and by what: the common scaling, or that of each one."""
    if config.standardise == "no":
        return dataset, {}
    _check_scalable(dataset, config.standardise)
    x, found = dataset.x.clone(), {}
    for name, part in group.splits.items():
        own = torch.from_numpy(np.concatenate(part))
        found[name] = common or scaling.fit(_take(dataset, part.train).x)
        x[own] = found[name].apply(dataset.x[own])
    return dataset._replace(x=x), found


def _check_scalable(dataset: Dataset, how: str) -> None:
    if not dataset.x.is_floating_point():
        kind = "images, which are brought to one scale anyway" if dataset.x.dtype == torch.uint8 else "tokens"
        raise BadInput(f"data.standardise = {how!r} is for features, and {dataset.name!r} holds {kind}: leave it out")


def _clients(dataset: Dataset, group: Group, judged: str, scalings: Mapping[str, Scaling]) -> list[ClientData]:
    return [
        ClientData(
            name=name,
            train=_take(dataset, part.train),
            test=_take(dataset, part._asdict()[judged]),
            calibration=_take(dataset, part.calibration) if len(part.calibration) else None,
            scaling=scalings.get(name),
        )
        for name, part in group.splits.items()
    ]


def _public(dataset: Dataset, splits: Iterable[Split], config: DataSection) -> Tensor:
    """The inputs that clients gave to the server, without labels."""
    if not config.public_fraction:
        return dataset.x[:0].clone()  # a view would keep the whole dataset
    return dataset.x[torch.from_numpy(np.concatenate([part.public for part in splits]))]


def _take(dataset: Dataset, indices: Indices) -> Data:
    chosen = torch.from_numpy(indices)
    return Data(x=dataset.x[chosen], y=dataset.y[chosen])


def usable_device(name: str) -> str:
    """The device, if this machine has it."""
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        reason = plain(str(error).partition("\n")[0], 300)
        raise BadInput(f"engine.device = {shown(name)} cannot be used here: {reason}") from None
    return name
