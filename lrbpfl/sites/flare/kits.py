"""A kit for every participant: NVFlare's own, with the doors closed that we do not need."""

import json
import shutil
from pathlib import Path
from typing import Any

from lrbpfl.disk import PRIVATE_FILE, PRIVATE_FOLDER, locked, private_folder, remove_folder, usable, write_file, writing
from lrbpfl.errors import BadInput, plain
from lrbpfl.sites.flare import project as projects
from lrbpfl.sites.flare.job import ALLOWED
from lrbpfl.sites.flare.project import Project

KITS, STATE = "kits", "state"
SITE_TOML = """\
# What this site brings, keeps and shares. This file never leaves the site.

data = "data.csv"  # this site's table (CSV or Parquet); a path from this file's folder, or from the root
label_column = "label"
# client_column = "ward"  # the column that tells this site's clients apart; without it the site is one client

store = "store"  # where its clients' private states and models are kept; from this file's folder, or from the root
names = "own"  # the hub knows clients by the names in the data; "numbers": by the site's name and a number
info = true  # the hub may be told what an algorithm says about a client's training, such as its loss
scores = true  # and a client's scores and reliability bins

workers = 1  # processes that train
seconds = 600.0  # a worker that takes longer over one client is ended
# memory = 4.0  # GiB that a worker may take
# steps = 10000  # jobs that ask for more local steps or epochs are refused
"""
RUN = """\
#!/usr/bin/env bash
# Runs this kit in the foreground until it is told to end: what systemd expects of a simple service.
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
exec python3 -m lrbpfl.sites.flare.start "$PWD"
"""
NOBODY = {"byoc": "none", "shell_commands": "none"}  # no code from outside, no look at files, whoever asks
LOOK = {"view": "any", "app_command": "any"}  # the second asks the hub how far a leg is, and nothing else
RIGHTS: dict[str, dict[str, str]] = {
    "project_admin": {
        "submit_job": "any",
        "clone_job": "none",
        "manage_job": "any",
        "download_job": "any",
        "operate": "o:site",
        **LOOK,
        **NOBODY,
    },
    "org_admin": {"manage_job": "o:submitter", "operate": "o:site", **LOOK, **NOBODY},
    "lead": {
        "submit_job": "any",
        "clone_job": "none",
        "manage_job": "n:submitter",
        "download_job": "n:submitter",
        "operate": "none",
        **LOOK,
        **NOBODY,
    },
    "member": {**LOOK, **NOBODY},
}


def make_kits(folder: Path) -> list[Path]:
    """Make the kits that are not there yet; the others, and the root certificate, stay as they are."""
    project = projects.read(folder)
    kits, state = usable(folder) / KITS, folder / STATE
    with locked(folder):
        names = [project.host, *(site.name for site in project.sites), *(admin.name for admin in project.admins)]
        missing = [name for name in names if not (kits / name).exists()]
        if not missing:
            return []
        if kits.exists() and not state.exists():
            raise BadInput(f"{kits} has kits, but {state}, which signs new ones, is gone: bring it back")
        private_folder(state)
        state.chmod(PRIVATE_FOLDER)
        made = _provision(project, state)
        try:
            for name in missing:
                _finish(made / name, project)
            private_folder(kits)
            for name in missing:
                with writing(kits / name):
                    shutil.move(made / name, kits / name)
        finally:
            remove_folder(made)
            _hide(state)
    return [kits / name for name in missing]


def _provision(project: Project, state: Path) -> Path:
    """NVFlare's kits of all participants; certificates that were made before are taken from the state."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    quiet, tables = _Quiet(), description(project)
    try:
        context = Provisioner(str(state.resolve()), prepare_builders(tables)).provision(
            prepare_project(tables), logger=quiet
        )
    except Exception as error:
        raise BadInput(f"NVFlare cannot make the kits: {plain(error, 300)}") from None
    if context.get(CtxKey.BUILD_ERROR):
        raise BadInput(f"NVFlare cannot make the kits: {plain('; '.join(quiet.errors), 300)}")
    return Path(context[CtxKey.CURRENT_PROD_DIR])


class _Quiet:
    """A log of which only errors are kept."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def info(self, text: str) -> None:
        """Nobody asked."""

    debug = warning = info

    def error(self, text: str) -> None:
        """Kept for the sentence."""
        self.errors.append(text)


def description(project: Project) -> dict[str, Any]:
    """The project in NVFlare's own terms."""
    server = {
        "name": project.host,
        "type": "server",
        "org": project.organisation,
        "fed_learn_port": project.port,
        "admin_port": project.admin_port,
    }
    sites = [{"name": site.name, "type": "client", "org": site.organisation} for site in project.sites]
    admins = [{"name": a.name, "type": "admin", "org": a.organisation, "role": a.role} for a in project.admins]
    impl = "nvflare.lighter.impl"
    builders = [
        {"path": f"{impl}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {"path": f"{impl}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
        {"path": f"{impl}.cert.CertBuilder"},
        {"path": f"{impl}.signature.SignatureBuilder"},
    ]
    return {"api_version": 3, "name": project.name, "participants": [server, *sites, *admins], "builders": builders}


def _finish(kit: Path, project: Project) -> None:
    """Close doors and add our files; startup/ is signed and stays as it is."""
    kit.chmod(PRIVATE_FOLDER)
    if kit.name in {admin.name for admin in project.admins}:
        return
    local, is_server = kit / "local", kit.name == project.host
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = [*resources["class_allow_list"], *ALLOWED]
    if not is_server:
        resources["allow_log_streaming"] = False
    permissions = {"format_version": "1.0", "permissions": RIGHTS}
    for name, content in {"resources.json": resources, "authorization.json": permissions}.items():
        write_file(local / name, (json.dumps(content, indent=2) + "\n").encode())
    write_file(kit / "run.sh", RUN.encode())
    (kit / "run.sh").chmod(0o700)
    if not is_server:
        write_file(kit / "site.toml", SITE_TOML.encode(), private=True)


def _hide(folder: Path) -> None:
    """For its owner's eyes alone: whoever has the root key can make admins."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(PRIVATE_FOLDER if path.is_dir() else PRIVATE_FILE)
