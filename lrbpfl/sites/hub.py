"""The hub of a federation between sites: leads one leg of a run, from its last checkpoint as far as it comes."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrbpfl.core.descent import Data
from lrbpfl.data.order import natural_order
from lrbpfl.disk import locked, write_file
from lrbpfl.engines.lazy import Roster
from lrbpfl.engines.loop import Round
from lrbpfl.engines.work import ClientData, Setup, granted
from lrbpfl.errors import BadInput, plain
from lrbpfl.experiments.build import checked_setup
from lrbpfl.experiments.config import Config
from lrbpfl.experiments.runner import Progress, carry_out, check_origin, made_with, read_summary
from lrbpfl.experiments.store import Run
from lrbpfl.sites import letters
from lrbpfl.sites.engine import Sites, TooFew
from lrbpfl.sites.job import DTYPES, ROSTER, Job, parse
from lrbpfl.sites.stores import Confirmed
from lrbpfl.sites.transport import Letter, Lost, Transport
from lrbpfl.trees import Tree

CONFIRMED = "confirmed.jsonl"
MOST_CLIENTS = 10**6  # of one site


Reached = Callable[[dict[str, Any]], None]


def unheard(state: dict[str, Any]) -> None:
    """Nobody asks how far a leg is."""


def lead(
    transport: Transport,
    root: Path,
    said: Mapping[str, Any],
    aborted: Callable[[], bool],
    reached: Reached = unheard,
) -> dict[str, Any]:
    """One leg of a run in `root`/runs; how far it came, who was lost on the way, and what ended it before the end.

    `reached` hears after every round how far it is.
    """
    job = parse(said)
    path = root / "runs" / job.run
    path.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, Any] = {"run": job.run, "leg": 0, "lost": {}, "told": [], "error": None}
    with locked(path):
        leg = _Leg(job, path, transport, aborted, reached)
        try:
            if not (path / "summary.json").exists():
                leg.go()
        except TooFew as fault:  # the next leg may find more
            leg.told.append(plain(fault, 1000))
        except BadInput as fault:
            outcome["error"] = plain(fault, 1000)
    complete = (path / "summary.json").exists()
    outcome |= {"leg": leg.number, "lost": leg.lost, "told": leg.told, "complete": complete}
    outcome |= {"rounds": job.config.federation.rounds if complete else leg.rounds, "of": job.config.federation.rounds}
    return {**outcome, "summary": read_summary(path) if complete else None}


class _Leg:
    """From opening letters to the end of the run, or of the sites' patience."""

    def __init__(
        self, job: Job, path: Path, transport: Transport, aborted: Callable[[], bool], reached: Reached
    ) -> None:
        self.job, self.path, self.transport, self.aborted, self.reached = job, path, transport, aborted, reached
        self.lost: dict[str, str] = {}
        self.silent: set[str] = set()  # those of the lost that said nothing: the others refused, and would again
        self.told: list[str] = []
        self.where: dict[str, str] = {}  # the site of each client, in the order of their numbers
        self.number = 0
        self._read()
        self.run = Run(path)
        self.states = Confirmed(path / CONFIRMED)
        self.run.states = self.states
        self.rounds = 0

    def go(self) -> None:
        """Open, and carry out what is left of the run."""
        self.number += 1
        named = self._names()
        if not self.where:
            self.where = _roster(named)
        joined = self._joined(named)
        setup = self._setup()
        config = _saved_each_round(self.job.config)
        if (self.path / "config.toml").exists():
            check_origin(self.path, setup, Progress(tell=self.told.append), any_version=False)
        else:
            self.run.begin(config, made_with(setup))
        self._write()
        template = setup.algorithm.init_server(setup.task, torch.Generator().manual_seed(0))
        checkpoint = self.run.load(config, template, self.told.append)
        self.rounds = checkpoint.rounds if checkpoint else 0
        engine = Sites(
            setup,
            self.transport,
            dict(enumerate(self.where.values())),
            self._join(joined),
            {"run": self.job.run, "leg": self.number},
            self.states,
            seconds=self.job.about.deadline,
            minimum=self.job.minimum,
        )
        try:
            with closing(engine):
                progress = Progress(tell=self.told.append, round=partial(self._done, engine))
                carry_out(engine, self.run, config, setup, progress, showing=partial(_show, engine, config))
        finally:
            self.lost |= engine.lost

    def _done(self, engine: Sites, ended: Round, pooled: Mapping[str, float]) -> None:
        self.rounds = ended.t + 1
        scores, away = dict(pooled), sorted(self.lost.keys() | engine.lost.keys())
        self.reached({"rounds": self.rounds, "loss": ended.mean_loss, "scores": scores, "away": away})

    def _names(self) -> dict[str, list[str]]:
        """The clients of every site that opens."""
        letter = {"run": self.job.run, "leg": self.number}
        asked = {site: dict(letter) for site in self.transport.sites}
        found: dict[str, list[str]] = {}
        for site, answer in self._open(asked):
            names = answer.get("clients")
            fits = isinstance(names, list) and 0 < len(names) <= MOST_CLIENTS and all(map(letters.is_name, names))
            if not fits or not isinstance(names, list) or len(set(names)) < len(names):
                self.lost[site] = "its clients' names are not in order"
            else:
                found[site] = names
        return dict(sorted(found.items()))

    def _joined(self, named: Mapping[str, list[str]]) -> list[str]:
        """The sites of this run that are here with the clients they joined with."""
        known: dict[str, set[str]] = {}
        for client, site in self.where.items():
            known.setdefault(site, set()).add(client)
        for site, names in named.items():
            if site not in known:
                self.lost[site] = "it was not there when this run began, and can join the next"
            elif known[site] != set(names):
                self.lost[site] = letters.REASONS["clients"]
        joined = [site for site in named if site not in self.lost]
        self._check_enough(joined)
        return joined

    def _join(self, sites: list[str]) -> set[str]:
        """Tell sites the numbers of their clients."""
        places = {client: k for k, client in enumerate(self.where)}
        stamp = {"run": self.job.run, "leg": self.number, "of": len(places), "rounds": self.rounds}
        asked = {
            site: {**stamp, "ids": {name: places[name] for name, at in self.where.items() if at == site}}
            for site in sites
        }
        joined = {site for site, _ in self._open(asked)}
        self._check_enough(sorted(joined))
        return joined

    def _check_enough(self, joined: list[str]) -> None:
        if len(joined) < self.job.minimum:
            away = "; ".join(f"{site}: {why}" for site, why in sorted(self.lost.items())) or "nobody else is connected"
            here = ", ".join(joined) or "none"
            kind = TooFew if self.silent else BadInput
            raise kind(f"the run needs {self.job.minimum} sites, and {len(joined)} joined ({here}): {away}")

    def _open(self, asked: Mapping[str, Letter]) -> Iterator[tuple[str, Letter]]:
        """The answers of the sites that open; the others are lost to this leg."""
        for site, answer in self.transport.call("open", asked, self.job.about.deadline):
            if isinstance(answer, Lost):
                self.silent.add(site)
                self.lost[site] = answer.reason
            elif fault := letters.reason(answer):
                self.lost[site] = fault
            else:
                yield site, answer

    def _setup(self) -> Setup:
        """What the hub knows: names, and the form of examples."""
        form, federation = self.job.examples(2), self.job.config.federation
        stand_in = ClientData(name="", train=Data(form.x, form.y), test=Data(form.x, form.y))
        clients = Roster(list(self.where), _Everybody(stand_in), cached=0)
        public = _public(self.job) if self.job.about.public else form.x[:0]
        if federation.cohort is not None and federation.cohort > len(clients):
            raise BadInput(f"federation.cohort = {federation.cohort}: there are only {len(clients)} clients")
        return granted(checked_setup(self.job.config, form, clients, public, len(clients), ""))

    def _read(self) -> None:
        file = self.path / ROSTER
        if not file.exists():
            return
        try:
            said = json.loads(file.read_text())
            self.number, self.where = int(said["leg"]), {str(name): str(site) for name, site in said["clients"]}
        except (OSError, ValueError, TypeError, KeyError):
            raise BadInput(f"{file} is damaged: restore it from a backup") from None

    def _write(self) -> None:
        said = {"leg": self.number, "clients": list(self.where.items())}
        write_file(self.path / ROSTER, (json.dumps(said) + "\n").encode())


