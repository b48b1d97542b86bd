"""What a run is made of: one schema for TOML files, `--set section.key=value` and Python."""

import copy
import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lrbpfl import algorithms
from lrbpfl.algorithms.protocol import Algorithm, wishes_of
from lrbpfl.core.descent import Schedule
from lrbpfl.data import PARTITIONS
from lrbpfl.engines import registry as engines
from lrbpfl.engines.launch import Start
from lrbpfl.errors import BadInput, nearest
from lrbpfl.errors import unknown as unknown
from lrbpfl.experiments.promises import check_calibration
from lrbpfl.models import MODELS

Count = Annotated[int, Field(ge=1)]
# A number stands for a list of one.
Alphas = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    Field(min_length=1),
    BeforeValidator(lambda given: tuple(given) if isinstance(given, list | tuple) else (given,)),
]


class Section(BaseModel):
    """A section of a configuration: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def idle(self) -> set[str]:
        """Keys of what is switched off: they are not written down, and change no number."""
        return set()


class DataSection(Section):
    """Which data, and who gets what."""

    dataset: str = "speakers"  # speakers, digits, cifar10, cifar100, or a folder of client-name.npz files
    partition: str | None = None  # labels, dirichlet, size, natural; None: natural if the data have clients, or labels
    clients: Count = 10  # K; a natural partition brings its own
    labels_per_client: Count = 2
    balanced: bool = True  # a class is shared equally among its clients
    # Of the Dirichlet partition: of each class's shares over the clients, so that every example is dealt exactly once.
    # The paper draws each client's class probabilities, which need not add up to the examples there are.
    alpha: Annotated[float, Field(gt=0)] = 0.1
    skew: Annotated[float, Field(ge=0)] = 1.0  # of the sizes in the partition by size; 0: equal
    # Of a client's examples. None: the data's own split, if they have one and the partition is natural; without one,
    # 0.7 in a natural partition and 0.1 in any other.
    train_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the training part
    # Of what is left for training: kept from it for good, to calibrate on. None: what the task asks for.
    calibration_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    # Of what is left for training then: moved to the server, without labels. None: as much as the algorithm asks for.
    public_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    stratified: bool = True  # each part of a client's examples has that client's class proportions
    # What makes clients differ beyond who gets what. features: every client's inputs are scaled and moved in a way of
    # its own; concept: groups of clients call the classes differently.
    shift: Literal["none", "features", "concept"] = "none"
    # s of features: x exp(N(0, s^2)) + u N(0, s^2) for each feature, u the power of ten nearest to a feature's spread;
    # of uint8 images: contrast times exp(N(0, s^2)), and brightness and turns of 64 s levels and 30 s degrees.
    shift_strength: Annotated[float, Field(ge=0)] = 0.5
    concept_groups: Annotated[int, Field(ge=2)] = 2  # client k is in group k mod this; group 0 keeps its labels
    corruptions: bool = False  # every client's images are spoilt in a way of its own
    new_clients: Annotated[int, Field(ge=0)] = 0  # for each of new_alpha; they never train and are judged at the end
    new_alpha: Alphas = (0.1,)  # of the Dirichlet partitions of what is held out for new clients
    # What is held out for them, of every class. None: the official test set, or a fifth where there is none.
    new_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None

    def idle(self) -> set[str]:
        """Keys of what is switched off."""
        shift = {"none": {"shift", "shift_strength", "concept_groups"}}
        shift |= {"features": {"concept_groups"}, "concept": {"shift_strength"}}
        off = {key for key in ("corruptions", "calibration_fraction") if not getattr(self, key)}
        new = set() if self.new_clients else {"new_clients", "new_alpha", "new_fraction"}
        return shift[self.shift] | off | new


class FederationSection(Section):
    """Who trains when, and what is judged."""

    rounds: Count = 30  # T
    cohort: Count = 5  # clients a round, tau K
    schedule: Schedule = "constant"  # of the shared network's rate over the rounds; cosine: falling to 0
    seed: Annotated[int, Field(ge=0)] = 0
    evaluate_every: Annotated[int, Field(ge=0)] = 10  # rounds; 0: after the last one only
    evaluate_on: Literal["test", "validation"] = "test"
    model: str = "auto"
    # Examples, shared out among all classes, that smooth a client's class frequencies, which then join the likelihood;
    # 0: they do not. None: what the algorithm asks for.
    label_prior: Annotated[float, Field(ge=0)] | None = None
    # After training: probabilities p^(1/T), with T fitted on what clients kept from training, for each of them or for
    # all together.
    temper: Literal["no", "client", "all"] = "no"
    coverage: Annotated[float, Field(gt=0, lt=1)] | None = None  # promised of each client's sets; None: no sets
    confidence: Annotated[float, Field(gt=0, lt=1)] | None = None  # that a client's own part keeps it; None: on average

    def idle(self) -> set[str]:
        """Keys of what is switched off."""
        off = {"schedule": self.schedule == "constant", "temper": self.temper == "no"}
        return {key for key, is_off in off.items() if is_off}


class EngineSection(Section):
    """How it is computed; nothing here changes a number."""

    kind: str = "processes"  # or serial, or what an installed package offers under lrbpfl.engines
    workers: Annotated[int, Field(ge=0)] = 0  # 0: one for each core
    device: str = "cpu"
    start: Start = "auto"  # of worker processes; auto: fork on Linux where clients run on the CPU, or spawn


S = TypeVar("S", bound=Section)
SECTIONS: dict[str, type[Section]] = {"data": DataSection, "federation": FederationSection, "engine": EngineSection}
TEMPER: Literal["client", "all"] = "all"  # what the suffix +temper asks for: few examples of its own mislead a client
OWN = "own"  # the model, and the data, of somebody who brought them in Python: no configuration can load them
CALIBRATION = 0.15  # of the training part, where temperatures or promises are fitted and nobody says on how much


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    data: DataSection
    federation: FederationSection
    engine: EngineSection
    algorithm_name: str
    algorithm: Algorithm

    def tables(self) -> dict[str, dict[str, Any]]:
        """The configuration as nested tables of plain values, every default spelled out but for what is off."""
        fields = dataclasses.asdict(self.algorithm)
        sections: dict[str, Section] = {name: getattr(self, name) for name in SECTIONS}
        tables = {name: s.model_dump(exclude_none=True, exclude=s.idle()) for name, s in sections.items()}
        return {**tables, "algorithm": {"name": self.algorithm_name, **fields}}

    def identity(self) -> dict[str, dict[str, Any]]:
        """The tables that change a number: all but the engine's."""
        return {name: table for name, table in self.tables().items() if name != "engine"}


