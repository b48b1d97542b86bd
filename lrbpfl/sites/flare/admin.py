"""What an admin's kit can ask of the server, with faults told in our words and no wait without an end."""

import contextlib
import io
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cryptography import x509
from cryptography.x509.oid import NameOID
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from lrbpfl.disk import usable
from lrbpfl.errors import BadInput, plain, shown
from lrbpfl.sites.flare.job import PROGRESS

T = TypeVar("T")
CONNECT, ASK, DOWNLOAD = 10.0, 60.0, 600.0  # seconds at most
SITES = 3.0  # seconds a site has to say what it does
SILENT = "no_reply"  # a site that the server still counts as connected, and that is not
ENDED = "FINISHED"  # how the status of a job begins that will never run again


class Server(NamedTuple):
    """What the server says of itself."""

    since: float  # when it was started
    jobs: set[str]  # that it runs


class Gone(BadInput):
    """No server answers: it may come back."""


class Admin:
    """An admin's session; one that broke is opened again at the next question."""

    def __init__(self, kit: Path) -> None:
        self.kit = usable(kit).resolve()
        try:
            told = json.loads((self.kit / "startup" / "fed_admin.json").read_text())["admin"]
            self.name, self.host, self.port = str(told["username"]), str(told["host"]), int(told["port"])
            certificate = x509.load_pem_x509_certificate((self.kit / "startup" / "client.crt").read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(f"{kit} is no admin's kit: lrbpfl sites kit makes one for each admin") from None
        roles = certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)
        self.role = str(roles[0].value) if roles else "unknown"
        self._session: Session | None = None
        quiet = logging.getLogger("nvflare")  # we tell faults ourselves
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *told: object) -> None:
        self.close()

    def submit(self, folder: Path) -> str:
        """Sign and submit a job's folder; its id."""
        return str(self._ask("submit jobs", lambda session: session.submit_job(str(folder.resolve()))))

    def status(self, job: str) -> str:
        """NVFlare's word for how a job stands; no measure of what it achieved."""
        return str(self._ask("look at jobs", lambda session: session.get_job_meta(job)).get("status", ""))

    def progress(self, job: str) -> dict[str, Any]:
        """How far the leg is; nothing, while its hub does not say."""

        def question(session: Session) -> dict[str, Any]:
            try:
                return session.do_app_command(job, PROGRESS, None) or {}
            except (api_spec.JobNotRunning, api_spec.NoReply, api_spec.InternalError, api_spec.CommandError):
                return {}  # it comes up, or is over
            except api_spec.AuthorizationError:
                return {}  # by rules at the server that are not ours

        return self._ask("hear how far jobs are", question)

    def server(self) -> Server:
        """The server now; the status of a job that its crash ended says RUNNING for ever."""
        info = self._ask("look at the server", lambda session: session.get_system_info())
        return Server(float(info.server_info.start_time or 0.0), {str(job.job_id) for job in info.job_info})

    def sites(self) -> dict[str, set[str]]:
        """The connected sites that answer, and the jobs of each."""
        told = self._ask("look at sites", _site_lines)
        found: dict[str, set[str]] = {}
        for line in told:
            if line.get("client_name") and line.get("status") != SILENT:
                jobs = found.setdefault(str(line["client_name"]), set())
                if line.get("job_id"):
                    jobs.add(str(line["job_id"]))
        return found

    def abort(self, job: str) -> None:
        """End a job; one that has ended stays as it is."""
        with contextlib.suppress(api_spec.JobNotRunning):
            self._ask("abort jobs", lambda session: session.abort_job(job))

    def download(self, job: str, folder: Path) -> Path:
        """What a job left at the server: the folder that holds it."""
        found = self._ask("download jobs", lambda s: s.download_job_result(job, str(folder.resolve())), DOWNLOAD)
        return Path(found) / "workspace"

    def close(self) -> None:
        """Log out, if anybody listens."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                self._bounded(session.close, CONNECT)

    def _ask(self, what: str, question: Callable[[Session], T], seconds: float = ASK) -> T:
        for again in (True, False):
            session = self._open()
            try:
                return self._bounded(partial(question, session), seconds)
            except api_spec.AuthorizationError:
                raise BadInput(f"{self.name} may not {what}: its role is {self.role}") from None
            except api_spec.JobNotFound:
                raise BadInput(f"the server at {self.host} knows no such job: was its kit made anew?") from None
            except api_spec.JobNotRunning:
                raise
            except api_spec.InvalidJobDefinition as error:
                raise BadInput(f"the server refuses the job: {plain(error, 300)}") from None
            except (api_spec.NoConnection, api_spec.NoReply, TimeoutError):
                self.close()
                raise Gone(f"the server at {self.host}:{self.port} does not answer") from None
            except (api_spec.SessionClosed, api_spec.SessionExpired, api_spec.AuthenticationError):
                self.close()  # idle for too long, or the server was started anew: log in once more
                if not again:
                    raise Gone(f"the server at {self.host}:{self.port} ends the session") from None
            except Exception as error:
                self.close()
                raise Gone(f"the server at {self.host}:{self.port} cannot {what}: {plain(error, 200)}") from None
        raise AssertionError

    def _open(self) -> Session:
        if self._session is None:
            self._knock()
            try:
                self._session = self._bounded(self._connect, 3 * CONNECT)
            except Exception as error:
                where = f"{self.host}:{self.port}"
                raise Gone(f"the server at {where} does not let {self.name} in: {plain(error, 200)}") from None
        return self._session

    def _connect(self) -> Session:
        with contextlib.redirect_stdout(io.StringIO()):
            return new_secure_session(self.name, str(self.kit), timeout=CONNECT, auto_login_max_tries=1)

    def _knock(self) -> None:
        """See at once whether nobody is there, or somebody else: NVFlare has one word for both, and takes its time."""
        startup, where = self.kit / "startup", f"{self.host}:{self.port}"
        try:
            context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
            context.load_cert_chain(str(startup / "client.crt"), str(startup / "client.key"))
            context.check_hostname = False  # NVFlare's certificates are checked against the project's root alone
            with socket.create_connection((self.host, self.port), 5) as bare:
                context.wrap_socket(bare).close()
        except ssl.SSLEOFError:
            raise Gone(f"the server at {where} hangs up") from None
        except ssl.SSLError:
            raise BadInput(
                f"the server at {where} is not of the project of {shown(str(self.kit))}: ask for its kit"
            ) from None
        except OSError as fault:
            raise Gone(f"there is no server at {where} ({fault.strerror or type(fault).__name__})") from None

    @staticmethod
    def _bounded(work: Callable[[], T], seconds: float) -> T:
        """The work's result, or TimeoutError: nothing of NVFlare may keep us waiting for ever."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append((work(), None))
            except BaseException as error:
                result.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if not result:
            raise TimeoutError(f"no answer within {seconds:g} seconds")
        value, error = result[0]
        if error is not None:
            raise error
        found: T = value
        return found


def _site_lines(session: Session) -> list[dict[str, Any]]:
    """What each site does; one that hangs makes NVFlare's answer about all too late, so then each is asked alone."""
    names = [client.name for client in session.get_system_info().client_info]
    lines: list[dict[str, Any]] = []
    session.set_timeout(SITES)
    try:
        for asked in [names, *([name] for name in names)] if names else []:
            with contextlib.suppress(api_spec.NoConnection, api_spec.NoReply, api_spec.NoClientsAvailable):
                lines += session.get_client_job_status(asked) or []
                if asked is names:
                    break
    finally:
        session.unset_timeout()
    return lines