class _Everybody:
    """Loads the same stand-in for everyone."""

    def __init__(self, client: ClientData) -> None:
        self.client = client

    def __call__(self, k: int) -> ClientData:
        return self.client


def _show(engine: Sites, config: Config, t: int, server: Tree) -> None:
    if t + 1 == config.federation.rounds:
        engine.show(server)


def _roster(named: Mapping[str, list[str]]) -> dict[str, str]:
    """The clients of all sites in natural order, and where each is; a name that two sites have is refused."""
    owner: dict[str, str] = {}
    for site, names in named.items():
        for name in names:
            if name in owner:
                both = f"sites {owner[name]} and {site}"
                raise BadInput(f"{both} both have a client {name!r}: rename one, or set names = 'numbers' in site.toml")
            owner[name] = site
    return {name: owner[name] for name in natural_order(owner)}


def _saved_each_round(config: Config) -> Config:
    return dataclasses.replace(config, engine=config.engine.model_copy(update={"checkpoint_every": 1}))


def _public(job: Job) -> torch.Tensor:
    """The hub's own inputs, without labels."""
    path = Path(job.about.public)
    try:
        with np.load(path, allow_pickle=False) as file:
            x = torch.from_numpy(file["x"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"sites.public: {path} cannot be read at the hub: {plain(error, 200)}") from None
    if tuple(x.shape[1:]) != job.shape or x.dtype != DTYPES[job.about.kind] or not len(x):
        raise BadInput(f"sites.public: {path} holds no inputs x of shape {job.shape} and kind {job.about.kind}")
    return x
