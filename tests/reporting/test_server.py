"""The served report: on the loopback address only, under its names only, new when the run has gone on."""

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from hlat.reporting import ReportServer
from hlat.runtime.errors import DataError, LaunchError
from tests.support.reporting import line, write_run


@pytest.fixture
def server(tmp_path) -> Iterator[ReportServer]:
    """A server of a run of two lines."""
    server = ReportServer([write_run(tmp_path / "run", [line(10), line(20)])])
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join()


def ask(server: ReportServer, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", int(server.url.rstrip("/").rpartition(":")[2]), timeout=1200)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_the_page_is_made_anew_when_the_run_has_gone_on(server, tmp_path):
    first, version = ask(server, "/")[1], ask(server, "/version")[1]
    assert f'data-version="{version}"' in first and ask(server, "/")[1] == first
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(30)) + "\n")
    assert ask(server, "/version")[1] != version
    assert '"places":[[10000.0,20000.0,30000.0]' in ask(server, "/")[1]


def test_only_loopback_names_are_answered(server):
    assert server.url.startswith("http://127.0.0.1:")
    assert ask(server, "/", "attacker.example")[0] == 403
    assert ask(server, "/", "localhost:1234")[0] == 200
    assert ask(server, "/../../etc/passwd")[0] == 404
    headers = ask(server, "/")[2]
    assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"


def test_a_run_that_cannot_be_read_any_more_is_a_page_that_says_why(server, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").write_text("<script>\n{}\n")
    status, text, _ = ask(server, "/")
    assert status == 500 and "line 1: &#39;&lt;script&gt;&#39; is not a JSON object" in text


def test_mistakes_are_reported_before_it_serves(server, tmp_path):
    with pytest.raises(LaunchError, match="--port"):
        ReportServer([tmp_path / "run"], port=int(server.url.rstrip("/").rpartition(":")[2]))
    with pytest.raises(DataError, match="does not exist"):
        ReportServer([tmp_path / "nothing"])
