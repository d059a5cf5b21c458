"""A stand-in for the Hugging Face Hub on loopback: models and data sets from folders, for its client huggingface_hub.

    folder/models/owner/name/FILES, folder/datasets/owner/name/FILES --Hub--> HF_ENDPOINT

Every repository has one commit, on the branch main, named after its content. ``gated`` names need a login.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """The repositories of a folder.

    Attributes:
        endpoint: URL for HF_ENDPOINT.
        requested: paths of all requests so far.
        gated: ids that answer 403.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.endpoint = folder, ""
        self.requested: list[str] = []
        self.gated: set[str] = set()

    def environment(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """Variables for a process that is to use this hub, with a cache of its own."""
        found = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
        return {**found, "HF_HUB_OFFLINE": "1"} if offline else found

    def files(self, kind: str, name: str) -> dict[str, Path]:
        root = self.folder / kind / name
        return {str(file.relative_to(root)): file for file in sorted(root.rglob("*")) if file.is_file()}

    def commit(self, kind: str, name: str) -> str:
        digest = hashlib.sha1()
        for path, file in self.files(kind, name).items():
            digest.update(path.encode() + file.read_bytes())
        return digest.hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """Serve the repositories of a folder until the block ends."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = _answer(hub, unquote(urlsplit(self.path).path), "recursive=true" in self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            hub.requested.append(str(arguments[0]) if arguments else format)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_Answer = tuple[int, dict[str, str], bytes]


def _answer(hub: Hub, path: str, recursive: bool) -> _Answer:
    parts = path.strip("/").split("/")
    is_api = parts[0] == "api"
    parts = parts[1:] if is_api else parts
    kind = parts[0] if parts[0] in ("models", "datasets") else "models"
    parts = parts[1:] if parts[0] == kind else parts
    name, rest = "/".join(parts[:2]), parts[2:]
    if not (hub.folder / kind / name).is_dir():
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
    if name in hub.gated:
        return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
    commit, files = hub.commit(kind, name), hub.files(kind, name)
    if rest[1:2] and rest[1] not in ("main", commit):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    if is_api:
        content = json.dumps(_api(name, rest, commit, files, recursive))
        return 200, {"Content-Type": "application/json"}, content.encode()
    file = files.get("/".join(rest[2:]))
    if file is None:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
    content = file.read_bytes()
    return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content


def _api(name: str, rest: list[str], commit: str, files: dict[str, Path], recursive: bool) -> object:
    if rest[:1] != ["tree"]:
        siblings = [{"rfilename": path} for path in files]
        return {"id": name, "sha": commit, "private": False, "gated": False, "tags": [], "siblings": siblings}
    below = "".join(f"{part}/" for part in rest[2:])
    found = {path: file for path, file in files.items() if path.startswith(below)}
    if recursive:
        return [_entry(path, file) for path, file in found.items()]
    deeper = {path[len(below) :].partition("/")[0] for path in found if "/" in path[len(below) :]}
    folders = [{"type": "directory", "path": below + name, "oid": "0" * 40, "size": 0} for name in sorted(deeper)]
    return folders + [_entry(path, file) for path, file in found.items() if "/" not in path[len(below) :]]


def _entry(path: str, file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
