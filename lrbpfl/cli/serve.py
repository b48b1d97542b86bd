"""The command `serve`: finished models behind HTTP, on this machine unless told otherwise."""

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from lrbpfl.cli.own import network_of
from lrbpfl.errors import BadInput
from lrbpfl.serving.shelf import Shelf, shelf

LOOPBACK = ("127.0.0.1", "::1", "localhost")
VARIABLE = "LRBPFL_TOKEN"
PATIENCE = 5  # seconds that requests in work are given at the end


def serve(
    directory: Path,
    host: str,
    port: int,
    token_file: Path | None,
    *,
    max_bytes: int,
    max_rows: int,
    factory: str | None = None,
) -> None:
    """Load, say where, and answer until Ctrl-C."""
    if not (find_spec("fastapi") and find_spec("uvicorn")):
        raise BadInput("serve needs fastapi and uvicorn: install them with pip install 'lrbpfl[serve]'")
    import uvicorn

    from lrbpfl.serving.application import Limits, application

    torch.set_num_threads(1)  # in every thread: the same bits as in a run
    token, found = _token(token_file), shelf(directory, network_of(factory))
    hosts = LOOPBACK if host in LOOPBACK and not token else None
    app = application(found.models, limits=Limits(max_bytes, max_rows), token=token, hosts=hosts)
    with _listening(host, port) as listener:
        _say(found, directory, host, listener.getsockname()[1], token)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=PATIENCE, server_header=False)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # after everything has been closed
            print("stopped", file=sys.stderr)


def _say(found: Shelf, directory: Path, host: str, port: int, token: str | None) -> None:
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    clients = f"{len(found.models)} client{'s' * (len(found.models) != 1)}"
    print(f"{clients} of {directory} at {where} ({'with' if token else 'without'} a token); Ctrl-C ends it", flush=True)
    if found.missing:
        print(f"without a model of their own, and not served: {', '.join(found.missing)}", file=sys.stderr)
    if not token and host not in LOOPBACK:
        print(f"anybody who can reach {host} may ask: give --token-file or {VARIABLE}", file=sys.stderr)


def _token(file: Path | None) -> str | None:
    """The token from a file or the environment, if there is one; an empty one is a mistake."""
    try:
        said = os.environ.get(VARIABLE) if file is None else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the token file {file} cannot be read: {error}") from None
    if said is not None and not said.strip():
        raise BadInput(f"{file or VARIABLE} holds no token: it is empty")
    return None if said is None else said.strip()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; port 0 is any that is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadInput(f"host {host!r} cannot be used: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise BadInput(f"port {port} of {host} cannot be used: {error.strerror or error}") from None
    return listener
