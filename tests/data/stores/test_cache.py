"""Cache of bounded size shared by processes: locked files stay, partial files go, each file is fetched once."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from hlat.data.stores.cache import PART_SUFFIX, Cache, CacheFolder
from hlat.data.stores.remote import StoredFile
from hlat.runtime.errors import DataError, StorageError

SIZE = 1000


def file(name: str, size: int = SIZE, etag: str = "1") -> StoredFile:
    """Return a file of a remote store."""
    return StoredFile(f"s3://corpus/{name}.jsonl", size, etag, 0)


class Source:
    """A source of files that records which were fetched."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, wanted: StoredFile) -> Callable[[IO[bytes]], str]:
        """Return a function that fetches one file."""

        def write(out: IO[bytes]) -> str:
            self.written.append(wanted.path[len("s3://corpus/") : -len(".jsonl")])
            content = bytes(wanted.size)
            rest = memoryview(content)
            while rest:
                rest = rest[out.write(rest) :]
            return hashlib.sha256(content).hexdigest()

        return write


def use(cache: Cache, source: Source, *names: str) -> None:
    """Open files through the cache, one after the other."""
    for name in names:
        with cache.acquire(file(name), source.write(file(name))) as path:
            assert path.stat().st_size == SIZE and path.suffix == ".jsonl"


def count_files(folder: Path) -> int:
    """Count the complete files in a cache."""
    return len(list(folder.glob("[0-9a-f]*.jsonl")))


def test_the_least_recently_used_file_is_evicted_first(tmp_path: Path) -> None:
    source, cache = Source(), Cache(tmp_path, 3 * SIZE)
    use(cache, source, "a", "b", "c", "a", "d", "a", "c", "b")
    assert source.written == ["a", "b", "c", "d", "b"]
    assert count_files(tmp_path) == 3


def test_a_locked_file_is_not_evicted(tmp_path: Path) -> None:
    source, cache = Source(), Cache(tmp_path, 2 * SIZE)
    with cache.acquire(file("a"), source.write(file("a"))) as path:
        use(cache, source, "b", "c", "d")
        assert path.exists()
    assert count_files(tmp_path) == 2


def test_versions_of_a_file_are_cached_separately(tmp_path: Path) -> None:
    source, cache = Source(), Cache(tmp_path, 10 * SIZE)
    for etag in ("1", "2", "1"):
        with cache.acquire(file("a", etag=etag), source.write(file("a"))):
            pass
    assert source.written == ["a", "a"]


def test_hashes_are_kept_after_eviction(tmp_path: Path) -> None:
    source, cache = Source(), Cache(tmp_path, SIZE)
    use(cache, source, "a", "b")
    with (tmp_path / "hashes.jsonl").open("ab") as hashes:
        hashes.write(b'["truncated by a cra')
    later = Cache(tmp_path, SIZE)
    assert later.known_sha256(file("a")) == hashlib.sha256(bytes(SIZE)).hexdigest()
    assert later.known_sha256(file("a", etag="2")) is None


def test_files_larger_than_the_cache_are_an_error(tmp_path: Path) -> None:
    source, cache = Source(), Cache(tmp_path, 2 * SIZE)
    large = file("large", 3 * SIZE)
    with pytest.raises(DataError, match=r"large\.jsonl: its .* do not fit into the cache: data\.cache_gib allows"):
        cache.acquire(large, source.write(large)).__enter__()
    with (
        cache.acquire(file("a"), source.write(file("a"))),
        cache.acquire(file("a"), source.write(file("a"))),  # opened twice, counted once
        cache.acquire(file("b"), source.write(file("b"))),
        pytest.raises(DataError, match=r"next to .* of open files"),
    ):
        cache.acquire(file("c"), source.write(file("c"))).__enter__()
    use(cache, source, "c")


def test_space_locked_by_another_process_is_waited_for(tmp_path: Path) -> None:
    source, other = Source(), Cache(tmp_path, 2 * SIZE)
    contexts = [other.acquire(file(name), source.write(file(name))) for name in "ab"]
    for context in contexts:
        context.__enter__()

    def sleep(_: float) -> None:
        contexts.pop().__exit__(None, None, None)

    use(Cache(tmp_path, 2 * SIZE, sleep=sleep), source, "c")
    assert len(contexts) == 1 and count_files(tmp_path) == 2
    clock = iter(range(0, 10_000, 100))
    waiting = Cache(tmp_path, SIZE, clock=lambda: next(clock), sleep=lambda _: None)
    with pytest.raises(DataError, match=r"d\.jsonl: no space for its .*: other processes use the"):
        use(waiting, source, "d")
    assert not list(tmp_path.glob(f"*{PART_SUFFIX}"))


def test_a_truncated_file_is_fetched_again(tmp_path: Path) -> None:
    source = Source()
    use(Cache(tmp_path, 9 * SIZE), source, "a")
    os.truncate(next(tmp_path.glob("[0-9a-f]*.jsonl")), 10)
    use(Cache(tmp_path, 9 * SIZE), source, "a")
    assert source.written == ["a", "a"]


