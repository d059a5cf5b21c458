"""The page of one run or of several: put together from top to bottom, written as one file, or served while runs train.

    run folders -> RunRecord each -> headline, loss, what happened, time, then the rest in tabs --report_page--> HTML
                                                                                                --write_report--> a file
    ReportServer   GET /         -> the page; its script asks for /version every few seconds, and loads a new page again
                   GET /version  -> version of the files: sizes and times of metrics, events and samples

The server makes the page anew when files of its runs have changed. Only this machine can connect, and only under its
loopback names: a web site that lets a name of its own point to 127.0.0.1 is refused.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from hlat.page import Html, page, paragraph, section, tabs
from hlat.reporting.curves import RunCharts
from hlat.reporting.overview import family_lines, parent_of
from hlat.reporting.planned_and_actual import Machines, mixture_section, plan_section
from hlat.reporting.report_sections import (
    checkpoints_section,
    incidents_section,
    recipe_diff_section,
    recipe_section,
    samples_section,
    time_section,
)
from hlat.reporting.run_record import RunRecord, read_run
from hlat.reporting.run_status import forecast_line
from hlat.reporting.summary import headline_section
from hlat.runtime.errors import DataError, HlatError, LaunchError, StorageError
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.storage.run_folder import LOCK_NAME, forks_of
from hlat.tracking import SAMPLES_NAME

FILE_NAME = "report.html"  # in the folder of a run, if no other file is asked for


def report_page(folders: Sequence[Path], machines: Machines | None = None, *, version: str | None = None) -> Html:
    """Make the report of some runs as one page; several are compared.

    Without ``machines`` it has no plan and no dollars. ``version`` is that of the contents, for a page from a server.

    Raises:
        DataError: a folder is not that of a run, or a line of its metrics or events is damaged.
        StorageError: a file cannot be read.
        HardwareError: the cluster is unknown, or the catalog is inconsistent.
        PlanError: there is no such kind of price.
    """
    if not folders:
        raise DataError("hlat report: name at least one folder of a run.")
    runs = _distinct([read_run(folder) for folder in folders])
    several = len(runs) > 1
    title = f"{', '.join(run.name for run in runs[:_MOST_NAMES])}: comparison" if several else runs[0].name
    charts = RunCharts(runs)
    contents = [
        headline_section(runs, machines),
        *(paragraph(f"{run.name}: {note}" if several else note) for run in runs for note in _notes(run)),
        recipe_diff_section(runs),
        section("Loss", [charts.loss(), *(paragraph(line) for run in runs if (line := _forecast_line(run, several)))]),
    ]
    more = [
        ("Evaluation", charts.evaluation()),
        ("Optimization", charts.optimization()),
        ("Speed and memory", charts.speed()),
        ("Other metrics", charts.others()),
    ]
    if several:
        contents.append(section("Curves", [tabs(more)]))
        contents += [section(run.name, [tabs([*_history(run), *_more(run, machines)])]) for run in runs]
    else:
        contents += [section(name, [found]) for name, found in _history(runs[0])]
        contents.append(section("Details", [tabs([*more, *_more(runs[0], machines)])]))
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return page(title, [*contents, paragraph(f"Made {made} by hlat.")], version=version)


_MOST_NAMES = 4  # in a title


def _forecast_line(run: RunRecord, named: bool) -> str:
    line = forecast_line(run.events, run.last("val_loss"), run.tokens_at_last("val_loss"))
    return f"{run.name}: {line}." if line and named else line and f"{line[0].upper()}{line[1:]}."


def _notes(run: RunRecord) -> list[str]:
    return [*run.notes, *family_lines(parent_of(run.events), forks_of(run.folder))]


def _history(run: RunRecord) -> list[tuple[str, Html]]:
    return [
        ("What happened", incidents_section(run)),
        ("Where the time went", time_section(run)),
        ("Samples of text", samples_section(run)),
    ]


def _more(run: RunRecord, machines: Machines | None) -> list[tuple[str, Html]]:
    return [
        ("Plan and cost", plan_section(run, machines)),
        ("Data", mixture_section(run)),
        ("Checkpoints", checkpoints_section(run)),
        ("Recipe", recipe_section(run)),
    ]


def write_report(folders: Sequence[Path], to: Path | None = None, machines: Machines | None = None) -> Path:
    """Write the report of some runs to a file, and return it; errors as ``report_page``, and StorageError.

    ``to`` None is ``report.html`` in the folder of the first run. It is written in one piece: a reader sees the old
    file or the new one.
    """
    contents = report_page(folders, machines)
    target = to if to is not None else folders[0] / FILE_NAME
    try:
        write_atomic(target, contents.encode())
    except OSError as error:
        raise StorageError(
            f"{target}: cannot be written: {error.strerror or error}. Name another file with -o FILE."
        ) from error
    return target


def _distinct(runs: list[RunRecord]) -> list[RunRecord]:
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    # Folders tell runs of one name apart.
    return [read_run(run.folder, str(run.folder)) for run in runs]


_LOG = logging.getLogger("hlat")
_HOST = "127.0.0.1"  # only this machine can connect
# Names under which a browser on this machine asks; see the head of this module.
_LOOPBACK_NAMES = ("127.0.0.1", "localhost")
_WATCHED_FILES = ("metrics.jsonl", "events.jsonl", SAMPLES_NAME, LOCK_NAME)
_PROBLEM = "The runs cannot be read at the moment"


class ReportServer:
    """Server of one report, on the loopback address; ``url`` is that of the page.

    Port 0 is any free one. LaunchError if the port is in use, HlatError if the report cannot be made.
    """

    def __init__(self, folders: Sequence[Path], machines: Machines | None = None, port: int = 0) -> None:
        self._folders, self._machines = list(folders), machines
        self._lock, self._made = threading.Lock(), ("", "")
        self._page()  # a mistake is reported before the server starts
        try:
            self._server = ThreadingHTTPServer((_HOST, port), _request_handler(self._answer))
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
        self._server.shutdown()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        if path == "/version":
            return HTTPStatus.OK, "text/plain", self._version()
        if path != "/":
            return HTTPStatus.NOT_FOUND, "text/plain", "There is only one page: /"
        try:
            return HTTPStatus.OK, "text/html", self._page()
        except HlatError as error:
            # With a version, so that the page comes back when the files can be read again.
            shown = page(_PROBLEM, [paragraph(error)], version=self._version())
            return HTTPStatus.INTERNAL_SERVER_ERROR, "text/html", shown

    def _page(self) -> str:
        # One at a time: the page of a large run takes seconds, and is made once for each version of its files.
        with self._lock:
            version = self._version()
            if self._made[0] != version:
                self._made = (version, report_page(self._folders, self._machines, version=version))
            return self._made[1]

    def _version(self) -> str:
        marks = []
        for folder in self._folders:
            for name in _WATCHED_FILES:
                try:
                    found = (folder / name).stat()
                    marks.append(f"{name} {found.st_size} {found.st_mtime_ns}")
                except OSError:
                    marks.append(name)
        return sha256("\n".join(marks).encode()).hexdigest()[:16]


def _request_handler(answer: Callable[[str], tuple[HTTPStatus, str, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET requests that name a loopback address."""

        def do_GET(self) -> None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            # A web site may let a name of its own point to 127.0.0.1 and read the answer.
            if host not in _LOOPBACK_NAMES:
                self._send(HTTPStatus.FORBIDDEN, "text/plain", "This page is for 127.0.0.1 and localhost only.")
                return
            self._send(*answer(urlsplit(self.path).path))

        def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            # The page is made anew when its runs go on.
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            # No other site may show the page as part of its own.
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            # Not to stderr, as by default: the script of the page asks every few seconds.
            _LOG.debug("report: %s", format % args)

    return Handler
