"""The two ends of a job: the hub's main function and the site's published ones, both as thin as they can be."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from os import environ
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from nvflare.collab import collab  # it has no types, so its decorators below are untyped
from nvflare.collab.api.exceptions import RunAborted

from lrbpfl.disk import write_file
from lrbpfl.errors import plain
from lrbpfl.sites.flare import wire
from lrbpfl.sites.flare.job import OUTCOME, PROGRESS, RUN, WIRE, unpack
from lrbpfl.sites.job import ROSTER
from lrbpfl.sites.transport import Letter, Lost, What

CALLS = ("open", "update", "evaluate", "close", "ping")
PUBLIC = ("config.toml", "metrics.jsonl", "summary.json", "clients.json", "classes.json", ROSTER)
SHARED = "W-*.safetensors"
GONE, LATE = "not connected", "no answer in time"
GRACE = 15.0  # seconds beyond a call's own time limit until we stop waiting for NVFlare to say so


class Calls:
    """Calls to sites over NVFlare, for the thread of the main function."""

    def __init__(self, aborted: Callable[[], bool]) -> None:
        self.aborted, self.traffic = aborted, wire.Traffic()
        self.sites = sorted(client.name for client in collab.clients)

    def call(self, what: What, letters: Mapping[str, Letter], seconds: float) -> Iterator[tuple[str, Letter | Lost]]:
        """Send all letters now; the answers as they come, and for each missing one the reason."""
        if what not in CALLS:
            raise ValueError(what)
        arrived: Queue[tuple[str, Letter | Lost]] = Queue()
        for name, letter in letters.items():
            if name not in self.sites:
                arrived.put((name, Lost(GONE)))
                continue
            wire.count(self.traffic, what, letter, up=False)
            group = collab.get_clients([name])(blocking=False, timeout=float(seconds))
            answers = getattr(group, what)(letter=letter)
            threading.Thread(target=_collect, args=(name, answers, arrived), daemon=True).start()
        return self._answers(what, set(letters), arrived, seconds)

    def _answers(
        self, what: str, waiting: set[str], arrived: "Queue[tuple[str, Letter | Lost]]", seconds: float
    ) -> Iterator[tuple[str, Letter | Lost]]:
        left = float(seconds) + GRACE
        while waiting:
            if self.aborted():
                raise RunAborted("the leg was aborted")
            try:
                name, answer = arrived.get(timeout=0.2)
            except Empty:
                left -= 0.2
                if left <= 0:
                    yield from ((name, Lost(LATE)) for name in sorted(waiting))
                    return
                continue
            waiting.discard(name)
            if not isinstance(answer, Lost):
                wire.count(self.traffic, what, answer, up=True)
            elif self.aborted():
                raise RunAborted("the leg was aborted")
            yield name, answer


def _collect(name: str, answers: Any, arrived: "Queue[tuple[str, Letter | Lost]]") -> None:
    """Wait for one site's answer; of a failure its type alone is kept, texts may hold anything."""
    try:
        found = [answer for _, answer in answers]
        error = answers.failures.get(name)
        cause = plain(getattr(error, "cause_type", None) or GONE, 60)
        kind = LATE if cause == "TimeoutError" else cause
    except Exception as fault:
        found, kind = [], type(fault).__name__
    if found and isinstance(found[0], dict):
        arrived.put((name, found[0]))
    else:
        arrived.put((name, Lost("no letter" if found else kind)))


class HubApp:
    """Leads one leg of a run at the server."""

    def __init__(self, job: str) -> None:
        self.job = unpack(job)

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> str:
        """One leg; its outcome and the run's public files are left where the admin's download finds them."""
        from lrbpfl.sites.hub import lead

        context, workspace = collab.context, collab.workspace
        root = Path(environ.get("LRBPFL_HUB") or Path(workspace.get_root_dir(), "hub"))
        results = Path(workspace.get_run_dir(collab.fl_ctx.get_job_id()))

        def aborted() -> bool:
            return bool(context.is_aborted())

        calls, state = Calls(aborted), dict[str, Any]()
        collab.fl_ctx.get_engine().register_app_command(PROGRESS, lambda topic, data, context: dict(state))
        try:
            outcome = lead(calls, root, self.job, aborted, state.update)
        finally:  # an aborted leg has finished rounds too
            write_file(results / WIRE, json.dumps(calls.traffic).encode())
            publish(root / "runs" / str(self.job["run"]), results / RUN)
        write_file(results / OUTCOME, (json.dumps(outcome, indent=2) + "\n").encode())
        return "done"


def publish(run: Path, where: Path) -> None:
    """Copy what an admin may see of a run."""
    files = [run / name for name in PUBLIC] + sorted(run.glob(SHARED))
    for file in files:
        if file.is_file() and not file.is_symlink():
            where.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, where / file.name)


class SiteApp:
    """Answers the hub's letters at a site."""

    def __init__(self, job: str) -> None:
        self.job = unpack(job)

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """The site's own files are beside its kit."""
        from lrbpfl.sites.site import Site

        self.site = Site(collab.site_name, Path(collab.workspace.get_root_dir()), self.job)

    @collab.final  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """Let the site's files go."""
        if hasattr(self, "site"):
            self.site.end()

    @collab.publish  # type: ignore[untyped-decorator]
    def open(self, letter: dict[str, Any]) -> dict[str, Any]:
        """The first letter of a leg."""
        return self._answer("open", letter)

    @collab.publish  # type: ignore[untyped-decorator]
    def update(self, letter: dict[str, Any]) -> dict[str, Any]:
        """A round's training."""
        return self._answer("update", letter)

    @collab.publish  # type: ignore[untyped-decorator]
    def evaluate(self, letter: dict[str, Any]) -> dict[str, Any]:
        """An evaluation."""
        return self._answer("evaluate", letter)

    @collab.publish  # type: ignore[untyped-decorator]
    def close(self, letter: dict[str, Any]) -> dict[str, Any]:
        """The last letter of a leg."""
        return self._answer("close", letter)

    @collab.publish  # type: ignore[untyped-decorator]
    def ping(self, letter: dict[str, Any]) -> dict[str, Any]:
        """A sign of life."""
        return self._answer("ping", letter)

    def _answer(self, what: str, letter: Letter) -> Letter:
        """Only the server is answered: NVFlare lets the sites of a job call each other."""
        if collab.caller != "server":
            return {"error": "caller", "type": "PermissionError"}
        return self.site.answer(what, letter)
