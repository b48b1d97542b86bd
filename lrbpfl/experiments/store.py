"""A run is a directory: nothing in it is half-written, whenever the run is killed."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from lrbpfl import documents, trees
from lrbpfl.disk import LOCK, DiskFault, locked, make_durable, private_folder, remove_folder, write_file
from lrbpfl.documents import FORMAT, Document
from lrbpfl.errors import BadInput
from lrbpfl.experiments import config as configuration
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.provenance import versions
from lrbpfl.journal import Journal, Mark
from lrbpfl.states import Folder, States
from lrbpfl.trees import Tree

KEPT = 2  # checkpoints
SERVER, SAID = "server.safetensors", "checkpoint.json"  # what a checkpoint is made of


class Checkpoint(NamedTuple):
    """What a run needs to go on after `rounds` rounds, beside what clients keep."""

    rounds: int
    server: Tree
    record: Mark
    states: Mark


class Run:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.record = Journal(self.metrics)
        self.states: States = Folder(path / "clients")

    @classmethod
    def create(cls, path: Path, config: Config, made_with: Mapping[str, str] | None = None) -> "Run":
        """A new run in a directory that was claimed for it."""
        run = cls(path)
        run.begin(config, made_with or {})
        return run

    def begin(self, config: Config, made_with: Mapping[str, str]) -> None:
        """Write down the configuration, and what the run is made with."""
        write_tables(self.path, {**config.tables(), "versions": {**versions(), **made_with}})

    @classmethod
    def open(cls, path: Path) -> tuple["Run", Config]:
        """An existing run and its configuration."""
        return cls(path), configuration.parse(read_tables(path))

    def save(self, config: Config, rounds: int, server: Tree) -> None:
        """Write a checkpoint: the server's state, and marks of the record and of what clients keep; keep the last two.

        What it costs goes with the clients that took part since the last one, not with how many there are.
        """
        about = {"format": FORMAT, "kind": "server", "rounds": rounds}
        document, folder = Document(about, dict(trees.named_leaves(server))), self._checkpoint(rounds)
        documents.write(folder / SERVER, document)
        said = {"rounds": rounds, "record": self.record.mark, "states": self.states.save()}
        said |= {"config": fingerprint(config), "server": document.digest}
        write_file(folder / SAID, json.dumps({**said, "checksum": _checksum(said)}).encode(), private=True)
        make_durable(folder)
        make_durable(folder.parent)
        self._tidy()

    def load(self, config: Config, template: Tree, tell: Callable[[str], None]) -> Checkpoint | None:
        """Go back to the newest checkpoint that is whole, in everything; None: to the beginning, where there is none.

        The last round writes results too: a run killed among them does that round again. A checkpoint that is damaged,
        in itself or in the states that came with it, is told, and the one before is taken.
        """
        faults: list[BadInput] = []
        for rounds in reversed([rounds for rounds in self._checkpoints() if rounds < config.federation.rounds]):
            try:
                checkpoint = self._read(rounds, config, template)
                self.states.start(rounds, checkpoint.states)
            except (Unfit, DiskFault):
                raise
            except BadInput as error:
                faults.append(error)
                continue
            for fault in faults:
                tell(f"{fault}; going on from round {rounds} instead")
            self._rewind(checkpoint)
            self._tidy()
            return checkpoint
        if faults:
            raise faults[0]
        self.states.start(0)
        self._rewind(None)
        return None

    def read_record(self) -> list[dict[str, Any]]:
        """All lines of the record."""
        return list(self.record.read())

    def personal_file(self, k: int) -> Path:
        """Where client k's own model lies."""
        return private_folder(self.path / "clients") / f"{k:05d}" / "personal.safetensors"

    def _rewind(self, checkpoint: Checkpoint | None) -> None:
        """Cut from the record and the folder what was written after the checkpoint."""
        self.record.cut(checkpoint.record if checkpoint else None)
        for number in self._checkpoints():
            if number > (checkpoint.rounds if checkpoint else 0):
                remove_folder(self._checkpoint(number))

    def _tidy(self) -> None:
        """Drop all but the last checkpoints, and what of the clients' states none of these needs."""
        there = self._checkpoints()
        for number in there[:-KEPT]:
            remove_folder(self._checkpoint(number))
        self.states.forget(there[-KEPT] if len(there) >= KEPT else 0)

    def _read(self, rounds: int, config: Config, template: Tree) -> Checkpoint:
        path, said = self._checkpoint(rounds), self._said(rounds)
        if said["config"] != fingerprint(config):
            raise Unfit(f"{path} was written under another configuration than {self.path / 'config.toml'}")
        document = documents.read(path / SERVER, "server")
        if document.digest != said["server"]:
            raise BadInput(f"{path / SERVER} is not the file that {path / SAID} names")
        server = documents.tree(path / SERVER, document, template)
        return Checkpoint(rounds=rounds, server=server, record=said["record"], states=said["states"])

    def _said(self, rounds: int) -> dict[str, Any]:
        """What a checkpoint says of itself."""
        path = self._checkpoint(rounds) / SAID
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            said = None
        if not isinstance(said, dict) or said.pop("checksum", None) != _checksum(said) or said["rounds"] != rounds:
            raise BadInput(f"{path} was altered or damaged: its content does not fit its checksum")
        return said

    def _checkpoint(self, rounds: int) -> Path:
        return self.path / "checkpoint" / f"{rounds:06d}"

    def _checkpoints(self) -> list[int]:
        """The rounds after which there is one, rising."""
        files = (self.path / "checkpoint").glob(f"[0-9]*/{SAID}")  # written last
        return sorted(int(file.parent.name) for file in files if file.parent.name.isdigit())


class Unfit(BadInput):
    """A checkpoint that is whole, but of another run."""


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The directory, made if it is not there, which nobody else writes inside; one that stays empty goes again."""
    try:
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskFault(f"{path} cannot be created: {error.strerror}") from None
    try:
        with locked(path):
            yield
    finally:
        if made:
            with suppress(OSError):
                path.rmdir()


def write_tables(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Make a directory a run's or a comparison's by its config.toml; it must hold nothing else yet."""
    refuse_existing(path)
    write_file(path / "config.toml", configuration.to_toml(tables).encode())


def refuse_existing(path: Path) -> None:
    """A run never writes into a directory that holds something already."""
    try:
        leftovers = {LOCK, ".config.toml.part"}
        there = path.exists() and (not path.is_dir() or bool({entry.name for entry in path.iterdir()} - leftovers))
    except OSError as error:
        raise BadInput(f"{path} cannot be created: {error.strerror}") from None
    if there:
        go_on = f"lrbpfl resume {quote(str(path))}"
        raise BadInput(f"{path} exists already: name another with --out, or go on with: {go_on}")


def read_tables(path: Path) -> dict[str, Any]:
    """The configuration of a run directory, without what it was made with."""
    if not (path / "config.toml").is_file():
        raise BadInput(f"{path} is no run directory: it holds no config.toml")
    return configuration.read(path / "config.toml")


def read_origin(path: Path) -> dict[str, Any]:
    """What a run was made with, as far as it says."""
    found = configuration.read(path / "config.toml", whole=True).get("versions", {})
    return found if isinstance(found, dict) else {}


def _checksum(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def fingerprint(config: Config) -> str:
    """A hash of everything in the configuration that changes a number."""
    text = json.dumps(config.identity(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
