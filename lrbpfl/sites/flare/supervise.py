"""A run as a chain of jobs: submit a leg, wait until it ended, submit the next, until the run is complete."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lrbpfl.errors import BadInput, shown
from lrbpfl.sites.flare import wire
from lrbpfl.sites.flare.admin import ENDED, Admin, Gone, Server
from lrbpfl.sites.flare.job import OUTCOME, RUN, WIRE, write_job
from lrbpfl.sites.job import ROSTER

POLL = 1.0  # seconds between two looks
SOON = 3.0  # seconds that nobody need hear of
OTHERS = 15.0  # seconds a later leg waits for sites that it could do without
BACK = 12.0  # seconds a site must be idle beside a running leg before that is ended for its sake
FRUITLESS = 4  # legs in a row without a new round, then we give up

T = TypeVar("T")
Tell = Callable[[str], None]
Reached = Callable[[Mapping[str, Any]], None]


def supervise(
    admin: Admin,
    job: Mapping[str, Any],
    out: Path,
    tell: Tell,
    patience: float,
    write: Callable[[Path, Mapping[str, Any]], Path] = write_job,
    show: Reached | None = None,
) -> dict[str, Any]:
    """The last leg's outcome and the `wire` of all; public files go to `out`. Ctrl-C ends the leg and goes through.

    `show` hears how far the run is, as far as that is known, every second or so.
    """
    reached, fruitless, expected, traffic = (-1, 0), 0, set(job["sites"]), wire.Traffic()
    # Who is not there when a run begins can join only the next, so the first leg waits longer for everybody.
    others = OTHERS if (out / ROSTER).exists() else patience
    while True:
        expected, others = gather(admin, job, expected, tell, patience, others), OTHERS
        with tempfile.TemporaryDirectory(prefix="lrbpfl-") as scratch:
            folder = write(Path(scratch) / f"lrbpfl-{job['run']}", job)
            since = patient(admin.server, tell, patience).since
            number = patient(partial(admin.submit, folder), tell, patience)
            watch = Watch(admin, number, job, since, tell, patience, show)
            try:
                watch.until_ended()
            except BaseException:
                _abort(admin, number)
                raise
            outcome = None
            if not watch.lost:
                outcome, sent = _fetch(admin, number, Path(scratch), out, tell, patience)
                traffic = wire.add(traffic, sent)
        if outcome is None:
            if not (watch.ours or watch.lost):
                tell("this leg left no outcome: what it had finished is kept, and the next goes on from there")
        else:
            if outcome.get("error"):
                raise BadInput(outcome["error"])
            for sentence in outcome.get("told", []):
                tell(str(sentence))
            if outcome.get("complete"):
                for site, why in sorted(outcome.get("lost", {}).items()):
                    tell(f"{site} was away at the end: {why}")
                return {**outcome, "wire": traffic}
            tell(f"leg {outcome['leg']} ended after round {outcome['rounds']} of {outcome['of']}")
        before, reached = reached, max(reached, _reached(outcome, out, reached))
        fruitless = 0 if reached > before else fruitless + 1
        if fruitless >= FRUITLESS:
            raise BadInput(f"{fruitless} legs in a row ended without a new round: the logs at the server say why")


def gather(
    admin: Admin, job: Mapping[str, Any], expected: set[str], tell: Tell, patience: float, others: float
) -> set[str]:
    """Wait until as many sites as the run needs are connected, and for `others` seconds for all expected; who is."""
    begun, told = time.monotonic(), False
    while True:
        connected = patient(lambda: set(admin.sites()), tell, patience)
        here = sorted(connected & set(job["sites"]) if job["sites"] else connected)
        missing, are_enough = sorted(expected - set(here)), len(here) >= job["minimum"]
        waited = time.monotonic() - begun
        if are_enough and not missing:
            return set(here)
        if are_enough and waited > others:
            tell(f"going on without {', '.join(missing)}: not connected")
            return set(here)
        names = ", ".join(here) or "none"
        if not are_enough and waited > patience:
            raise BadInput(
                f"after {patience:g} seconds {len(here)} of the run's sites are connected ({names}), "
                f"and it needs {job['minimum']}: start the others, then the same command again"
            )
        if not told and waited > SOON:
            limit = others if are_enough else patience
            missing_names = f", not {', '.join(missing)}" if missing else ""
            tell(f"waiting for sites for up to {limit:g} seconds: connected are {names}{missing_names}")
            told = True
        time.sleep(POLL)


class Watch:
    """One leg, from its submission until it ended."""

    def __init__(
        self,
        admin: Admin,
        number: str,
        job: Mapping[str, Any],
        since: float,  # when the server was started
        tell: Tell,
        patience: float,
        show: Reached | None,
    ) -> None:
        self.admin, self.number, self.job, self.since = admin, number, job, since
        self.tell, self.patience, self.show = tell, patience, show
        self.ours = False  # whether we ended it
        self.lost = False  # whether the server died under it: it has nothing to download then
        self.at_start: set[str] | None = None
        self.worked: set[str] = set()
        self.idle: dict[str, float] = {}  # since when

    def until_ended(self) -> None:
        """Return when the server is done with the leg, or lost it."""
        begun = time.monotonic()
        while True:
            status, server, sites = patient(self._look, self.tell, self.patience)
            now = time.monotonic()
            if status.startswith(ENDED):
                return
            if self.number in server.jobs:
                begun = now
                if self.show:
                    self.show(patient(partial(self.admin.progress, self.number), self.tell, self.patience))
            elif status == "RUNNING" and (server.since != self.since or now - begun > self.patience):
                # It says so for ever of a job that its own crash ended.
                self.tell("the server lost this leg: what had been finished is kept, and the next goes on")
                self.lost = True
                return
            elif now - begun > self.patience:
                raise BadInput(f"the server did not start the leg within {self.patience:g} seconds ({shown(status)})")
            if not self.ours and (back := self._back(sites, now)):
                self.tell(f"{', '.join(back)} back without a job: this leg ends, the next takes all")
                self.admin.abort(self.number)
                self.ours = True
            time.sleep(POLL)

    def _look(self) -> tuple[str, Server, dict[str, set[str]]]:
        return self.admin.status(self.number), self.admin.server(), self.admin.sites()

    def _back(self, sites: Mapping[str, set[str]], now: float) -> list[str]:
        """Sites of the run that came, or came back, too late for this leg while others work in it.

        A site that was there from the start and never worked refused the leg, and would refuse the next.
        """
        wanted = set(self.job["sites"]) or set(sites)
        working = {site for site, jobs in sites.items() if self.number in jobs}
        if self.at_start is None:
            self.at_start = set(sites)
        self.worked |= working
        late = {site for site in wanted & set(sites) - working if site in self.worked or site not in self.at_start}
        self.idle = {site: self.idle.get(site, now) for site in late} if working else {}
        return sorted(site for site, since in self.idle.items() if now - since > BACK)


def patient(ask: Callable[[], T], tell: Tell, patience: float) -> T:
    """Ask until the server answers, but not for ever."""
    until, told = time.monotonic() + patience, False
    while True:
        try:
            return ask()
        except Gone as error:
            if time.monotonic() > until:
                raise BadInput(f"{error}; after {patience:g} seconds we stop asking") from None
            if not told:
                tell(f"{error}; asking again for up to {patience:g} seconds")
                told = True
            time.sleep(POLL)


def _reached(outcome: Mapping[str, Any] | None, out: Path, before: tuple[int, int]) -> tuple[int, int]:
    """How far the run is: its rounds, or for a leg without an outcome the length of what it wrote about them."""
    metrics = out / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    return (int(outcome["rounds"]) if outcome else before[0], size)


def _abort(admin: Admin, number: str) -> None:
    """End the leg if anybody listens; its sites would work on for nobody."""
    try:
        admin.abort(number)
    except BadInput:
        return


def _fetch(
    admin: Admin, number: str, scratch: Path, out: Path, tell: Tell, patience: float
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The leg's outcome, None if it left none, and what was sent; its public files go to `out`."""
    found = patient(lambda: admin.download(number, scratch), tell, patience)
    if (found / RUN).is_dir():
        shutil.copytree(found / RUN, out, dirs_exist_ok=True)
    return _table(found / OUTCOME), _table(found / WIRE) or {}


def _table(file: Path) -> dict[str, Any] | None:
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) else None
