"""Who takes part: project.toml, written once and then edited by hand."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrbpfl.disk import usable, write_file
from lrbpfl.errors import BadInput, plain, shown, unknown

FILE = "project.toml"
ROLES = ("project_admin", "lead", "org_admin", "member")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
ORGANISATION = re.compile(r"[A-Za-z0-9_]{1,63}")
HOST = re.compile(r"(?=.{1,63}$)([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
ADMIN = re.compile(r"[A-Za-z0-9._%+-]{1,30}@[A-Za-z0-9.-]{1,25}\.[A-Za-z]{2,6}")
LONGEST = 2**20  # bytes of the file

TEXT = """\
# Who takes part. After a change: lrbpfl sites kit DIR, which makes a kit for everybody who has none yet.
# A name, an organisation or a role that already has a kit stays as it is: certificates hold them.

name = "{name}"

[server]
host = "{host}"  # the name under which all sites reach the server; it listens there too
organisation = "hub"
port = {port}  # sites dial this one
admin_port = {admin_port}  # and admins this one

# One table for each site; each gets a kit of its own, which is never copied to a second machine.
{sites}
# Who may start runs: project_admin and lead; org_admin and member may look.
[[admins]]
name = "admin@{name}.org"
organisation = "hub"
role = "project_admin"
"""
SITE = """\
[[sites]]
name = "{site}"
organisation = "{organisation}"
"""


class Site(NamedTuple):
    """A participant with data."""

    name: str
    organisation: str


class Admin(NamedTuple):
    """Somebody who may look or start runs."""

    name: str
    organisation: str
    role: str


class Project(NamedTuple):
    """A federation between organisations."""

    name: str
    host: str
    organisation: str
    port: int
    admin_port: int
    sites: tuple[Site, ...]
    admins: tuple[Admin, ...]


def create(folder: Path, name: str, host: str, sites: Sequence[str], port: int, admin_port: int) -> Path:
    """Write project.toml into a folder that has none."""
    path = usable(folder) / FILE
    if path.exists():
        raise BadInput(f"{path} is there already: edit it, then lrbpfl sites kit {folder}")
    _matches("--name", name, re.compile(r"[a-z0-9][a-z0-9-]{0,19}"), "up to 20 small letters, digits and -")
    if not sites:
        raise BadInput("a federation needs sites: give --site NAME for each")
    tables = [SITE.format(site=site, organisation=re.sub(r"[^A-Za-z0-9_]", "_", site)) for site in sites]
    text = TEXT.format(name=name, host=host, port=port, admin_port=admin_port, sites="\n".join(tables))
    parse(_tables(text.encode(), path))  # nothing is written that could not be read
    write_file(path, text.encode())
    return path


def read(folder: Path) -> Project:
    """The checked project of a folder."""
    path = usable(folder) / FILE
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise BadInput(f"there is no {path}: lrbpfl sites init makes one") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    return parse(_tables(data, path))


def _tables(data: bytes, path: Path) -> dict[str, Any]:
    try:
        if len(data) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST} bytes")
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as TOML: {plain(error, 300)}") from None


def parse(tables: Mapping[str, Any]) -> Project:
    """A checked project from nested tables."""
    _keys("the project", tables, ("name", "server", "sites", "admins"))
    server = tables["server"]
    _keys("server", server, ("host", "organisation", "port", "admin_port"))
    name = _matches("name", tables["name"], NAME, "letters, digits, - and _")
    host = _matches("server.host", server["host"], HOST, "a host name or an IPv4 address of at most 63 characters")
    port, admin_port = (_port(f"server.{key}", server[key]) for key in ("port", "admin_port"))
    if port == admin_port:
        raise BadInput(f"server.port and server.admin_port are both {port}: sites and admins need one each")
    sites, admins = [], []
    for table in _list("sites", tables["sites"]):
        _keys("a site", table, ("name", "organisation"))
        sites.append(
            Site(_matches("a site's name", table["name"], NAME, "letters, digits, - and _"), _organisation(table))
        )
    for table in _list("admins", tables["admins"]):
        _keys("an admin", table, ("name", "organisation", "role"))
        who = _matches("an admin's name", table["name"], ADMIN, "an e-mail address of at most 63 characters")
        if table["role"] not in ROLES:
            raise unknown("role", str(table["role"]), ROLES)
        admins.append(Admin(who, _organisation(table), table["role"]))
    _once([host, "server", *(site.name for site in sites), *(admin.name for admin in admins)])
    return Project(name, host, _organisation(server), port, admin_port, tuple(sites), tuple(admins))


def _keys(what: str, table: Any, known: Sequence[str]) -> None:
    if not isinstance(table, dict):
        raise BadInput(f"{what} is a table with the keys {', '.join(known)}, not the value {shown(table)}")
    for key in table:
        if key not in known:
            raise unknown(f"key of {what}", key, known)
    for key in known:
        if key not in table:
            raise BadInput(f"{what} has no {key}; it needs {', '.join(known)}")


def _list(what: str, tables: Any) -> list[Any]:
    if not isinstance(tables, list) or not tables:
        raise BadInput(f"{what} is {shown(tables)}: there must be at least one [[{what}]] table")
    return tables


def _matches(what: str, value: Any, pattern: re.Pattern[str], allowed: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadInput(f"{what} is {shown(value)}: {allowed}")
    return value


def _organisation(table: Mapping[str, Any]) -> str:
    return _matches("organisation", table["organisation"], ORGANISATION, "letters, digits and _")


def _port(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise BadInput(f"{what} is {shown(value)}: a port is a number from 1 to 65535")
    return value


def _once(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:  # kits are folders, and some systems take large letters for small ones
            raise BadInput(f"the name {shown(name)} is given twice: server, sites and admins need one each")
        seen.add(name.lower())
