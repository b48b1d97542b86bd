"""A server and sites on this machine, for demonstrations and tests; whatever was started is stopped for sure."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lrbpfl.errors import BadInput

READY = 60.0  # seconds a process has to come up
JOB = b"_process"  # in the module names of job processes
ENDING = 8.0  # seconds between asking a process to end and making it


def free_ports(many: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(many)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Running:
    """Kits that run here; leaving the context ends them, also after an exception, Ctrl-C or SIGTERM."""

    def __init__(self, server: Path, sites: Iterable[Path], port: int, environment: Mapping[str, str] | None = None):
        self.server, self.sites, self.port = server.resolve(), [site.resolve() for site in sites], port
        here = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        self.environment = {**os.environ, **here, **(environment or {})}
        self.started: dict[Path, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Running":
        self.before = signal.getsignal(signal.SIGTERM)
        with suppress(ValueError):  # not in the main thread, where signals are not ours
            signal.signal(signal.SIGTERM, _leave)
        try:
            self.start(self.server)
            self._until(self._listens, f"the server did not come up within {READY:g} seconds", self.server)
            for site in self.sites:
                self.start(site)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ValueError):  # a second Ctrl-C must not leave half of them running
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.stop()
        with suppress(ValueError):
            signal.signal(signal.SIGINT, interrupt or signal.SIG_DFL)
            signal.signal(signal.SIGTERM, self.before or signal.SIG_DFL)

    def start(self, kit: Path) -> None:
        """Run a kit as its run.sh does, in a process group of its own; what it says goes to console.txt."""
        self._reap()  # it may be started anew
        with (kit / "console.txt").open("ab") as console:
            self.started[kit] = subprocess.Popen(
                ["bash", str(kit / "run.sh")],
                stdout=console,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End all that was started: ask, wait, and then do not ask."""
        kits = [self.server, *self.sites]
        for sign in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + ENDING
            while alive := [pid for kit in kits for pid in processes(kit)]:
                for pid in alive:
                    _send(pid, signal.SIGCONT)  # a frozen process hears nothing but this and the last one
                    _send(pid, sign)
                self._reap()
                if time.monotonic() > until:
                    break
                time.sleep(0.2)
        self._reap()

    def _reap(self) -> None:
        for process in self.started.values():
            process.poll()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _until(self, done: Callable[[], bool], sentence: str, kit: Path) -> None:
        until = time.monotonic() + READY
        while not done():
            ended = self.started[kit].poll() is not None
            if ended or time.monotonic() > until:
                raise BadInput(f"{sentence}: {kit / 'console.txt'} says why")
            time.sleep(0.1)


def processes(kit: Path) -> list[int]:
    """Processes that work for a kit: its path is an argument of every one of them, whatever session they are in."""
    mine = {os.fsencode(path) for path in (kit, kit / "run.sh", kit / "startup" / "sub_start.sh")}
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and mine & set(_line(pid).split(b"\0"))]


def jobs(kit: Path) -> list[int]:
    """Of those, the ones that do a job."""
    return [pid for pid in processes(kit) if JOB in _line(pid)]


def parents(kit: Path) -> list[int]:
    """Of those, the ones that wait for jobs."""
    return [pid for pid in processes(kit) if JOB not in _line(pid)]


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def send(pids: Iterable[int], sign: signal.Signals) -> None:
    """A signal to each process that is still there."""
    for pid in pids:
        _send(pid, sign)


def _send(pid: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, sign)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
