"""A job of NVFlare as three JSON files: no code travels, the classes are those of the installed package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from lrbpfl.disk import write_file
from lrbpfl.errors import BadInput

HUB, SITE = "lrbpfl.sites.flare.apps.HubApp", "lrbpfl.sites.flare.apps.SiteApp"
CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
ALLOWED = (CONTROLLER, EXECUTOR, "lrbpfl.sites.flare.")  # what server and sites must let in
# What a leg leaves for the admin: how it went, what was sent, and the run's public files.
OUTCOME, WIRE, RUN = "outcome.json", "wire.json", "run"
PROGRESS = "lrbpfl.progress"  # what an admin asks the hub to hear how far a leg is
PLAIN = " \"',:;[]()<>=+-*/\\|!?@#&^~`_."  # all but braces, $ and %: in those NVFlare fills in variables and secrets


def pack(job: Mapping[str, Any]) -> str:
    """A job as one text that NVFlare leaves alone: its nested tables would be taken for components."""
    return quote(json.dumps(job, sort_keys=True), safe=PLAIN)


def unpack(text: str) -> dict[str, Any]:
    """The job that was packed."""
    try:
        job = json.loads(unquote(text))
    except (ValueError, RecursionError):
        raise BadInput("the job's description cannot be read: it was made by another version") from None
    if not isinstance(job, dict):
        raise BadInput("the job's description is no table: it was made by another version")
    return job


def write_job(folder: Path, job: Mapping[str, Any], *, hub: str = HUB, site: str = SITE) -> Path:
    """Write the job's folder; who signs it vouches for every value in `job`."""
    args = {"job": pack(job)}
    sites = list(job["sites"])
    meta = {
        "name": f"lrbpfl-{job['run']}",
        "resource_spec": {},
        "min_clients": job["minimum"],
        "deploy_map": {"app": ["server", *sites] if sites else ["@ALL"]},
    }
    server = {
        "format_version": 2,
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": {"server_obj_id": "_server"}}],
        "components": [{"id": "_server", "path": hub, "args": args}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": EXECUTOR, "args": {"client_obj_id": "_client"}}}],
        "components": [{"id": "_client", "path": site, "args": args}],
    }
    files = {
        "meta.json": meta,
        "app/config/config_fed_server.json": server,
        "app/config/config_fed_client.json": client,
    }
    for name, content in files.items():
        write_file(folder / name, (json.dumps(content, indent=2) + "\n").encode())
    return folder
