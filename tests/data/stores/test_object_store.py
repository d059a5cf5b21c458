"""Corpus in a real S3-protocol server: the same data as from local files, whatever happens to the server."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hlat.data.corpus_files import list_files
from hlat.data.prepare.preparation import prepare
from hlat.data.stores import remote
from hlat.data.stores import remote as retries
from hlat.data.stores.cache import PART_SUFFIX
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparing import LARGE, data_config, start, wait
from tests.support.launch.launching import wait_until
from tests.support.object_store import ObjectStore

pytestmark = pytest.mark.usefixtures("small_units")

URL = "s3://corpus/large"
ONE_AT_A_TIME = 0.4 / 1024  # GiB: space for one file of the large corpus, not for two, so that each is evicted


@pytest.fixture(scope="module")
def server(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Start a server with the large corpus."""
    store = ObjectStore(tmp_path_factory.mktemp("s3"))
    store.put(large, "large")
    with store:
        yield store


@pytest.fixture(autouse=True)
def store(server: ObjectStore, large: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Yield the server without misbehaviour, and set the environment variables for it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retries, "_FIRST_DELAY", 0.1)
    yield server
    server.misbehave()


def content(out: Path | dict[str, bytes]) -> dict[str, Any]:
    """Return the content of prepared data without the locations of the corpus."""
    files = dict(out) if isinstance(out, dict) else tree(out)
    manifest = json.loads(files.pop("manifest.json"))
    for record in manifest.pop("sources"):
        files[f"source {record['content']}"] = record["sha256"]
    del manifest["places"], manifest["checksum"]  # the checksum covers the places too
    return {**files, "manifest": manifest}


def during(stage: str, action: Callable[[], None]) -> Callable[[str, int, int], None]:
    """Return a progress function that calls ``action`` once, in the middle of a stage."""
    pending = [action]

    def progress(at: str, done: int, total: int) -> None:
        if pending and at == stage and 0 < done < total:
            pending.pop()()

    return progress


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages about the store."""
    return [record.message for record in caplog.records if record.name == "hlat.data.stores.remote"]


def test_the_data_is_the_same_as_from_local_files(
    store: ObjectStore, large: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    out, config = tmp_path / "out", data_config(URL, **LARGE)
    prepare(config, out, workers=1)
    assert content(out) == content(reference)
    first = len(store.requests())
    record = prepare(config, out).manifest.sources[0]
    assert record.path == f"{URL}/0.jsonl" and record.etag and record.mtime_ns == 0
    assert not [line for line in store.requests()[first:] if "bytes=" in line], (
        "a version with a known hash was fetched again"
    )
    assert not (out / "cache").exists()

    store.misbehave({"method": "GET", "path": "/corpus", "status": 403, "code": "AccessDenied"})
    notes = prepare(config, out).notes  # finished data needs no corpus
    assert "permission denied" in notes[-1] and "used without it" in notes[-1]
    store.misbehave()

    old = (large / "1.jsonl").read_bytes()
    try:
        store.replace("large/1.jsonl", old.replace(b"ka", b"ko"))
        with pytest.raises(DataError, match=rf"the corpus: {URL}/1\.jsonl changed since"):
            prepare(config, out)
    finally:
        store.replace("large/1.jsonl", old)


@pytest.mark.parametrize("stage", ["hash", "tokenize"])
def test_preparation_waits_for_a_server_that_is_killed_and_restarted(
    store: ObjectStore, tmp_path: Path, reference: dict[str, bytes], stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is killed between two files; the outage is logged once."""

    def restart() -> None:
        wait_until(lambda: bool(outages(caplog)))
        store.start()

    back = threading.Thread(target=restart)

    def kill() -> None:
        store.kill()
        back.start()

    caplog.set_level(logging.WARNING)
    config = data_config(URL, **LARGE, cache_gib=ONE_AT_A_TIME)
    prepare(config, tmp_path / "out", workers=1, progress=during(stage, kill))
    back.join()
    assert content(tmp_path / "out") == content(reference)
    logged = outages(caplog)
    assert len(logged) == 2 and "s3://corpus does not answer: " in logged[0] and f"while reading {URL}/" in logged[0]
    assert "s3://corpus answers again, after" in logged[1]