def test_other_files_in_the_folder_are_not_removed(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_bytes(bytes(100 * SIZE))
    use(Cache(tmp_path, SIZE), Source(), "a", "b", "c")
    assert mine.exists() and count_files(tmp_path) == 1


def test_a_damaged_byte_count_is_computed_again(tmp_path: Path) -> None:
    source = Source()
    use(Cache(tmp_path, 2 * SIZE), source, "a", "b")
    (tmp_path / "lock").write_text("nonsense")
    use(Cache(tmp_path, 2 * SIZE), source, "c", "d")
    assert count_files(tmp_path) == 2
    (tmp_path / "lock").write_text("99999999999")
    use(Cache(tmp_path, 2 * SIZE), source, "e", "f")
    assert count_files(tmp_path) == 2


def test_a_failed_fetch_leaves_no_file(tmp_path: Path) -> None:
    def fail(out: IO[bytes]) -> str:
        out.write(b"half")
        raise DataError("gone")

    cache = Cache(tmp_path, SIZE)
    for _ in range(5):  # and no space is lost
        with pytest.raises(DataError, match="gone"):
            cache.acquire(file("a"), fail).__enter__()
    assert not list(tmp_path.glob("[0-9a-f]*"))
    use(cache, Source(), "a")


# --- processes ---------------------------------------------------------------------------------------------------

_PROGRAM = """
import hashlib, sys, time
from pathlib import Path
from hlat.data.stores.cache import Cache
from hlat.data.stores.remote import StoredFile
folder, limit, seconds, names = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
cache = Cache(folder, limit)
def write(out):
    with (folder.parent / "written").open("a") as log:
        log.write(name + "\\n")
    for _ in range(10):
        out.write(bytes(100))
        time.sleep(seconds / 10)
    return hashlib.sha256(bytes(1000)).hexdigest()
for name in names:
    with cache.acquire(StoredFile(f"s3://corpus/{name}.jsonl", 1000, "1", 0), write) as path:
        assert path.stat().st_size == 1000
"""


def process(folder: Path, limit: int, seconds: float, names: str) -> "subprocess.Popen[bytes]":
    """Start a process that opens files one after the other, fetching each in ``seconds``."""
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, str(folder), str(limit), str(seconds), *names])


def test_two_processes_fetch_a_file_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    both = [process(cache, 9 * SIZE, 0.2, "abcde") for _ in range(2)]
    assert [child.wait(timeout=1200) for child in both] == [0, 0]
    assert sorted((tmp_path / "written").read_text().split()) == list("abcde")
    assert count_files(cache) == 5 and not list(cache.glob(f"*{PART_SUFFIX}"))


def test_a_file_is_renamed_under_the_lock(tmp_path: Path) -> None:
    """A concurrent count that missed the file would let the cache exceed its limit."""
    source, cache = Source(), Cache(tmp_path, SIZE)
    use(cache, source, "a", "b")  # "a" is evicted and its hash known, so nothing else takes the lock at the end
    counting, seen = threading.Event(), []

    def count() -> None:
        with CacheFolder(tmp_path).locked():
            counting.set()
            time.sleep(0.3)
            seen.extend(path.suffix for path in tmp_path.glob("[0-9a-f]*"))

    def write(out: IO[bytes]) -> str:
        threading.Thread(target=count).start()
        counting.wait()
        return source.write(file("a"))(out)

    with cache.acquire(file("a"), write):
        assert seen == [PART_SUFFIX]
    assert count_files(tmp_path) == 1


def test_two_processes_stay_within_the_limit_of_a_small_cache(tmp_path: Path) -> None:
    """Each process can evict files that the other has not locked."""
    cache = tmp_path / "cache"
    both = [process(cache, 2 * SIZE, 0.01, names) for names in ("abcdefgh" * 3, "hgfedcba" * 3)]
    most, running = 0, True
    while running:  # once more after their end, when files are left
        running, sizes = any(child.poll() is None for child in both), []
        for path in cache.glob("[0-9a-f]*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                sizes.append(0)
        most = max(most, sum(sizes))
    assert [child.returncode for child in both] == [0, 0]
    # Listing the folder takes time, so a file and the one that replaces it can be seen together.
    assert SIZE <= most <= 4 * SIZE
    assert count_files(cache) <= 2


def test_a_process_killed_while_fetching_leaves_a_partial_file_that_is_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    victim = process(cache, 2 * SIZE, 1e6, "a")
    while not list(cache.glob(f"*{PART_SUFFIX}")):
        assert victim.poll() is None
        time.sleep(0.01)
    source = Source()
    use(Cache(cache, 2 * SIZE), source, "b")
    assert list(cache.glob(f"*{PART_SUFFIX}")), "the partial file of a running process is not removed"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    use(Cache(cache, 2 * SIZE), source, "b")
    assert not list(cache.glob(f"*{PART_SUFFIX}"))
    use(Cache(cache, 2 * SIZE), source, "c", "a")
    assert source.written == ["b", "c", "a"]


def test_full_disk(tmp_path: Path) -> None:
    """Unlocked files are evicted first; then the message says what to do, and no partial file stays."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    source, cache = Source(), Cache(disk / "cache", 1 << 30)
    sizes = dict.fromkeys("abc", 30_000) | {"large": 100_000}
    try:
        for name, size in sizes.items():
            if name == "large":
                with pytest.raises(StorageError) as caught:
                    cache.acquire(file(name, size), source.write(file(name, size))).__enter__()
            else:
                with cache.acquire(file(name, size), source.write(file(name, size))) as path:
                    assert path.stat().st_size == size
        message = str(caught.value)
        assert f"{disk / 'cache'}: cannot store s3://corpus/large.jsonl here: No space left on device" in message
        assert "data.cache_dir" in message and "data.cache_gib" in message and "finished work is kept" in message
        assert not list((disk / "cache").glob(f"*{PART_SUFFIX}"))
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize > 20_000
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_created_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/cache: cannot store s3://corpus/a\.jsonl here: Not a directory"):
        use(Cache(tmp_path / "file" / "cache", SIZE), Source(), "a")
