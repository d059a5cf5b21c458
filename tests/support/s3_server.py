"""An S3 server on loopback that keeps its objects in a folder: moto's, as a process of its own that can be killed.

    python s3_server.py FOLDER PORT

FOLDER/objects/BUCKET/KEY are the objects when it starts, and what a request changed is there before it is answered:
moto itself forgets. FOLDER/faults.json, read at every request, makes it misbehave: a list of {"method", "path" (a part
of it), "times", and "status" with "code", or "keep" (bytes of the body after which the connection breaks), or "slow"
(seconds between pieces of the body), or "wait" (seconds before anything is done)}.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

FOLDER = Path(sys.argv[1])
_PIECE = 1 << 16


class Misbehaving:
    """The server's application, with the faults that a test asks for."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self._application = application
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        fault = self._fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        with (FOLDER / "requests.log").open("a") as log:
            log.write(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']} {environ.get('HTTP_RANGE', '')}\n")
        if "status" in fault:
            body = f"<Error><Code>{fault['code']}</Code><Message>{fault['code']} was asked for</Message></Error>"
            start_response(f"{fault['status']} {fault['code']}", [("Content-Type", "application/xml")])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body.encode()]
        time.sleep(fault.get("wait", 0))
        response = self._application(environ, start_response)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            response = [b"".join(response)]
            with self._lock:
                remember()
        return _disturbed(response, fault) if fault else response

    def _fault(self, method: str, path: str) -> dict[str, Any]:
        faults = FOLDER / "faults.json"
        for fault in json.loads(faults.read_text()) if faults.exists() else []:
            if fault["method"] == method and fault["path"] in path:
                key = json.dumps(fault)
                self._used[key] += 1
                if self._used[key] <= fault.get("times", 1 << 30):
                    return dict(fault)
        return {}


def _disturbed(response: Any, fault: dict[str, Any]) -> Iterator[bytes]:
    content = b"".join(response)
    for start in range(0, len(content), _PIECE):
        if start >= fault.get("keep", len(content)):
            raise ConnectionAbortedError("asked for")
        yield content[start : start + _PIECE]
        time.sleep(fault.get("slow", 0))


class Quiet(WSGIRequestHandler):
    """Logs nothing."""

    def log_request(self, *_: object) -> None:
        """Nothing."""


_known: dict[tuple[str, str], str] = {}


def remember() -> None:
    """Bring the folder up to date with moto."""
    now: dict[tuple[str, str], str] = {}
    for bucket in s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.values():
        for name, key in list(bucket.keys.items()):
            now[bucket.name, name] = key.etag
            path = FOLDER / "objects" / bucket.name / name
            if _known.get((bucket.name, name)) != key.etag:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = FOLDER / "being-written"
                temporary.write_bytes(key.value)
                temporary.rename(path)
    for bucket_name, name in set(_known) - set(now):
        (FOLDER / "objects" / bucket_name / name).unlink()
    _known.clear()
    _known.update(now)


def load() -> None:
    """Put the objects of the folder into moto."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for bucket in (FOLDER / "objects").iterdir():
        backend.create_bucket(bucket.name, "us-east-1")
        for file in sorted(file for file in bucket.rglob("*") if file.is_file()):
            name = file.relative_to(bucket).as_posix()
            _known[bucket.name, name] = backend.put_object(bucket.name, name, file.read_bytes()).etag


if __name__ == "__main__":
    load()
    application = Misbehaving(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[2]), application, threaded=True, request_handler=Quiet)
