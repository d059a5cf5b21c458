"""The report as a page on this machine's loopback address, made anew when the files of its runs have changed.

    GET /         -> the page; its script asks for /version every few seconds and loads the page again if it is new
    GET /version  -> version of the files: sizes and times of metrics, events and samples

Only this machine can connect, and only under its loopback names: a web site that lets a name of its own point to
127.0.0.1 is refused.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from hlat.page import page, paragraph
from hlat.reporting.plan_comparison import Machines
from hlat.reporting.report_writer import report_page
from hlat.runtime.errors import HlatError, LaunchError
from hlat.runtime.storage.run_folder import LOCK_NAME
from hlat.tracking import SAMPLES_NAME

_LOG = logging.getLogger("hlat")
_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_FILES = ("metrics.jsonl", "events.jsonl", SAMPLES_NAME, LOCK_NAME)
_PROBLEM = "The runs cannot be read at the moment"


class ReportServer:
    """Server of one report, on the loopback address.

    Args:
        folders: folders of runs.
        machines: what they were trained on.
        port: port to listen on; 0 for any free one.

    Attributes:
        url: address of the page.

    Raises:
        LaunchError: the port is in use.
        HlatError: the report cannot be made.
    """

    def __init__(self, folders: Sequence[Path], machines: Machines | None = None, port: int = 0) -> None:
        self._folders, self._machines = list(folders), machines
        self._lock, self._made = threading.Lock(), ("", "")
        self._page()  # a mistake is reported before the server starts
        try:
            self._server = ThreadingHTTPServer((_HOST, port), _handler(self._answer))
        except OSError as error:
            raise LaunchError(
                f"--port {port}: cannot be listened on: {error.strerror or error}. Give another one."
            ) from error
        self.url = f"http://{_HOST}:{self._server.server_port}/"

    def serve(self) -> None:
        """Serve until ``close`` is called from another thread, or Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def close(self) -> None:
        """End ``serve``."""
        self._server.shutdown()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        if path == "/version":
            return HTTPStatus.OK, "text/plain", self._version()
        if path != "/":
            return HTTPStatus.NOT_FOUND, "text/plain", "There is only one page: /"
        try:
            return HTTPStatus.OK, "text/html", self._page()
        except HlatError as error:
            shown = page(_PROBLEM, [paragraph(error)], version=self._version())
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/html", shown

    def _page(self) -> str:
        """Make the page, unless that of the present version is there. One at a time: large runs take seconds."""
        with self._lock:
            version = self._version()
            if self._made[0] != version:
                self._made = (version, report_page(self._folders, self._machines, version=version))
            return self._made[1]

    def _version(self) -> str:
        marks = []
        for folder in self._folders:
            for name in _FILES:
                try:
                    found = (folder / name).stat()
                    marks.append(f"{name} {found.st_size} {found.st_mtime_ns}")
                except OSError:
                    marks.append(name)
        return sha256("\n".join(marks).encode()).hexdigest()[:16]


def _handler(answer: Callable[[str], tuple[HTTPStatus, str, str]]) -> type[BaseHTTPRequestHandler]:
    """Make the class that answers requests with ``answer(path)``."""

    class Handler(BaseHTTPRequestHandler):
        """Answers GET requests that name a loopback address."""

        def do_GET(self) -> None:
            """Answer a request."""
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host not in _NAMES:
                self._send(HTTPStatus.FORBIDDEN, "text/plain", "This page is for 127.0.0.1 and localhost only.")
                return
            self._send(*answer(urlsplit(self.path).path))

        def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Log requests for debugging only."""
            _LOG.debug("report: %s", format % args)

    return Handler
