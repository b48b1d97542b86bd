"""What a run is made of: one schema for TOML files, `--set section.key=value` and Python."""

import copy
import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from lrbpfl import algorithms, models
from lrbpfl.algorithms.protocol import Algorithm, wishes_of
from lrbpfl.data import PARTITIONS
from lrbpfl.engines import privacy
from lrbpfl.engines import registry as engines
from lrbpfl.engines.intake import Intake, check_intake
from lrbpfl.errors import BadInput, nearest, plain, shown
from lrbpfl.errors import unknown as unknown
from lrbpfl.experiments.promises import check_calibration
from lrbpfl.experiments.sections import DataSection, EngineSection, FederationSection, Section

S = TypeVar("S", bound=Section)
SECTIONS: dict[str, type[Section]] = {"data": DataSection, "federation": FederationSection, "engine": EngineSection}
TEMPER: Literal["client", "all"] = "all"  # what the suffix +temper asks for: few examples of its own mislead a client
OWN = "own"  # the model, and the data, of somebody who brought them in Python: no configuration can load them
LONGEST = 2**20  # bytes of a file
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


def intake_of(federation: FederationSection) -> Intake:
    """What the server does with uploads."""
    return Intake(**{field: getattr(federation, field) for field in Intake._fields})


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
    _check_written(config)
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
        raise explain("algorithm", error, known) from None
    except (TypeError, ValueError) as error:  # of a package's dataclass that checks its fields in its own way
        raise BadInput(f"algorithm {name!r} cannot be made: {error}") from None


def _section(name: str, model: type[S], tables: Mapping[str, Any]) -> S:
    try:
        return model(**_table(name, tables.get(name, {})))
    except ValidationError as error:
        raise explain(name, error, model.model_fields) from None


def _table(name: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise BadInput(f"{shown(name)[1:-1]} is a section with keys, not the value {shown(table)}")
    return table


def section_of(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of one section, empty if it is not there; a value in its place is refused."""
    return dict(_table(name, tables.get(name, {})))


def explain(section: str, error: ValidationError, known: Iterable[str]) -> BadInput:
    """The first fault as one sentence."""
    fault = error.errors()[0]
    key = str(fault["loc"][0]) if fault["loc"] else "name"
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown(f"key of {section}", key, known)
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return BadInput(f"{section}.{key} = {shown(fault['input'])}: {plain(message, 300)}")


def _check_written(config: Config) -> None:
    """Refuse what no config.toml could hold: file names that are no text."""
    try:
        to_toml(config.tables()).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"this configuration cannot be written down as TOML: {plain(error, 200)}") from None


def _cross_check(config: Config) -> None:
    data, federation = config.data, config.federation
    if data.partition is not None and data.partition not in PARTITIONS:
        raise unknown("partition", data.partition, PARTITIONS)
    if federation.model not in (*models.names(), OWN):
        raise unknown("model", federation.model, models.names())
    kind, kinds = config.engine.kind, engines.names()
    if kind not in kinds:
        raise BadInput(f"engine.kind = {shown(kind)}: no such engine{nearest(kind, kinds)}; known: {', '.join(kinds)}")
    if federation.threads > 1 and kind != "serial":
        many = f"federation.threads = {federation.threads}"
        raise BadInput(f"{many} needs engine.kind = 'serial': each worker of {kind!r} has one core and one thread")
    if config.engine.address and kind in engines.ENGINES:
        said = f"engine.address = {shown(config.engine.address)} names a cluster"
        raise BadInput(f"{said}, and the engine {kind!r} runs on this machine: set engine.kind=ray, or no address")
    if federation.evaluate_on == "validation" and data.validation_fraction == 0:
        raise BadInput("federation.evaluate_on = 'validation' needs data.validation_fraction above 0")
    check_intake(intake_of(federation), "federation.")
    if federation.noise:
        privacy.library()
        _check_covered(data)
    check_calibration(federation.coverage, federation.confidence, federation.temper, data.calibration_fraction)
    if data.new_sites and data.new_clients:
        raise BadInput("data.new_sites and data.new_clients both say who is new: give one of them")
    if len(set(data.new_sites)) < len(data.new_sites):
        raise BadInput(f"data.new_sites = {list(data.new_sites)} names a site twice")
    if len(set(data.new_alpha)) < len(data.new_alpha):
        raise BadInput(f"data.new_alpha = {list(data.new_alpha)} names a value twice")


def _check_covered(data: DataSection) -> None:
    """With noise, nothing else of a client may go into what clients share."""
    if data.public_fraction:
        what = f"data.public_fraction = {data.public_fraction:g} moves inputs of clients"
        raise BadInput(f"{what} to the server as they are, which federation.noise does not cover (fedbe needs them)")
    if data.standardise == "pooled":
        what = "data.standardise = 'pooled' makes sums over all clients' features"
        raise BadInput(f"{what}, which federation.noise does not cover: set it to 'client' or 'no'")


def read(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """The tables of a TOML file; those of a run's config.toml without what it was made with, unless `whole`."""
    try:
        with path.open("rb") as file:
            return {name: table for name, table in _tables(file.read()).items() if whole or name != "versions"}
    except FileNotFoundError:
        raise BadInput(f"there is no configuration file {path}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{plain(path, 300)} cannot be read as TOML: {plain(error, 300)}") from None


def _tables(data: bytes) -> dict[str, Any]:
    """What TOML holds; ValueError for anything that is none, however deep or long."""
    if len(data) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST} bytes")
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def override(tables: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The tables with `section.key=value` settings on top; a value is read as TOML, or else as a string."""
    try:
        result: dict[str, Any] = copy.deepcopy(dict(tables))
    except RecursionError:
        raise BadInput("the configuration is nested too deeply: sections hold keys, and keys hold values") from None
    for setting in settings:
        path, equals, text = setting.partition("=")
        *sections, key = path.strip().split(".")
        if not (equals and sections and key and all(sections)):
            raise BadInput(f"--set {shown(setting)} is not of the form section.key=value, e.g. federation.rounds=40")
        value = _value(setting, text)
        table = result
        for section in sections:
            table = _table(section, table.setdefault(section, {}))
        table[key] = value
    return result


def _value(setting: str, text: str) -> Any:
    """What a setting says: TOML, or else a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists in lists
        raise BadInput(f"--set {shown(setting)} cannot be read: it is too long or nested too deeply") from None


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML; a JSON string, number, boolean or list is a TOML one, but for two kinds of text.

    TOML takes no pairs of surrogates, which JSON writes for characters beyond 16 bits, and no bare DEL.
    """
    blocks = []
    for name, table in tables.items():
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
        blocks.append("\n".join([f"[{name}]", *lines]).replace("\x7f", "\\u007f"))
    return "\n\n".join(blocks) + "\n"
