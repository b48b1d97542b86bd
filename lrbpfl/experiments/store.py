"""A run is a directory: nothing in it is half-written, whenever the run is killed."""

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import contiguous_format

from lrbpfl import trees
from lrbpfl.disk import fsync_directory, private_folder, write_file
from lrbpfl.errors import BadInput
from lrbpfl.experiments import config as configuration
from lrbpfl.experiments.config import Config
from lrbpfl.trees import Tree

KEPT = 2  # checkpoints


class Checkpoint(NamedTuple):
    """What a run needs to go on after `rounds` rounds."""

    rounds: int
    server: Tree
    states: dict[int, Tree]
    metrics_bytes: int  # how long the record was


class Run:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: Config) -> "Run":
        """A new directory with its configuration; it appears whole or not at all."""
        create_directory(path, {**config.tables(), "versions": versions()})
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> tuple["Run", Config]:
        """An existing run and its configuration."""
        tables = read_tables(path)
        return cls(path), configuration.parse(tables)

    def record(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to the record, metrics.jsonl; a number that is not finite becomes null."""
        with self.metrics.open("a") as file:
            for line in lines:
                clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
                file.write(json.dumps(clean, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_record(self) -> list[dict[str, Any]]:
        """All lines of the record."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def save_checkpoint(self, config: Config, rounds: int, server: Tree, states: Mapping[int, Tree]) -> None:
        """Write the server's state and, of the clients', those that changed in the last round; keep the last two."""
        before = self._describe(self._checkpoints()[-1]) if self._checkpoints() else {"states": {}}
        kept = dict(before["states"])
        for k, state in states.items():
            write_file(self._state_file(k, rounds), _packed(state), private=True)
            kept[str(k)] = rounds
        description = {
            "rounds": rounds,
            "states": kept,
            "metrics_bytes": self.metrics.stat().st_size if self.metrics.exists() else 0,
            "config": fingerprint(config),
        }
        aside = Path(tempfile.mkdtemp(dir=self.path, prefix=".checkpoint-"))
        write_file(aside / "server.safetensors", _packed(server))
        write_file(aside / "checkpoint.json", json.dumps(description).encode())
        target = self.path / "checkpoint" / f"{rounds:06d}"
        target.parent.mkdir(exist_ok=True)
        if target.exists():  # the last round, done again: no moment may find half of a checkpoint in this place
            target.rename(aside.with_name(f"{aside.name}-old"))
        aside.rename(target)
        fsync_directory(target.parent)
        self._clear()
        self._forget()

    def load_checkpoint(self, config: Config, server: Tree, states: Mapping[int, Tree]) -> Checkpoint | None:
        """The newest checkpoint before the last round, in the structure of the templates; None if there is none.

        The last round writes results too: a run killed among them does that round again.
        """
        for path in reversed(self._checkpoints()):
            description = self._describe(path)
            if description["config"] != fingerprint(config):
                raise BadInput(f"{path} was written under another configuration than {self.path / 'config.toml'}")
            if description["rounds"] >= config.federation.rounds:
                continue
            return Checkpoint(
                rounds=description["rounds"],
                server=_unpacked(path / "server.safetensors", server),
                states={
                    int(k): _unpacked(self._state_file(int(k), rounds), states[int(k)])
                    for k, rounds in description["states"].items()
                },
                metrics_bytes=description["metrics_bytes"],
            )
        return None

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut from the record and the folder what was written after the checkpoint."""
        if self.metrics.exists():
            os.truncate(self.metrics, checkpoint.metrics_bytes if checkpoint else 0)
        self._clear()

    def personal_file(self, k: int) -> Path:
        """Where client k's own model lies."""
        return self._client_folder(k) / "personal.safetensors"

    def _client_folder(self, k: int) -> Path:
        return private_folder(self.path / "clients") / f"{k:05d}"

    def _state_file(self, k: int, rounds: int) -> Path:
        return self._client_folder(k) / f"state-{rounds:06d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoint").glob("[0-9]*"))

    def _describe(self, checkpoint: Path) -> dict[str, Any]:
        path = checkpoint / "checkpoint.json"
        try:
            description: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        return description

    def _clear(self) -> None:
        """Drop what was written aside and is not needed any more."""
        for aside in self.path.glob(".checkpoint-*"):
            shutil.rmtree(aside)

    def _forget(self) -> None:
        """Drop all but the last checkpoints, and the client states that none of them needs."""
        checkpoints = self._checkpoints()
        needed = {
            self._state_file(int(k), rounds)
            for path in checkpoints[-KEPT:]
            for k, rounds in self._describe(path)["states"].items()
        }
        for path in checkpoints[:-KEPT]:
            shutil.rmtree(path)
        for file in (self.path / "clients").glob("*/state-*.safetensors"):
            if file not in needed:
                file.unlink()


def create_directory(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """A new directory holding config.toml; it appears whole or not at all."""
    refuse_existing(path)
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        write_file(aside / "config.toml", configuration.to_toml(tables).encode())
        aside.chmod(0o755)
        aside.rename(path)
    except OSError as error:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
        raise BadInput(f"{path} cannot be created: {error.strerror}") from None


def refuse_existing(path: Path) -> None:
    """A run never writes into a directory that is there already."""
    try:
        there = path.exists()
    except OSError as error:
        raise BadInput(f"{path} cannot be created: {error.strerror}") from None
    if there:
        go_on = f"lrbpfl resume {quote(str(path))}"
        raise BadInput(f"{path} exists already: name another with --out, or go on with: {go_on}")


def read_tables(path: Path) -> dict[str, Any]:
    """The configuration of a run directory, without the versions it ran under."""
    if not (path / "config.toml").is_file():
        raise BadInput(f"{path} is no run directory: it holds no config.toml")
    return configuration.read(path / "config.toml")


def fingerprint(config: Config) -> str:
    """A hash of everything in the configuration that changes a number."""
    text = json.dumps(config.identity(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """What the run was made with: packages, Python, machine, and the commit where there is one."""
    found = {name: version(name) for name in ("lrbpfl", "torch", "numpy")}
    found |= {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    source = Path(__file__).resolve().parents[2]
    if (source / ".git").exists():
        commit = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        found["commit"] = commit.stdout.strip()
    return found


def _packed(tree: Tree, metadata: dict[str, str] | None = None) -> bytes:
    # Copies, because a file takes no two tensors in one place of memory.
    copies = {name: leaf.clone(memory_format=contiguous_format) for name, leaf in trees.named_leaves(tree)}
    data: bytes = save(copies, metadata=metadata)
    return data


def _unpacked(path: Path, template: Tree) -> Tree:
    try:
        # Copies, because a file's tensors lie anywhere in memory, and where they lie can decide the last bit.
        return trees.rebuild(template, {name: leaf.clone() for name, leaf in load_file(path).items()})
    except (OSError, SafetensorError, KeyError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> BadInput:
    return BadInput(f"{path} cannot be read, so this run cannot go on: {error}")
