"""What hub and sites agree on before a run: the job, made from a configuration file and signed by who submits it."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError

from lrbpfl.algorithms.protocol import wishes_of
from lrbpfl.data import Dataset
from lrbpfl.errors import BadInput, plain, shown
from lrbpfl.experiments import config as configuration
from lrbpfl.experiments.build import AT_SITES
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.sections import Section, Several

DTYPES = {"features": torch.float32, "images": torch.uint8, "tokens": torch.int64}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,40}-[0-9a-f]{12}")
ROSTER = "sites.json"  # of a run's directory at the hub: which client is at which site, and the number of the leg
MOST_INPUTS = 10**8  # numbers in one example
Text = Annotated[str, Field(min_length=1, max_length=200)]


class SitesSection(Section):
    """What the sites of a run have in common, as no machine can look at all their data."""

    # Labels as the sites' data have them, in the order of the model's outputs.
    classes: Annotated[tuple[Text | int, ...], Field(min_length=2), Several]
    features: Annotated[tuple[Text, ...], Several] = ()  # a table's columns, as sites have them, in this order
    inputs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=5), Several] = ()  # shape of an example
    kind: Literal["features", "images", "tokens"] = "features"  # of inputs: numbers, pixels or token ids
    names: Annotated[tuple[Text, ...], Several] = ()  # of the sites; empty: all that are connected
    minimum: Annotated[int, Field(ge=1)] | None = None  # sites without which no round is begun; None: all named ones
    patience: Annotated[float, Field(gt=0, le=10**7)] = 600.0  # seconds to wait for so many
    deadline: Annotated[float, Field(gt=0, le=10**6)] = 600.0  # seconds that a site may take over a round
    public: str = ""  # a .npz file at the hub, array x: inputs without labels, for algorithms that need them there


class Job(NamedTuple):
    """A job, checked."""

    run: str
    config: Config
    about: SitesSection

    @property
    def minimum(self) -> int:
        """How many sites a round needs."""
        return self.about.minimum or len(self.about.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an example."""
        return (len(self.about.features),) if self.about.features else tuple(self.about.inputs)

    def examples(self, n: int) -> Dataset:
        """So many examples of zeros, which are like all others in form."""
        x = torch.zeros(n, *self.shape, dtype=DTYPES[self.about.kind])
        classes = tuple(self.about.classes)
        return Dataset(
            name=AT_SITES,
            x=x,
            y=torch.zeros(n, dtype=torch.int64),
            num_classes=len(classes),
            class_names=tuple(map(str, classes)),
            classes=classes,
            feature_names=tuple(self.about.features) or None,
        )


def read(path: Path) -> dict[str, Any]:
    """The job of a configuration file: the same one whenever the file says the same, so that its run goes on."""
    tables = configuration.read(path)
    about = configuration.section_of(tables, "sites")
    tables = {name: table for name, table in tables.items() if name != "sites"}
    return write(path.stem, tables, about)


def write(stem: str, tables: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """A job as plain values; its run is named after the file and what is in it."""
    if "dataset" in configuration.section_of(tables, "data"):
        raise BadInput("data.dataset has no place here: where its data lie says each site, in its own site.toml")
    said = {"lrbpfl": version("lrbpfl"), "config": dict(tables), "about": dict(about)}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "run"
    found = parse({**said, "run": f"{name}-{digest[:12]}"})
    sites = {"sites": list(found.about.names), "minimum": found.minimum, "patience": found.about.patience}
    return {**said, "run": found.run, **sites}


def parse(job: Mapping[str, Any]) -> Job:
    """A job as hub and sites run it; whatever is wrong with it is told in one sentence."""
    run = job.get("run")
    if not isinstance(run, str) or not RUN.fullmatch(run):
        raise BadInput(f"{shown(run)} names no run")
    if job.get("lrbpfl") != version("lrbpfl"):
        raise BadInput(
            f"the job is of lrbpfl {plain(job.get('lrbpfl'), 20)}, and here is {version('lrbpfl')}: use one of them"
        )
    if not isinstance(job.get("config"), dict) or not isinstance(job.get("about"), dict):
        raise BadInput("the job holds no configuration")
    about, tables = _about(job["about"]), dict(job["config"])
    data = configuration.section_of(tables, "data")
    if not data.get("public_fraction"):
        data["public_fraction"] = 0.0
    config = configuration.parse({**tables, "data": {**data, "dataset": AT_SITES}})
    _check(config, about)
    return Job(run=run, config=config, about=about)


def _about(table: Mapping[str, Any]) -> SitesSection:
    try:
        return SitesSection(**table)
    except ValidationError as error:
        raise configuration.explain("sites", error, SitesSection.model_fields) from None


def _check(config: Config, about: SitesSection) -> None:
    """Refuse what would need data of several sites in one place, or does not fit together."""
    data, federation = config.data, config.federation
    if bool(about.features) == bool(about.inputs):
        raise BadInput("sites.features (a table's columns) or sites.inputs (an example's shape): give one of them")
    if about.features and about.kind != "features":
        raise BadInput(f"sites.features names columns, and sites.kind = {about.kind!r} has none")
    if math.prod(about.inputs) > MOST_INPUTS:
        raise BadInput(f"sites.inputs = {about.inputs} is more than {MOST_INPUTS} numbers an example")
    for what, names in (("classes", about.classes), ("features", about.features), ("names", about.names)):
        if len(set(map(str, names))) < len(names):
            raise BadInput(f"sites.{what} names something twice")
    if bad := [name for name in about.names if not NAME.fullmatch(name)]:
        raise BadInput(f"sites.names: {shown(bad[0])} cannot name a site: use letters, digits, points and dashes")
    if not about.names and about.minimum is None:
        raise BadInput("sites.minimum says how many sites a run needs; give it, or the sites' names in sites.names")
    if about.names and about.minimum and about.minimum > len(about.names):
        raise BadInput(f"sites.minimum = {about.minimum} is more than the {len(about.names)} sites in sites.names")
    together = {
        "data.partition": data.partition not in (None, "natural"),
        "data.standardise = 'pooled'": data.standardise == "pooled",
        "data.shift": data.shift != "none",
        "data.corruptions": data.corruptions,
        "data.new_clients": bool(data.new_clients),
        "data.new_sites": bool(data.new_sites),
        "federation.temper = 'all'": federation.temper == "all",
        "federation.model = 'own'": federation.model == configuration.OWN,
        "data.public_fraction": bool(data.public_fraction),
    }
    for what, is_asked in together.items():
        if is_asked:
            raise BadInput(f"{what} takes clients' data out of their sites, or clients from elsewhere: leave it out")
    if wishes_of(config.algorithm).public_fraction and not about.public:
        name = config.algorithm_name
        raise BadInput(f"{name} needs inputs at the hub, and none leave a site: name a file there in sites.public")
