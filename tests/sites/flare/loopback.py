"""A federation of toys on the loopback, and runs of it that a test can disturb."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lrbpfl
from lrbpfl.sites.flare import kits, project
from lrbpfl.sites.flare.admin import Admin
from lrbpfl.sites.flare.job import write_job
from lrbpfl.sites.flare.local import Running, free_ports
from lrbpfl.sites.flare.supervise import supervise

TOY = Path(__file__).parent / "toy"
ROOT = Path(next(iter(lrbpfl.__path__))).parent
SITES = ("site-1", "site-2", "site-3")
PATIENCE = 60.0
write_toy = partial(write_job, hub="toy_sites.HubApp", site="toy_sites.SiteApp")


def build(folder: Path, sites: Iterable[str] = SITES, name: str = "toys") -> "Federation":
    """Kits of a project whose server and sites let the toy in."""
    port, admin_port = free_ports(2)
    path = project.create(folder, name, "localhost", list(sites), port, admin_port)
    path.write_text(
        path.read_text() + '\n[[admins]]\nname = "member@toys.org"\norganisation = "hub"\nrole = "member"\n'
    )
    for kit in kits.make_kits(folder):
        file = kit / "local" / "resources.json"
        if file.exists():
            resources = json.loads(file.read_text())
            resources["class_allow_list"].append("toy_sites.")
            file.write_text(json.dumps(resources))
    return Federation(folder / kits.KITS, tuple(sites), port, f"admin@{name}.org")


class Federation:
    """Kits, and where their runs show how far they are."""

    def __init__(self, folder: Path, sites: tuple[str, ...], port: int, admin: str) -> None:
        self.folder, self.sites, self.port = folder, sites, port
        self.admin, self.server = folder / admin, folder / "localhost"

    def running(self) -> Running:
        paths = {"PYTHONPATH": f"{ROOT}:{TOY}"}
        return Running(self.server, [self.folder / site for site in self.sites], self.port, paths)

    def state(self, run: str) -> dict[str, Any]:
        """The toy hub's checkpoint."""
        try:
            found: dict[str, Any] = json.loads((self.server / "hub" / "runs" / run / "state.json").read_text())
        except (OSError, ValueError):
            return {"leg": 0, "rounds": 0, "log": []}
        return found

    def job(self, run: str, rounds: int, seconds: float = 0.3, minimum: int = 2, **config: Any) -> dict[str, Any]:
        told = {"rounds": rounds, "seconds": seconds, "limit": 4.0, **config}
        return {"run": run, "sites": list(self.sites), "minimum": minimum, "config": told}


class Supervised:
    """A supervised run in a thread of its own, so that a test can disturb it."""

    def __init__(
        self,
        federation: Federation,
        job: dict[str, Any],
        out: Path,
        write: Callable[[Path, Mapping[str, Any]], Path] = write_toy,
    ) -> None:
        self.federation, self.job, self.out, self.write = federation, job, out, write
        self.told: list[str] = []
        self.seen: list[Mapping[str, Any]] = []
        self.outcome: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with Admin(self.federation.admin) as admin:
                self.outcome = supervise(admin, self.job, self.out, self._tell, PATIENCE, self.write, self.seen.append)
        except BaseException as error:
            self.error = error

    def _tell(self, sentence: str) -> None:
        self.told.append(f"{time.strftime('%H:%M:%S')} {sentence}")

    def until_round(self, number: int, leg: int = 0) -> None:
        """Wait for a round of this leg or a later one."""

        def reached() -> bool:
            state = self.federation.state(self.job["run"])
            return bool(state["rounds"] >= number and state["leg"] >= leg)

        until(reached, 120, lambda: f"{self.told} {self.error} {self.federation.state(self.job['run'])}")

    def end(self, seconds: float = 180) -> dict[str, Any]:
        """The outcome of the whole run."""
        until(lambda: not self.thread.is_alive(), seconds, lambda: f"{self.told}")
        assert self.error is None, (self.error, self.told)
        return self.outcome


def until(done: Callable[[], bool], seconds: float, say: Callable[[], str] = str) -> None:
    """Wait, but not for ever."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, say()
        time.sleep(0.1)
