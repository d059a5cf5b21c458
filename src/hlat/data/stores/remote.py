"""A URL -> the files it names, and their bytes, by fsspec: any store that has a backend.

s3://bucket/corpus/**/*.parquet --list--> RemoteFile(url, size, version) ... --read--> bytes, in order
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from hlat.data.stores.retries import StoreRetries
from hlat.runtime import WEB, DataError, is_url
from hlat.runtime.storage import Fault, Transient, connect, protocol_of, refusal, refuse_unusable

_CHUNK = 1 << 24  # bytes a request asks for: long beside its latency, short beside what a lost one costs
_STREAMED = 1 << 20  # bytes read together from a server that does not give parts of a file
_VERSIONS = ("generation", "ETag", "etag", "e_tag", "Content-MD5")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created")


class StoreAccessError(DataError):
    """A store that answers, and has nothing at that place, or does not say so to us."""


@dataclass(frozen=True)
class RemoteFile:
    """One version of one file of a store.

    Attributes:
        url: where it is, without anything secret.
        size: bytes.
        etag: the store's word for the version, such as S3's ETag; empty if it has none.
        mtime_ns: when it was written, for stores that have no ETag; 0 if unknown.
    """

    url: str
    size: int
    etag: str
    mtime_ns: int


class Store:
    """What one URL of a recipe refers to.

    Args:
        url: a file, a folder or prefix, or a glob.
        retries: makes the patience with a store from its name.

    Raises:
        DataError: a URL that holds a secret, an unknown protocol, or a backend that is not installed or cannot start.
    """

    def __init__(self, url: str, retries: Callable[[str], StoreRetries] = StoreRetries) -> None:
        refuse_unusable(url, DataError)
        self._url = url
        self._protocol = protocol_of(url)
        self.retries = retries(_place(url))
        open_it = partial(open_filesystem, url, DataError)  # some backends log in when they are made
        self._fs, self._root = self.retries.call(f"opening {url}", open_it, partial(self._refusal, url))
        shorter = url.rstrip("/")
        at_end = shorter.endswith(self._root)
        self._head = shorter[: len(shorter) - len(self._root)] if at_end else f"{self._protocol}://"
        self._streams = False

    def find(self) -> list[RemoteFile]:
        """The files that the URL names, sorted by path as local ones are; none for a glob that nothing matches.

        Raises:
            Missing: nothing there, no access, or no credentials.
            Away: an outage longer than a run waits for.
        """
        return self.retries.call(f"listing {self._url}", self._find, partial(self._refusal, self._url))

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """The bytes of a file from ``start`` on, in pieces; what the backend raises comes through.

        Raises:
            Transient: the server gives whole files only, and ``start`` is not 0: ``supports_ranges`` is False from then on.
        """
        if not self.supports_ranges:
            yield from self._stream(file, start)
            return
        with self._fs.open(self._name(file.url), "rb", block_size=_CHUNK, cache_type="none") as remote:
            while start < file.size:
                remote.seek(start)
                try:
                    piece = remote.read(min(_CHUNK, file.size - start))
                except ValueError as error:  # so fsspec says that a server knows no ranges
                    self._streams = True
                    raise TransientError("the server gives whole files only") from error
                if not piece:
                    return
                start += len(piece)
                yield piece

    @property
    def supports_ranges(self) -> bool:
        """Whether reading may begin anywhere in a file."""
        return not self._streams

    def check_version(self, file: RemoteFile) -> None:
        """Raise DataError if the file is no longer the version that was listed; backends' errors come through."""
        now = self._file(file.url, self._info(self._name(file.url)))
        if now != file:
            was, found = _version(file), _version(now)
            raise DataError(
                f"{file.url}: the file was replaced while it was in use (it was {was}, now it is {found}). Put the old "
                "one back, or start over from the new one."
            )

    def permanent_error(self, file: RemoteFile) -> Callable[[Fault], Exception]:
        """What is raised for a fault that lasts, at a file."""
        return partial(self._refusal, file.url)

    # --- listing ---------------------------------------------------------------------------------------------------

    def _find(self) -> list[RemoteFile]:
        files = [self._file(self._head + name, info) for name, info in self._entries().items()]
        return sorted(files, key=lambda file: PurePosixPath(file.url).parts)

    def _entries(self) -> dict[str, dict[str, Any]]:
        """What is at the place, by the backend's names."""
        web = self._protocol in WEB_PROTOCOLS
        first = min((at for sign in ("*[" if web else "*?[") if (at := self._root.find(sign)) >= 0), default=None)
        if first is not None:
            return self._matching(self._root[:first].rpartition("/")[0])
        if not (web and self._url.endswith("/")):  # any address of the web is a file but for those that end so
            info = self._info(self._root)
            if info.get("type") != "directory":
                return {self._root: info}
        below = self._below(self._root, None)
        if not below:
            raise FileNotFoundError("the folder holds no files")
        return below

    def _matching(self, folder: str) -> dict[str, dict[str, Any]]:
        from fsspec.utils import glob_translate  # noqa: PLC0415 - as fsspec itself

        deep = "**" in self._root
        below = self._below(folder, None if deep else self._root[len(folder) :].lstrip("/").count("/") + 1)
        pattern = re.compile(glob_translate(self._root))
        return {name: info for name, info in below.items() if pattern.match(name)}

    def _below(self, folder: str, depth: int | None) -> dict[str, dict[str, Any]]:
        """The files below a folder, hidden ones left out, down to a depth.

        By walking, since ``find`` and ``glob`` take a folder that could not be listed for an empty one.
        """
        self._fs.invalidate_cache()
        web = self._protocol in WEB_PROTOCOLS
        found: dict[str, dict[str, Any]] = {}
        for _, _, files in self._fs.walk(folder + "/" * web, maxdepth=depth, detail=True, on_error="raise"):
            found |= {info["name"]: info for info in files.values()}
        shown = (name for name in found if not any(p.startswith(".") for p in name[len(folder) :].split("/")))
        links = (name for name in shown if not name.endswith("/") and not (web and "?" in name))
        return {name: found[name] for name in links}

    def _info(self, name: str) -> dict[str, Any]:
        self._fs.invalidate_cache()
        return dict(self._fs.info(name))

    def _file(self, url: str, info: dict[str, Any]) -> RemoteFile:
        if info.get("size") is None:  # a listing of web pages has none
            info = self._info(self._name(url))
        if info.get("size") is None:
            raise DataError(
                f"{url}: the server does not say how long the file is (no Content-Length), so that a file that came "
                "only in part could not be told from a whole one. Fetch it by other means and give the local path."
            )
        etag = next((str(info[key]) for key in _VERSIONS if info.get(key)), "").removeprefix("W/").strip('"')
        time = next((info[key] for key in _TIMES if info.get(key)), None)
        return RemoteFile(url, int(info["size"]), etag, 0 if etag or time is None else _nanoseconds(time))

    def _name(self, url: str) -> str:
        """The backend's name of a file that it listed."""
        return url[len(self._head) :]

    def _stream(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        if start:
            raise TransientError("the server gives whole files only")
        with closing(self._fs.open(self._name(file.url), "rb", block_size=0)) as remote:
            while piece := remote.read(_STREAMED):
                yield piece

    def _refusal(self, url: str, fault: Fault) -> Exception:
        return StoreAccessError(refusal(url, fault))


def local_path(path: str) -> str:
    """The path of a ``file://`` URL, any other path as it is."""
    protocol, _, rest = path.partition("://")
    return rest if is_url(path) and protocol.lower() in ("file", "local") else path


def url_file_name(url: str) -> str:
    """The part of a URL that is a file's name with its endings, without a query."""
    protocol = protocol_of(url)
    path = url.partition("?")[0].partition("#")[0] if protocol in WEB_PROTOCOLS else url
    return path.rstrip("/").rpartition("/")[2]


def _place(url: str) -> str:
    """The server or bucket of a URL: what is said to be away."""
    protocol, _, rest = url.partition("://")
    return f"{protocol}://{rest.partition('/')[0]}"


def _version(file: RemoteFile) -> str:
    written = f", written {datetime.fromtimestamp(file.mtime_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    version = f", version {file.etag}" if file.etag else written if file.mtime_ns else ""
    return f"{file.size:,} bytes{version}"


def _nanoseconds(time: Any) -> int:
    """Whole seconds, in ns: listings and single answers of one store differ in what comes after the point."""
    if isinstance(time, str):
        try:
            time = parsedate_to_datetime(time)
        except ValueError:
            time = datetime.fromisoformat(time)
    seconds = time.timestamp() if isinstance(time, datetime) else float(time)
    return int(seconds) * 1_000_000_000
