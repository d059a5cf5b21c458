"""Corpora behind web URLs and in memory: the files that a URL names, and URLs that are refused."""

import contextlib
import datetime
import functools
import http.server
import ipaddress
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hlat.config import BatchSchedule, RecipeError
from hlat.config.load import parse_recipe
from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from hlat.data.online.loader import OnlineData
from hlat.data.online.prepare import prepare_online
from hlat.data.prepare.preparation import prepare
from hlat.data.source_file import prefetch_in_order
from hlat.data.stores import remote
from hlat.data.stores import remote as retries
from hlat.runtime.errors import DataError
from hlat.runtime.storage import object_stores as fsspec_backends
from hlat.runtime.version import install_command
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparing import data_config


class Web(http.server.SimpleHTTPRequestHandler):
    """Handler of a web server for a folder, with optional range requests, ETags and injected faults."""

    ranges = False
    etag = True
    faults: list[str] = []

    def do_GET(self) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        path = Path(self.translate_path(self.path))
        if fault.isdigit():
            self.send_error(int(fault))
        elif path.is_dir() or not path.exists():
            super().do_GET()
        else:
            self._send(path.read_bytes(), self.headers.get("Range", ""), fault)

    def _send(self, content: bytes, requested: str, fault: str) -> None:
        body = content
        if self.ranges and requested:
            start, end = (int(number) for number in requested.removeprefix("bytes=").split("-"))
            body = content[start : end + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
        else:
            self.send_response(200)
        if fault != "unmeasured":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "truncated" else body)
        self.close_connection = True

    def end_headers(self) -> None:
        if self.etag:
            path = Path(self.translate_path(self.path))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns if path.exists() else 0}"')
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def web(small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Web], str]]:
    """Start a server of the small corpus; yield its handler class, which sets its behaviour, and its URL."""

    class Server(Web):
        faults: list[str] = []

    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.05)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(small)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Server, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def local(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Prepare the small corpus from local files; return the content."""
    out = tmp_path_factory.mktemp("local")
    prepare(data_config(small), out, workers=1)
    return without_places(out)


def without_places(out: Path) -> dict[str, Any]:
    """Return the content of prepared data without the locations of its corpus."""
    files: dict[str, Any] = tree(out)
    manifest = json.loads(files.pop("manifest.json"))
    return {**files, "fingerprint": manifest["fingerprint"], "content": [r["content"] for r in manifest["sources"]]}


def read(url: str, folder: Path) -> list[bytes]:
    """Read all files of a URL."""
    return [local.read_bytes() for _, local in prefetch_in_order(list_files(data_config(url), folder))]


# --- the web -----------------------------------------------------------------------------------------------------


def test_a_web_folder_gives_the_same_data(web: tuple[type[Web], str], tmp_path: Path, local: dict[str, bytes]) -> None:
    prepare(data_config(f"{web[1]}/"), tmp_path / "out", workers=1)
    assert without_places(tmp_path / "out") == local


@pytest.mark.parametrize("ranges", [True, False])
def test_truncated_responses_are_retried_with_and_without_range_requests(
    web: tuple[type[Web], str], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    server, url = web
    monkeypatch.setattr(remote, "_CHUNK", 10_000)
    server.ranges = ranges
    server.faults += ["", "truncated", "503", "truncated", "truncated", "429"]
    assert read(f"{url}/a.jsonl", tmp_path) == [(small / "a.jsonl").read_bytes()]
    assert server.faults == []


def test_a_server_without_content_length_is_an_error(web: tuple[type[Web], str], tmp_path: Path) -> None:
    server, url = web

    def unmeasured(self: Web) -> None:
        self._send(b"", "", "unmeasured")

    server.do_HEAD = unmeasured  # type: ignore[method-assign]
    server.faults += ["unmeasured"] * 2
    with pytest.raises(DataError, match=r"does not report the length of the file \(no Content-Length\)"):
        list_files(data_config(f"{url}/a.jsonl"), tmp_path)


def test_permanent_errors_of_a_web_server_are_raised_at_once(
    web: tuple[type[Web], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = web
    with pytest.raises(DataError, match=rf"{url}/none\.jsonl: nothing there \(HTTP 404 Not Found\)"):
        list_files(data_config(f"{url}/none.jsonl"), tmp_path)
    (file,) = list_files(data_config(f"{url}/a.jsonl"), tmp_path)
    server.faults += ["403"]
    with pytest.raises(DataError, match=r"permission denied: HTTP 403 Forbidden.*~/\.netrc"), file.open_local():
        pass
    assert not caplog.records and not list(tmp_path.rglob("*.part"))


def test_a_replaced_file_is_noticed_by_its_etag_or_time(
    web: tuple[type[Web], str], small: Path, tmp_path: Path
) -> None:
    server, url = web
    content = (small / "a.jsonl").read_bytes()
    try:
        for server.etag, before, after in ((True, 10**9, 2 * 10**9), (False, 10**18, 10**18 + 5 * 10**9)):
            os.utime(small / "a.jsonl", ns=(before, before))
            (file,) = list_files(data_config(f"{url}/a.jsonl"), tmp_path / "cache")
            os.utime(small / "a.jsonl", ns=(after, after))
            with (
                pytest.raises(DataError, match="the file was replaced while it was in use") as caught,
                file.open_local(),
            ):
                pass
            assert ("version 1000000000" if server.etag else "written 2001-09-09 01:46:40 UTC") in str(caught.value)
    finally:
        (small / "a.jsonl").write_bytes(content)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Write a key and a self-signed certificate for 127.0.0.1; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "key.pem", folder / "certificate.pem"


def test_https_needs_a_trusted_certificate(small: Path, tmp_path: Path, local: dict[str, bytes]) -> None:
    """A certificate that is not trusted is an error at once."""
    key, certificate = _certificate(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Web, directory=str(small)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}/"
    program = "import sys; from hlat.config.sections.data import DataConfig\n"
    program += "from hlat.data.prepare.preparation import prepare\n"
    program += "prepare(DataConfig.model_validate_json(sys.argv[1]), sys.argv[2], workers=1)"
    command = [sys.executable, "-c", program, data_config(url).model_dump_json(), str(tmp_path / "out")]
    subprocess.run(command, check=True, env={**os.environ, "SSL_CERT_FILE": str(certificate)}, timeout=1200)
    with pytest.raises(DataError, match=rf"{url}: cannot be read: .*[Cc]ertificate.*self-signed"):
        list_files(data_config(url), tmp_path)
    server.shutdown()
    server.server_close()
    assert without_places(tmp_path / "out") == local


# --- memory, and the files that a URL names -----------------------------------------------------------------------


@pytest.fixture
def memory(small: Path) -> Iterator[Any]:
    """Yield fsspec's memory file system with the small corpus."""
    fs = fsspec.filesystem("memory")
    for file in small.iterdir():
        fs.pipe(f"/corpus/{file.name}", file.read_bytes())
    yield fs
    fs.rm("/", recursive=True)


def test_a_corpus_in_memory_gives_the_same_data(
    memory: Any, small: Path, tmp_path: Path, local: dict[str, bytes]
) -> None:
    prepare(data_config("memory://corpus"), tmp_path / "out", workers=1)
    assert without_places(tmp_path / "out") == local
    with pytest.raises(DataError, match="data prepared from another path"):
        prepare(data_config("memory://elsewhere"), tmp_path / "out", workers=1)
    prepare(data_config(small), tmp_path / "out", workers=1)  # the same text in another location
    memory.pipe("/corpus/b.jsonl", write_jsonl(tmp_path / "b", documents(20, 800, seed=7)).read_bytes())
    with pytest.raises(DataError, match=r"the corpus: memory://corpus/b\.jsonl"):
        prepare(data_config("memory://corpus"), tmp_path / "out", workers=1)


def names(url: str, folder: Path) -> list[str]:
    """List the files that a URL names, without its root."""
    return [file.path.removeprefix("memory://tree/") for file in list_files(data_config(url), folder)]


def test_folders_and_globs_name_the_same_files_as_locally(memory: Any, tmp_path: Path) -> None:
    files = [
        "a/1.jsonl",
        "a/10.jsonl",
        "a/2.jsonl",
        "a-b/1.jsonl",
        "a.jsonl",
        "b/c/3.jsonl",
        ".git/x.jsonl",
        "b/.y.jsonl",
    ]
    for name in files:
        memory.pipe(f"/tree/{name}", b"x")
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(b"x")
    for pattern in ("", "**/*.jsonl", "*.jsonl", "*/*.jsonl", "a/?.jsonl", "a/[12].jsonl", "b/**/*.jsonl"):
        here = list_files(data_config(f"{tmp_path}/tree/{pattern}"), tmp_path)
        found = names(f"memory://tree/{pattern}", tmp_path)
        assert found == [file.path.removeprefix(f"{tmp_path}/tree/") for file in here] != []
    assert names("memory://tree/a.jsonl", tmp_path) == ["a.jsonl"]


def test_problems_of_a_folder_give_the_same_errors_as_locally(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/mixed/a.parquet", b"x")
    memory.pipe("/mixed/README.md", b"x")
    with pytest.raises(DataError, match=r"mixes text files \(README\.md\).*path: memory://mixed/\*\*/\*\.parquet"):
        list_files(data_config("memory://mixed"), tmp_path)
    memory.pipe("/orc/a.orc", b"x")
    with pytest.raises(DataError, match=r"^memory://orc/a\.orc: hlat does not read \.orc files"):
        list_files(data_config("memory://orc"), tmp_path)
    with pytest.raises(DataError, match="memory://none: nothing there"):
        list_files(data_config("memory://none"), tmp_path)
    with pytest.raises(DataError, match="no file matches this glob"):
        list_files(data_config("memory://orc/*.txt"), tmp_path)


def test_a_file_url_is_a_local_path(small: Path, tmp_path: Path) -> None:
    files = list_files(data_config(f"file://{small}"), tmp_path)
    assert [file.path for file in files] == [f"{small}/a.jsonl", f"{small}/b.jsonl"]
    assert all(file.cached_store is None for file in files)


def _size(path: Path) -> int:
    """Return the size of a file, or 0 if another thread renames or removes it meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_files_are_prefetched_and_released(memory: Any, tmp_path: Path) -> None:
    """40 files of 20 kB fit through a cache of 100 kB: at most a quarter of it is prefetched."""
    for number in range(40):
        memory.pipe(f"/many/{number:02d}.txt", bytes([65 + number]) * 20_000)
    config = data_config("memory://many", cache_dir=str(tmp_path / "cache"), cache_gib=100_000 / 2**30)
    files = list_files(config, tmp_path)
    seen = []
    for file, local in prefetch_in_order(files):
        seen.append(local.read_bytes()[0] - 65)
        assert file.path.endswith(f"{seen[-1]:02d}.txt")
        assert sum(_size(path) for path in (tmp_path / "cache").glob("[0-9a-f]*")) <= 100_000
    assert seen == list(range(40))
    some = prefetch_in_order(files)
    next(some)
    some.close()  # the caller may stop early
    for thread in threading.enumerate():
        if "open_file" in thread.name:
            thread.join(5)
            assert not thread.is_alive()


# --- URLs that are refused, and packages that are not installed ---------------------------------------------------

SECRET = [
    ("https://me:word@host/a.jsonl", "https://...@host/a.jsonl", "a password"),
    ("https://host/a.jsonl?X-Amz-Signature=word&x=1", "https://host/a.jsonl?...", "X-Amz-Signature"),
    ("https://host/a.jsonl?sv=1&sig=word", "https://host/a.jsonl?...", "sig"),
    ("s3://key:word@bucket/a", "s3://...@bucket/a", "a password"),
]


@pytest.mark.parametrize(("url", "shown", "secret"), SECRET)
def test_secrets_are_refused_and_not_repeated(url: str, shown: str, secret: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{re.escape(shown)}: the URL holds .*{secret}") as direct:
        list_files(DataConfig(path=url), tmp_path)
    recipe = {"data": {"sources": [{"path": url}, {"path": url}]}}
    with pytest.raises(RecipeError, match=f"{secret}.*recipes are copied into checkpoints and logs") as refused:
        parse_recipe(recipe)
    assert "word" not in str(direct.value).replace("a password", "") + str(refused.value).replace("a password", "")


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [("gcsfs", "gs://b/a", "gcs"), ("s3fs", "s3://b/a", "s3"), ("aiohttp", "https://h/a", "http")],
)
def test_a_package_that_is_not_installed_is_named(tmp_path: Path, package: str, url: str, extra: str) -> None:
    program = f"""
import sys
from pathlib import Path
sys.modules[{package!r}] = None
from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from hlat.runtime.errors import DataError
try:
    list_files(DataConfig(path={url!r}), Path({str(tmp_path)!r}))
except DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=1200, capture_output=True, text=True)
    protocol = url.partition("://")[0]
    expected = f"{url}: {protocol}:// needs a package that is not installed: {install_command(extra)}"
    assert done.stdout.strip() == expected


def test_unknown_protocols_and_chained_urls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nosuch://a: Protocol not known: nosuch\. Give the files themselves: s3://"):
        list_files(data_config("nosuch://a"), tmp_path)
    with pytest.raises(DataError, match="chained URLs are not supported"):
        list_files(data_config("simplecache::s3://b/a"), tmp_path)


def test_no_package_for_remote_stores_is_imported_for_local_files(small: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
import hlat.data.prepare.worker
assert not [name for name in ("torch", "fsspec", "aiohttp", "pyarrow", "pydantic") if name in sys.modules]
from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
list_files(DataConfig(path={str(small)!r}), Path({str(tmp_path)!r}))
assert not [name for name in ("fsspec", "s3fs", "aiohttp", "gcsfs") if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=1200)


def test_a_cache_too_small_for_the_online_streams_is_refused_at_the_start(memory: Any, tmp_path: Path) -> None:
    """Four streams each keep one of eight files of 300 kB open."""
    for number in range(8):
        memory.pipe(f"/held/{number}.txt", f"a text of some words, {number}. ".encode() * 12_000)
    size = memory.size("/held/0.txt")
    section = {"mode": "online", "streams": 4, "validation": {"fraction": 0}, "cache_dir": str(tmp_path / "cache")}

    def online(limit: int) -> OnlineData:
        config = data_config("memory://held", **section, cache_gib=limit / 2**30)
        return OnlineData(prepare_online(config, tmp_path / "out", None), config, 0, BatchSchedule(4), 1)

    assert online(4 * size).is_evenly_assigned
    with pytest.raises(DataError, match="the 4 streams of a rank may read 4 files of URLs at a time"):
        online(4 * size - 1)


@pytest.mark.parametrize(
    "url", ["reference:///x", "zip:///x.zip", "dir:///x", "generic://x", "jupyter://x", "dask:///x", "GitHub://a/b"]
)
def test_a_protocol_that_only_shows_other_files_is_refused_with_what_works(url: str) -> None:
    """A backend that cannot be opened by a URL alone ended in an exception of its own."""
    with pytest.raises(DataError) as refusal:
        fsspec_backends.open_filesystem(url, DataError)
    assert url in str(refusal.value) and "no store of its own. Give the files themselves: s3://" in str(refusal.value)


def test_every_protocol_that_fsspec_knows_is_opened_or_refused_in_words() -> None:
    """Witness: fsspec's own table of protocols; a backend without its package, or that wants more, is no traceback."""
    from fsspec.registry import known_implementations  # noqa: PLC0415

    for protocol in sorted(known_implementations):
        with contextlib.suppress(DataError, OSError):
            fsspec_backends.open_filesystem(f"{protocol}://127.0.0.1:1/x", DataError)


def test_what_can_keep_a_runs_files_among_the_protocols_that_fsspec_knows() -> None:
    """A protocol that is new in fsspec is taken for a store until somebody has looked at it."""
    from fsspec.registry import known_implementations  # noqa: PLC0415

    stores = {"abfs", "adl", "az", "gcs", "gs", "hf", "lakefs", "oci", "ocilake", "oss", "s3", "s3a", "tos", "tosfs"}
    servers = {"arrow_hdfs", "box", "dbfs", "dropbox", "ftp", "gdrive", "hdfs", "root", "sftp", "smb", "ssh", "wandb"}
    writable = {each for each in known_implementations if fsspec_backends.why_not_writable(f"{each}://a/b") is None}
    assert stores <= writable and writable - stores <= servers | {"webdav", "webhdfs"}
