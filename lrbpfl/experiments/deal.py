"""Who gets what: from a configuration to the indices of every client's examples, and what is done to them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from lrbpfl.data import (
    Corruption,
    Dataset,
    Split,
    by_labels,
    by_size,
    check_images,
    check_inputs,
    deal_corruptions,
    dirichlet,
    hold_out,
    natural,
    permutations,
    shift_inputs,
    shift_labels,
    split,
)
from lrbpfl.data.partition import Indices
from lrbpfl.errors import BadInput
from lrbpfl.experiments.config import unknown
from lrbpfl.experiments.sections import DataSection
from lrbpfl.rng import numpy_generator

NEW_FRACTION = 0.2  # of every class, held out for new clients where there is no official test set
NATURAL_FRACTION, FRACTION = 0.7, 0.1  # for training, where neither the configuration nor the data say it


NewKind = float | Literal["sites"]  # what new clients are: the alpha of their shares, or whole natural clients


class Group(NamedTuple):
    """Clients dealt together: those that train, or the new ones of one kind."""

    splits: dict[str, Split]  # by the client's name
    corruptions: list[Corruption] | None = None  # one each
    new_alpha: NewKind | None = None  # None: they train


def deal_groups(dataset: Dataset, config: DataSection, seed: int) -> list[Group]:
    """The training clients, then the new clients of each alpha, which differ in their data from one alpha to the next.

    New clients have no training client's corruption, and the same ones whatever the alpha.
    """
    config = settled(dataset, config, seed)
    training, new = deal(dataset, config, seed), deal_new(dataset, config, seed)
    if config.shift == "features":
        check_inputs(dataset.x)
    if config.shift == "concept":
        permutations(dataset.num_classes, config.concept_groups, seed)
    if not config.corruptions:
        return [Group(training), *(Group(splits, new_alpha=alpha) for alpha, splits in new.items())]
    check_images(dataset)
    dealt = deal_corruptions(len(training) + max(map(len, new.values()), default=0), seed)
    first, rest = dealt[: len(training)], dealt[len(training) :]
    return [Group(training, first), *(Group(splits, rest, alpha) for alpha, splits in new.items())]


def shift_group(dataset: Dataset, group: Group, config: DataSection, seed: int) -> Dataset:
    """The dataset with all examples of these clients shifted, each client's in the same way whatever its parts."""
    parts = [np.sort(np.concatenate(part)) for part in group.splits.values()]
    if config.shift == "features":
        name = "shift" if group.new_alpha is None else "new shift"  # the same whatever the alpha
        return dataset._replace(x=shift_inputs(dataset.x, parts, strength=config.shift_strength, seed=seed, name=name))
    if config.shift == "concept":
        classes, groups = dataset.num_classes, config.concept_groups
        return dataset._replace(y=shift_labels(dataset.y, parts, num_classes=classes, groups=groups, seed=seed))
    return dataset


def deal(dataset: Dataset, config: DataSection, seed: int) -> dict[str, Split]:
    """Every training client's name and its training, validation, test, public and calibration indices."""
    names, parts = _named_parts(dataset, config, seed)
    chosen = [k for k, name in enumerate(names) if name not in config.new_sites]
    own, streams = [parts[k] for k in chosen], [numpy_generator(seed, "split", k) for k in chosen]
    fraction = config.public_fraction or 0.0
    splits = _split(dataset, [names[k] for k in chosen], own, config, fraction, streams)
    if fraction and not any(len(part.public) for part in splits.values()):
        return {name: _spare_one(part) for name, part in splits.items()}
    return splits


def deal_one(dataset: Dataset, name: str, k: int, config: DataSection, seed: int) -> Split:
    """The parts of natural client k, whose examples alone the dataset holds: the same as among all others."""
    everything, stream = np.arange(len(dataset.y)), numpy_generator(seed, "split", k)
    return _split(dataset, [name], [everything], config, 0.0, [stream])[name]


def _spare_one(part: Split) -> Split:
    """The split with one example for the server, where the fraction that it asks for comes to none everywhere.

    A client that has no other keeps it, too.
    """
    return part._replace(train=part.train[1:] if len(part.train) > 1 else part.train, public=part.train[:1])