def test_a_download_resumes_after_the_server_was_killed(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Received bytes are kept; reading continues after them."""
    monkeypatch.setattr(remote, "_CHUNK", 1 << 17)
    corpus = write_jsonl(tmp_path / "slow.jsonl", documents(200, 3_000))
    store.put(corpus, "slow/0.jsonl")
    store.replace("slow/0.jsonl", corpus.read_bytes())
    stuck = {"method": "GET", "path": "slow/0", "slow": 1e5}  # after a piece of the third chunk
    store.misbehave({"method": "GET", "path": "slow/0", "times": 2, "keep": 1 << 30}, stuck)
    first = len(store.requests())

    def gets() -> list[str]:
        return [line for line in store.requests()[first:] if line.startswith("GET /corpus/slow/0.jsonl bytes=")]

    def disturb() -> None:
        while len(gets()) < 3:
            time.sleep(0.01)
        store.kill()
        store.misbehave()
        store.start()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    (file,) = list_files(data_config("s3://corpus/slow/*.jsonl"), tmp_path)
    with file.open_local() as local:
        assert local.read_bytes() == corpus.read_bytes()
    disturbing.join()
    ranges = [line.partition("bytes=")[2] for line in gets()]
    assert (
        ranges.count("0-131071") == 1 and ranges[2] in ranges[3:]
    )  # the third chunk is requested again, not the first


def test_preparation_killed_while_fetching_is_resumed(
    store: ObjectStore, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """SIGKILL leaves a partial file, which the next run removes; complete files are used again."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    config = data_config(URL, **LARGE, cache_dir=str(cache))
    store.misbehave({"method": "GET", "path": "large/2", "slow": 1e5})
    process = start(config, out)
    wait(lambda: len(list(cache.glob("[0-9a-f]*.jsonl"))) == 2 and list(cache.glob(f"*{PART_SUFFIX}")), process)
    process.kill()
    process.communicate()
    assert list(cache.glob(f"*{PART_SUFFIX}"))
    store.misbehave()
    first = len(store.requests())
    prepare(config, out, workers=1)
    assert content(out) == content(reference)
    assert not list(cache.glob(f"*{PART_SUFFIX}"))
    fetched = {line.split()[1] for line in store.requests()[first:] if "bytes=" in line}
    assert fetched == {"/corpus/large/2.jsonl"}


def test_truncated_responses_and_a_busy_server_are_retried(
    store: ObjectStore, tmp_path: Path, reference: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    truncated = [{"method": "GET", "path": f"large/{n}", "keep": 100_000, "times": 1} for n in range(3)]
    store.misbehave(*truncated, {"method": "GET", "path": "/corpus", "status": 503, "code": "SlowDown", "times": 3})
    prepare(data_config(URL, **LARGE), tmp_path / "out", workers=1)
    assert content(tmp_path / "out") == content(reference)
    assert "HTTP 503 SlowDown" in outages(caplog)[0]


def test_a_file_replaced_during_preparation_is_an_error(
    store: ObjectStore, large: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    """Two versions of a file never mix; once the old one is restored, finished work is used."""
    out, config = tmp_path / "out", data_config(URL, **LARGE, cache_gib=ONE_AT_A_TIME)
    old = (large / "2.jsonl").read_bytes()
    try:
        with pytest.raises(DataError) as caught:
            swap = during("tokenize", lambda: store.replace("large/2.jsonl", old.replace(b"ka", b"ko")))
            prepare(config, out, workers=1, progress=swap)
    finally:
        store.replace("large/2.jsonl", old)
    message = str(caught.value)
    assert f"{URL}/2.jsonl: the file was replaced while it was in use" in message and "version" in message
    assert not (out / "manifest.json").exists()
    prepare(config, out, workers=1)
    assert content(out) == content(reference)


def test_the_cache_limit_is_respected(store: ObjectStore, tmp_path: Path, reference: dict[str, bytes]) -> None:
    cache = tmp_path / "cache"
    config = data_config(URL, **LARGE, cache_gib=ONE_AT_A_TIME, cache_dir=str(cache))
    sizes: list[int] = []

    def look(stage: str, done: int, total: int) -> None:
        sizes.append(sum(file.stat().st_size for file in cache.glob("[0-9a-f]*.jsonl*")))

    prepare(config, tmp_path / "out", workers=1, progress=look)
    assert content(tmp_path / "out") == content(reference)
    assert 300_000 < max(sizes) <= ONE_AT_A_TIME * 2**30
    with pytest.raises(DataError, match=r"do not fit into the cache: data.cache_gib allows 0\.2 MiB"):
        prepare(data_config(URL, **LARGE, cache_gib=0.2 / 1024), tmp_path / "small", workers=1)


PERMANENT_ERRORS = [
    ([], "s3://corpus/none.jsonl", r"s3://corpus/none\.jsonl: nothing there\. Check the name"),
    ([], "s3://nobody/a", r"s3://nobody/a: nothing there \(HTTP 404 NoSuchBucket\)"),
    ([], f"{URL}/*.parquet", "no file matches this glob"),
    ([("GET", "/corpus", 403, "AccessDenied")], URL, r"permission denied: HTTP 403 AccessDenied\. Grant the right"),
    ([("HEAD", "0.jsonl", 403, "Forbidden")], f"{URL}/0.jsonl", "permission denied: HTTP 403 Forbidden"),
    ([("GET", "large/1", 403, "AccessDenied")], URL, rf"{URL}/1\.jsonl: permission denied"),
    ([("GET", "large/1", 404, "NoSuchKey")], URL, rf"{URL}/1\.jsonl: nothing there \(HTTP 404 NoSuchKey\)"),
]


@pytest.mark.parametrize(("faults", "url", "message"), PERMANENT_ERRORS)
def test_permanent_errors_are_raised_at_once(
    store: ObjectStore,
    tmp_path: Path,
    faults: list[tuple[str, str, int, str]],
    url: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.misbehave(*(dict(zip(("method", "path", "status", "code"), fault, strict=True)) for fault in faults))
    with pytest.raises(DataError, match=message):
        prepare(data_config(url, **LARGE), tmp_path / "out", workers=1)
    assert outages(caplog) == []
    assert not list(tmp_path.rglob(f"*{PART_SUFFIX}"))


def test_missing_credentials_are_an_error_that_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(DataError, match=r"no credentials.*AWS_PROFILE.*FSSPEC_S3_ANON=true for a public bucket"):
        prepare(data_config(URL, **LARGE), tmp_path / "out", workers=1)


def test_errors_of_rows_name_the_url(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{nonsense\n')
    store.put(tmp_path / "a.jsonl", "broken/a.jsonl")
    store.replace("broken/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
    with pytest.raises(DataError, match=r"^s3://corpus/broken/a\.jsonl, line 2: invalid JSON"):
        prepare(data_config("s3://corpus/broken/*.jsonl", **LARGE), tmp_path / "out", workers=1)