def parse(tables: Mapping[str, Any]) -> Config:
    """A checked configuration from nested tables."""
    for name in tables:
        if name not in (*SECTIONS, "algorithm"):
            raise unknown("section", name, (*SECTIONS, "algorithm"))
    fields = dict(_table("algorithm", tables.get("algorithm", {})))
    full_name = fields.pop("name", "lr-bpfl")
    data = _section("data", DataSection, tables)
    federation = _section("federation", FederationSection, tables)
    algorithm = make_algorithm(full_name, fields)
    if federation.temper == "no" and read_name(full_name).temper:
        federation = federation.model_copy(update={"temper": TEMPER})
    wishes = wishes_of(algorithm)
    if data.public_fraction is None:
        data = data.model_copy(update={"public_fraction": wishes.public_fraction})
    if data.calibration_fraction is None:
        idle = federation.temper == "no" and federation.coverage is None
        data = data.model_copy(update={"calibration_fraction": 0.0 if idle else CALIBRATION})
    if federation.label_prior is None:
        federation = federation.model_copy(update={"label_prior": wishes.label_prior})
    config = Config(
        data=data,
        federation=federation,
        engine=_section("engine", EngineSection, tables),
        algorithm_name=full_name,
        algorithm=algorithm,
    )
    _cross_check(config)
    return config