def deal_new(dataset: Dataset, config: DataSection, seed: int) -> dict[NewKind, dict[str, Split]]:
    """For each alpha, the names and indices of new clients that share all that is held out for them; or whole sites.

    They give nothing to the server, and are the same whatever other alphas there are.
    """
    if config.new_sites:
        names, parts = _named_parts(dataset, config, seed)
        chosen = [k for k, name in enumerate(names) if name in config.new_sites]
        own, streams = [parts[k] for k in chosen], [numpy_generator(seed, "split", k) for k in chosen]
        return {"sites": _split(dataset, [names[k] for k in chosen], own, config, 0.0, streams)}
    if not config.new_clients:
        return {}
    groups: dict[NewKind, dict[str, Split]] = {}
    number, (_, held) = config.new_clients, _held_out(dataset, config, seed)
    y = dataset.y.numpy()[held]
    for alpha in config.new_alpha:
        rng = numpy_generator(seed, "new", repr(alpha))
        try:
            parts = dirichlet(y, num_classes=dataset.num_classes, clients=number, alpha=alpha, rng=rng)
        except BadInput as error:
            raise BadInput(f"data.new_clients = {number}: {error}") from None
        names, own = _numbered(f"new-{alpha}", number), [held[part] for part in parts]
        streams = [numpy_generator(seed, "new split", repr(alpha), j) for j in range(number)]
        groups[alpha] = _split(dataset, names, own, config, 0.0, streams)
    return groups


def settled(dataset: Dataset, config: DataSection, seed: int) -> DataSection:
    """The section with the names of all new clients that a natural partition has, chosen by the seed or given."""
    wanted, number = config.new_sites, config.new_clients
    if is_natural(dataset, config) and number:
        if fixed := {"new_alpha", "new_fraction"} & config.model_fields_set:
            what = f"data.{min(fixed)} is about new clients that are dealt by label"
            raise BadInput(f"{what}, and those of a natural partition are whole: leave it out")
        names, _ = _named_parts(dataset, config, seed)
        if number < len(names):
            chosen = numpy_generator(seed, "new sites").choice(len(names), number, replace=False)
            return config.model_copy(update={"new_clients": 0, "new_sites": tuple(names[k] for k in sorted(chosen))})
        raise BadInput(f"data.new_clients = {number}: there are {len(names)} clients, and at least one must train")
    if not wanted:
        return config
    if not is_natural(dataset, config):
        raise BadInput(f"data.new_sites = {list(wanted)} are natural clients, and data.partition deals out others")
    names, _ = _named_parts(dataset, config, seed)
    for name in wanted:
        if name not in names:
            raise unknown("site in data.new_sites", name, names)
    if len(wanted) >= len(names):
        raise BadInput(f"data.new_sites names all {len(names)} clients, and at least one must train")
    return config


def _named_parts(dataset: Dataset, config: DataSection, seed: int) -> tuple[Sequence[str], list[Indices]]:
    """Every client of the partition, those of a natural one that are new included."""
    parts = _partition(dataset, config, seed)
    own = dataset.client_names if is_natural(dataset, config) else None
    return own or _numbered("client", len(parts)), parts


def _numbered(word: str, number: int) -> list[str]:
    return [f"{word}-{k:0{len(str(number - 1))}d}" for k in range(number)]


def train_fraction(dataset: Dataset, config: DataSection) -> float | None:
    """The share of its examples that each client trains on; None: the examples that the data say."""
    if config.train_fraction is not None:
        return config.train_fraction
    if not is_natural(dataset, config):
        return FRACTION
    return NATURAL_FRACTION if dataset.trains is None else None


def _split(
    dataset: Dataset,
    names: Iterable[str],
    parts: Iterable[Indices],
    config: DataSection,
    public_fraction: float,
    streams: Iterable[np.random.Generator],
) -> dict[str, Split]:
    fraction, y, splits = train_fraction(dataset, config), dataset.y.numpy(), {}
    for name, part, rng in zip(names, parts, streams, strict=True):
        try:
            splits[name] = split(
                part,
                train_fraction=fraction,
                trains=dataset.trains[part] if fraction is None and dataset.trains is not None else None,
                labels=y[part] if config.stratified else None,
                validation_fraction=config.validation_fraction,
                calibration_fraction=config.calibration_fraction or 0.0,
                public_fraction=public_fraction,
                rng=rng,
            )
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
    return splits


def _held_out(dataset: Dataset, config: DataSection, seed: int) -> tuple[Indices, Indices]:
    """What training clients share, and what new clients do."""
    everything = np.arange(len(dataset.y))
    if not config.new_clients or is_natural(dataset, config):
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


def is_natural(dataset: Dataset, config: DataSection) -> bool:
    """Whether clients are those that the data name."""
    return _kind(dataset, config) == "natural"


def _kind(dataset: Dataset, config: DataSection) -> str:
    return config.partition or ("labels" if dataset.owner is None else "natural")
