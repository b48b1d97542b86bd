"""Who is connected to which Ray: a local one of our own, a cluster that was there, or what this process uses anyway."""

import importlib.util
import logging
import os
import re
import socket
import sys
from threading import Lock
from types import ModuleType

from lrbpfl.engines.launch import ray_ran
from lrbpfl.errors import BadInput

ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
PATIENCE = 5.0  # seconds until a port counts as silent; Ray itself would wait for minutes
# Deaths are told in replies, once: Ray would print them in the middle of a progress bar as well.
TOLD = "A worker died or was killed|Raylet is terminated|marked dead because"

_lock = Lock()
_users = 0  # engines of this process that are open
_ours = False  # whether the connection is ours to end


def ray_module() -> ModuleType:
    """Ray, imported now; refused in a sentence if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput("engine.kind = 'ray' needs Ray, which is not installed: pip install lrbpfl[ray]")
    if "ray" not in sys.modules:
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", TOLD)  # read when Ray is imported
    import ray

    module: ModuleType = ray
    return module


def enter(workers: int, address: str) -> None:
    """Connect this process, unless it is connected; every call is undone by `leave`."""
    global _users, _ours
    ray = ray_module()
    with _lock:
        if ray.is_initialized():
            _check_same(ray, address)
        else:
            _start(ray, workers, address)
            _ours, _users = True, 0
        ray_ran.set()
        _users += 1


def leave() -> None:
    """The last to leave ends what `enter` began, and nothing else."""
    global _users, _ours
    with _lock:
        _users -= 1
        if _users == 0 and _ours:
            ray_module().shutdown()
            _ours = False


def cpus() -> int:
    """How many CPUs the cluster has now."""
    return int(ray_module().cluster_resources().get("CPU", 0))


def _check_same(ray: ModuleType, address: str) -> None:
    found = ray.get_runtime_context().gcs_address
    if address not in ("", "auto", found):
        raise BadInput(f"engine.address = {address!r}, but this process is connected to the Ray cluster at {found}")


def _start(ray: ModuleType, workers: int, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=workers or None, include_dashboard=False, **quiet)
        return
    _check_reachable(address)
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _refused(address, str(error)) from error


def _check_reachable(address: str) -> None:
    """Refuse an address where nobody listens."""
    found = _own_cluster() if address == "auto" else address
    if found is None:
        return
    parts = ADDRESS.fullmatch(found)
    if parts is None:
        raise BadInput(f"engine.address = {address!r} is neither auto nor host:port")
    try:
        socket.create_connection((parts["host"].strip("[]"), int(parts["port"])), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _refused(address, f"{found} does not answer ({error})") from error


def _own_cluster() -> str | None:
    """Where Ray would look for the cluster that this machine belongs to; None if this Ray cannot be asked."""
    try:
        from ray._private.services import get_ray_address_from_environment

        return str(get_ray_address_from_environment("auto", None))
    except (ImportError, TypeError):  # it is not part of what Ray promises, and only serves to fail sooner
        return None
    except ConnectionError as error:
        raise _refused("auto", "this machine belongs to none; start one with: ray start --head") from error


def _refused(address: str, reason: str) -> BadInput:
    return BadInput(f"engine.address = {address!r}: no Ray cluster can be used there: {' '.join(reason.split())}")
