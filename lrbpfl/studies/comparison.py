"""Several algorithms on identical clients, splits and seeds: a directory of runs."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lrbpfl.algorithms.protocol import wishes_of
from lrbpfl.disk import locked, write_file
from lrbpfl.engines.work import check_setup
from lrbpfl.errors import BadInput, shown
from lrbpfl.experiments.build import Built, build
from lrbpfl.experiments.config import Config, make_algorithm, parse, section_of, unknown
from lrbpfl.experiments.provenance import versions
from lrbpfl.experiments.runner import Progress, resume, start
from lrbpfl.experiments.sections import DataSection
from lrbpfl.experiments.store import claimed, read_tables, refuse_existing, write_tables


def plan(tables: Mapping[str, Any], names: Sequence[str]) -> dict[str, Config]:
    """A configuration for each algorithm: shared sections, and fields from its own table algorithm.NAME."""
    if len(set(names)) < len(names):
        raise BadInput(f"an algorithm is named twice: {', '.join(names)}")
    if not names:
        raise BadInput("no algorithm is named: give at least one, or: all")
    own = section_of(tables, "algorithm")
    for name in own:
        if name not in names:
            raise unknown("algorithm of this comparison", name, names)
    common = {section: table for section, table in tables.items() if section != "algorithm"}
    for name in names:  # an unknown name is told before anything else
        make_algorithm(name, {})
    fields = {name: own.get(name, {}) for name in names}
    for name, table in fields.items():
        if not isinstance(table, dict):
            raise BadInput(f"algorithm.{name} is a section with keys, not the value {shown(table)}")
    asked = [wishes_of(make_algorithm(name, table)) for name, table in fields.items()]
    for section, key in (("data", "public_fraction"), ("federation", "label_prior")):  # what one asks for, all get
        if isinstance(common.get(section, {}), dict):
            most = max((getattr(wishes, key) for wishes in asked), default=0.0)
            common[section] = {key: most, **common.get(section, {})}
    return {name: parse({**common, "algorithm": {**table, "name": name}}) for name, table in fields.items()}


def compare(
    configs: Mapping[str, Config],
    path: Path,
    progress: Callable[[str, Config], Progress],
    *,
    loading: bool = False,
    tell: Callable[[str], None] = lambda remark: None,
) -> dict[str, Any]:
    """A new comparison; its summary. What is worth saying about the data is told before it begins."""
    refuse_existing(path)
    built = _built(configs, loading=loading)
    with claimed(path):
        write_tables(path, _tables({name: of_one.config for name, of_one in built.items()}))
        for remark in next(iter(built.values())).remarks:  # the data are everybody's
            tell(remark)
        summary: dict[str, Any] = {}
        try:
            for name, (config, setup, _) in built.items():
                summary |= start(config, _folder(path, name), setup, progress(name, config))
        except BadInput:  # e.g. there is no such cluster
            if not any(_folder(path, name).exists() for name in built):
                (path / "config.toml").unlink()
            raise
        return _finish(path, summary)


def _built(configs: Mapping[str, Config], *, loading: bool) -> dict[str, Built]:
    """Everybody's setup: the same clients, but that a tempered run keeps a part of its training data aside."""
    dealt: dict[DataSection, Built] = {}
    found: dict[str, Built] = {}
    for name, config in configs.items():
        if config.data not in dealt:
            dealt[config.data] = build(config, progress=loading)
        settled, setup, remarks = dealt[config.data]
        federation = config.federation.model_copy(update={"cohort": settled.federation.cohort})
        own = dataclasses.replace(config, data=settled.data, federation=federation)
        found[name] = Built(own, setup._replace(algorithm=config.algorithm), remarks)
        check_setup(found[name].setup)
    return found


def is_comparison(path: Path) -> bool:
    """Whether the directory holds a comparison instead of a single run."""
    return "compare" in read_tables(path)


def parts(path: Path) -> dict[str, Path]:
    """The run directory of each algorithm of a comparison."""
    return {name: _folder(path, name) for name in _names(path, read_tables(path))}


def _names(path: Path, tables: Mapping[str, Any]) -> list[str]:
    """The algorithms that a comparison's config.toml lists; directories are called by them."""
    found = section_of(tables, "compare").get("algorithms")
    fine = isinstance(found, list) and found and all(isinstance(name, str) and name.strip(".") for name in found)
    if not isinstance(found, list) or not fine or len(set(found)) < len(found) or any("/" in name for name in found):
        raise BadInput(f"{path / 'config.toml'} cannot be used: its compare.algorithms is no list of algorithms")
    return found


def resume_comparison(
    path: Path, progress: Callable[[str, Config], Progress], *, loading: bool = False, any_version: bool = False
) -> dict[str, Any]:
    """Go on with a comparison that was cut off: finished runs stay, the others are finished or begun."""
    tables = read_tables(path)
    names = _names(path, tables)
    configs = plan({section: table for section, table in tables.items() if section != "compare"}, names)
    summary: dict[str, Any] = {}
    finished = all((folder / "summary.json").exists() for folder in (path, *(_folder(path, name) for name in names)))
    with nullcontext() if finished else locked(path):
        for name, config in configs.items():
            folder = _folder(path, name)
            if (folder / "config.toml").exists():
                summary |= resume(folder, progress(name, config), loading=loading, any_version=any_version)
            else:
                built = build(config, progress=loading)
                summary |= start(built.config, folder, built.setup, progress(name, config))
        return summary if finished else _finish(path, summary)


def _folder(path: Path, name: str) -> Path:
    return path / name.replace(":", "-").replace("+", "-")


def _tables(configs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    """The algorithms with their fields, and what all of them have in common; what differs is in their names."""
    first, *others = (config.tables() for config in configs.values())
    own = {f"algorithm.{json.dumps(name)}": config.tables()["algorithm"] for name, config in configs.items()}
    for fields in own.values():
        del fields["name"]

    def common(section: str) -> dict[str, Any]:
        return {
            key: value
            for key, value in first[section].items()
            if all(key in other[section] and other[section][key] == value for other in others)
        }

    sections = {section: common(section) for section in first if section != "algorithm"}
    return {"compare": {"algorithms": list(configs)}, **sections, **own, "versions": versions()}


def _finish(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
    write_file(path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    return summary