class Name(NamedTuple):
    """What `name`, `name:preset`, `name+temper` or `name:preset+temper` says."""

    name: str
    preset: str  # may be empty
    temper: bool


def read_name(full_name: str) -> Name:
    """The parts of an algorithm's full name."""
    stem, plus, suffix = str(full_name).partition("+")
    if plus and suffix != "temper":
        raise unknown(f"suffix of {stem}", suffix, ["temper"])
    name, _, preset = stem.partition(":")
    return Name(name=name, preset=preset, temper=bool(plus))


def make_algorithm(full_name: str, fields: Mapping[str, Any]) -> Algorithm:
    """The algorithm of this full name, with some fields set."""
    name, preset, _ = read_name(full_name)
    kind = algorithms.find(name)
    presets: dict[str, dict[str, Any]] = getattr(kind, "PRESETS", {})
    if preset and preset not in presets:
        raise unknown(f"preset of {name}", preset, presets)
    try:
        return kind(**{**presets.get(preset, {}), **fields})
    except ValidationError as error:
        known = [field.name for field in dataclasses.fields(kind)]
        raise _explain("algorithm", error, known) from None
    except (TypeError, ValueError) as error:  # of a package's dataclass that checks its fields in its own way
        raise BadInput(f"algorithm {name!r} cannot be made: {error}") from None


def _section(name: str, model: type[S], tables: Mapping[str, Any]) -> S:
    try:
        return model(**_table(name, tables.get(name, {})))
    except ValidationError as error:
        raise _explain(name, error, model.model_fields) from None


def _table(name: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise BadInput(f"{name} is a section with keys, not the value {table!r}")
    return table


def _explain(section: str, error: ValidationError, known: Iterable[str]) -> BadInput:
    """The first fault as one sentence."""
    fault = error.errors()[0]
    key = str(fault["loc"][0])
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown(f"key of {section}", key, known)
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return BadInput(f"{section}.{key} = {fault['input']!r}: {message}")


def _cross_check(config: Config) -> None:
    data, federation = config.data, config.federation
    if data.partition is not None and data.partition not in PARTITIONS:
        raise unknown("partition", data.partition, PARTITIONS)
    if federation.model not in (*MODELS, OWN):
        raise unknown("model", federation.model, MODELS)
    kind, kinds = config.engine.kind, engines.names()
    if kind not in kinds:
        raise BadInput(f"engine.kind = {kind!r}: no such engine{nearest(kind, kinds)}; known: {', '.join(kinds)}")
    if federation.evaluate_on == "validation" and data.validation_fraction == 0:
        raise BadInput("federation.evaluate_on = 'validation' needs data.validation_fraction above 0")
    check_calibration(federation.coverage, federation.confidence, federation.temper, data.calibration_fraction)
    if len(set(data.new_alpha)) < len(data.new_alpha):
        raise BadInput(f"data.new_alpha = {list(data.new_alpha)} names a value twice")


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise BadInput(f"there is no configuration file {path}") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as TOML: {error}") from None


def override(tables: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The tables with `section.key=value` settings on top; a value is read as TOML, or else as a string."""
    result: dict[str, Any] = copy.deepcopy(dict(tables))
    for setting in settings:
        path, equals, text = setting.partition("=")
        *sections, key = path.strip().split(".")
        if not (equals and sections and key and all(sections)):
            raise BadInput(f"--set {setting!r} is not of the form section.key=value, e.g. federation.rounds=40")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = result
        for section in sections:
            table = _table(section, table.setdefault(section, {}))
        table[key] = value
    return result


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML; a JSON string, number, boolean or list is a TOML one, but for two kinds of text.

    TOML takes no pairs of surrogates, which JSON writes for characters beyond 16 bits, and no bare DEL.
    """
    blocks = []
    for name, table in tables.items():
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
        blocks.append("\n".join([f"[{name}]", *lines]).replace("\x7f", "\\u007f"))
    return "\n\n".join(blocks) + "\n"
