"""HTTP server of /metrics, /healthz and /readyz on a socket that listens already."""

import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hlat.launch.metrics_server.exposition import CONTENT_TYPE, exposition
from hlat.launch.metrics_server.families import metric_families
from hlat.launch.metrics_server.run_observer import ObservedRun, RunObservation, RunObserver

_PATIENCE = 5.0  # seconds for a client to send its request


class StatusServer(ThreadingHTTPServer):
    """Server of the status of a run; each request observes the run anew.

    Args:
        listener: listening socket; the server closes it.
        run: the run.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, run: ObservedRun) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.run = listener, run
        self._observer, self._lock = RunObserver(run), threading.Lock()

    def status(self) -> RunObservation:
        """Observe the run; threads take turns."""
        with self._lock:
            return self._observer.observe()


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = _PATIENCE
    server_version, sys_version = "hlat", ""

    def do_GET(self) -> None:
        """Answer a request."""
        status = self.server.status()
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE, exposition(metric_families(self.server.run, status)))
        elif path == "/healthz":
            self._send_health(status.trouble is None, status)
        elif path == "/readyz":
            self._send_health(status.trouble is None and status.is_training, status)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", "/metrics, /healthz or /readyz\n")

    do_HEAD = do_GET

    def _send_health(self, good: bool, status: RunObservation) -> None:
        first = status.beats[0] if status.beats else None
        content = {
            "ok": good,
            "reason": status.trouble or ("training" if status.is_training else "not training yet"),
            "step": None if first is None else first.step,
            "phase": None if first is None else first.phase,
            "processes": len(status.beats),
            "restarts": status.attempts - 1,
        }
        code = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(code, "application/json", json.dumps(content) + "\n")

    def _send(self, code: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
