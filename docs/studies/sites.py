"""Real sites measured on the loopback: start-up, rounds, memory, bytes, and what a lost site costs.

python docs/studies/sites.py            # three sites, some minutes on two quiet cores (extra `flare`)
"""

import json
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lrbpfl.sites import demo, job
from lrbpfl.sites.flare import kits, local, project
from lrbpfl.sites.flare.admin import Admin
from lrbpfl.sites.flare.supervise import supervise

SITES = ("site-1", "site-2", "site-3")
IMAGES, CLASSES = 300, 10  # of a site's only client


class Loopback:
    """Kits on this machine, and what is read off their processes."""

    def __init__(self, folder: Path) -> None:
        self.port, admin_port = local.free_ports(2)
        project.create(folder, "study", "localhost", SITES, self.port, admin_port)
        self.kits = {kit.name: kit for kit in kits.make_kits(folder)}
        self.server, self.folder = self.kits["localhost"], folder
        self.peak: dict[str, float] = {}
        self.running = local.Running(self.server, self.sites().values(), self.port)

    def sites(self) -> dict[str, Path]:
        """The kits of the sites."""
        return {name: self.kits[name] for name in SITES}

    def run(self, what: dict[str, Any], lose: int | None = None) -> dict[str, Any]:
        """A whole run; in the round `lose`, site 3 is killed, and started again after the next one."""
        record, done = self.server / "hub" / "runs" / what["run"] / "metrics.jsonl", threading.Event()
        begun, self.first, self.peak = time.monotonic(), 0.0, {}
        watch = threading.Thread(target=self._watch, args=(record, done, begun), daemon=True)
        killer = threading.Thread(target=self._kill, args=(record, lose), daemon=True)
        watch.start()
        if lose is not None:
            killer.start()
        with Admin(self.kits["admin@study.org"]) as admin:
            outcome = supervise(admin, what, self.folder / what["run"], lambda told: print(f"  ({told})"), 120.0)
        done.set()
        watch.join()
        seconds = [line["value"] for line in lines(record) if line.get("metric") == "seconds" and "client" not in line]
        last = time.monotonic() - begun - self.first
        return {**outcome, "seconds": seconds, "after_first": last}

    def _watch(self, record: Path, done: threading.Event, begun: float) -> None:
        while not done.wait(0.2):
            if not self.first and record.exists() and record.stat().st_size:
                self.first = time.monotonic() - begun
            for kit in self.kits.values():
                for kind, pids in (("idle", local.parents(kit)), ("job", local.jobs(kit))):
                    for pid in pids:
                        key = f"{'hub' if kit == self.server else 'site'}, {kind}"
                        self.peak[key] = max(self.peak.get(key, 0.0), memory(pid))

    def _kill(self, record: Path, lose: int | None) -> None:
        assert lose is not None
        wait_for(record, lose)
        local.send(local.processes(self.kits["site-3"]), signal.SIGKILL)
        wait_for(record, lose + 2)
        self.running.start(self.kits["site-3"].resolve())


def wait_for(record: Path, rounds: int) -> None:
    """Until the hub has recorded so many rounds."""
    while max((line["round"] for line in lines(record)), default=0) < rounds:
        time.sleep(0.05)


def lines(record: Path) -> list[dict[str, Any]]:
    """The record's whole lines."""
    whole = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in whole if line.endswith("}")]


def memory(pid: int) -> float:
    """The most that a process had in memory, in MB."""
    try:
        told = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(told["VmHWM"].split()[0]) / 1024
    except (OSError, KeyError, ValueError):
        return 0.0


def images(sites: Iterable[Path]) -> None:
    """A client of random images for each site: seconds and bytes do not depend on what is on them."""
    for place, kit in enumerate(sites):
        rng = np.random.default_rng(place)
        (kit / "images").mkdir()
        x = rng.integers(0, 256, (IMAGES + 100, 3, 32, 32), dtype=np.uint8)
        np.savez(kit / "images" / f"client-{place}.npz", x=x, y=np.arange(len(x)) % CLASSES)
        (kit / "site.toml").write_text('data = "images"\n')


def show(name: str, found: dict[str, Any], parameters: int, clients: int) -> None:
    """One run in a few lines."""
    median, rounds = statistics.median(found["seconds"][1:]), len(found["seconds"])
    wire = found["wire"]["update"]
    print(f"{name}: a round {median:.2f} s (median; the first {found['seconds'][0]:.2f}, the longest", end=" ")
    print(
        f"{max(found['seconds']):.2f}), {found['leg']} leg(s), {found['after_first']:.1f} s from round 1 to the table"
    )
    letters = wire["letters"]
    down, up = wire["down"] / letters, wire["up"] / (rounds * clients)
    print(f"  to a site {down:,.0f} bytes a round, from a client {up:,.0f}; 4 P = {4 * parameters:,}")


def main() -> None:
    """All of it."""
    with tempfile.TemporaryDirectory() as scratch:
        loopback = Loopback(Path(scratch) / "study")
        trivial = demo.prepare(loopback.sites())
        begun = time.monotonic()
        with loopback.running, Admin(loopback.kits["admin@study.org"]) as admin:
            listens = time.monotonic() - begun
            while len(admin.sites()) < len(SITES):
                time.sleep(0.1)
            print(f"start-up: server {listens:.1f} s, all sites connected after {time.monotonic() - begun:.1f} s")
            admin.close()
            for name, fields in (("fedavg", {"local_steps": 1}), ("lr-bpfl", {})):
                tables = {
                    "federation": {"rounds": 30, "cohort": 15, "evaluate_every": 0},
                    "algorithm": {"name": name, **fields},
                }
                asked = job.write(f"small-{name}", tables, trivial["about"])
                found = loopback.run(asked)
                size = 128 * 11 + 128 * 64 + 64 * 11 + 11 + 64
                print(f"submitted to round 1: {loopback.first:.1f} s")
                show(f"speakers, {name}, 15 clients", found, size, 15)
            tables = {"federation": {"rounds": 40, "cohort": 15, "evaluate_every": 0}}
            asked = job.write("lost", tables, {**trivial["about"], "minimum": 2, "deadline": 10.0})
            show("speakers, lr-bpfl, site 3 killed in round 5", loopback.run(asked, lose=5), size, 15)
            images(loopback.sites().values())
            about = {"classes": list(range(CLASSES)), "inputs": [3, 32, 32], "kind": "images", "names": list(SITES)}
            for name in ("fedavg", "lr-bpfl"):
                data = {"train_fraction": IMAGES / (IMAGES + 100)}
                federation = {"rounds": 12, "evaluate_every": 0, "model": "cnn"}
                tables = {"federation": federation, "algorithm": {"name": name}, "data": data}
                show(
                    f"the paper's CNN, {name}, 3 clients of {IMAGES} images",
                    loopback.run(job.write(f"cnn-{name}", tables, about)),
                    1_276_234,
                    3,
                )
                peaks = ", ".join(f"{key} {value:.0f}" for key, value in sorted(loopback.peak.items()))
                print(f"  peak memory of a process, MB: {peaks} (a site's job with its worker apart)")


if __name__ == "__main__":
    main()
