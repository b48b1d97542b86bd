"""What the commands about sites do."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from lrbpfl.cli.progress import Display
from lrbpfl.cli.runs import show as show_table
from lrbpfl.experiments.store import refuse_existing
from lrbpfl.sites.flare import kits, project, wire
from lrbpfl.sites.flare.admin import Admin
from lrbpfl.sites.flare.local import Running, free_ports
from lrbpfl.sites.flare.supervise import supervise
from lrbpfl.sites.job import parse, read

HOST = "localhost"  # of a demonstration


def init(folder: Path, name: str, host: str, sites: Sequence[str], port: int, admin_port: int) -> None:
    """Write project.toml."""
    path = project.create(folder, name, host, sites, port, admin_port)
    print(f"{path} says who takes part. Look it over, then: lrbpfl sites kit {quote(str(folder))}")


def kit(folder: Path) -> None:
    """Make the kits that are missing."""
    made = kits.make_kits(folder)
    if not made:
        print(f"Everybody in {folder / project.FILE} has a kit already.")
        return
    for path in made:
        print(path)
    print("A kit holds a private key: give each to its owner alone, by a way that nobody else can read.")
    print(
        "Server and sites edit their kit's files in local/ and, at a site, site.toml; then run.sh in the kit runs it."
    )
    print(f"Keep {folder / kits.STATE} to yourself and off the server: who has it can make admins.")


def run(config: Path, kit: Path, out: Path | None, *, quiet: bool) -> None:
    """Supervise a run until it is complete."""
    job = read(config)
    out = out or Path("runs") / str(job["run"])
    again = f"lrbpfl sites run {quote(str(config))} --kit {quote(str(kit))} --out {quote(str(out))}"
    with _cut(f"interrupted; what is finished is kept. Go on with: {again}"), Admin(kit) as admin:
        outcome = _supervised(admin, job, out, quiet=quiet)
    _table(outcome, out)


def _supervised(admin: Admin, job: Mapping[str, Any], out: Path, *, quiet: bool) -> dict[str, Any]:
    """The run's outcome; on the way, how far it is."""
    config = parse(job).config
    with Display(quiet=quiet) as display:
        listener, shown = display.listener(config.algorithm_name, config.federation.rounds), 0

        def show(state: Mapping[str, Any]) -> None:
            nonlocal shown
            if state.get("rounds", 0) > shown:
                shown = state["rounds"]
                away = ", ".join(state["away"])
                listener.reached(state["rounds"], state["loss"], state["scores"], f"without {away}" if away else "")

        return supervise(admin, job, out, listener.tell, job["patience"], show=show)


def status(kit: Path) -> None:
    """Which sites are there, and what they do."""
    with Admin(kit) as admin:
        sites, running = admin.sites(), admin.server().jobs
        print(f"The server at {admin.host}:{admin.port} runs {_many(len(running), 'job')}; you are {admin.name}.")
        for name, jobs in sorted(sites.items()):
            print(f"{name}: {'works' if jobs & running else 'idle'}")
        if not sites:
            print("No site is connected.")


def demo(folder: Path, many: int, *, quiet: bool) -> None:
    """All of it on this machine; whatever was started is stopped."""
    from lrbpfl.sites.demo import prepare

    refuse_existing(folder)
    port, admin_port = free_ports(2)
    names = [f"site-{number}" for number in range(1, many + 1)]
    project.create(folder, "demo", HOST, names, port, admin_port)
    made = {path.name: path for path in kits.make_kits(folder)}
    sites = {name: made[name] for name in names}
    job, out = prepare(sites), folder / "run"
    _note(f"{_many(many, 'site')} and a server start on this machine, each from its kit in {folder / kits.KITS}")
    with (
        _cut("interrupted; all that was started is stopped"),
        Running(made[HOST], sites.values(), port),
        Admin(made["admin@demo.org"]) as admin,
    ):
        outcome = _supervised(admin, job, out, quiet=quiet)
    _table(outcome, out)
    print("\nPrivate, and only at its site:")
    for path in sites.values():
        print(f"  {path}: {', '.join(sorted(_own(path)))}")
    print("Over the wire (bytes of what is in the letters):")
    for line in wire.lines(outcome["wire"]):
        print(f"  {line}")
    print("All processes are stopped.")


def _own(kit: Path) -> list[str]:
    """What lies in a site's kit that NVFlare did not put there."""
    known = {"site.toml", "store"}
    return [path.name for path in kit.iterdir() if path.name in known or path.suffix in (".csv", ".parquet")]


def _table(outcome: Mapping[str, Any], out: Path) -> None:
    show_table(outcome["summary"], out)
    print(f"In {out}: what the hub has of the run (shared network, scores, record); lrbpfl report makes a page of it.")


def _note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr, flush=True)


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@contextmanager
def _cut(sentence: str) -> Iterator[None]:
    """Ctrl-C is no fault; say what it left."""
    try:
        yield
    except KeyboardInterrupt:
        print(sentence, file=sys.stderr)
        sys.exit(130)
