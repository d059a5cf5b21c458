"""Object stores and servers: open a URL with the fsspec backend of its protocol, and classify what goes wrong there.

    s3://bucket/prefix --open_filesystem--> file system, "bucket/prefix"
    exception of botocore, aiohttp, gcsfs, requests, fsspec, the operating system
        --classify_error--> StorageFailure: transient or not, the reason in one line
        --explain_failure-> message for the user

The backends' own retries and caches are off. fsspec and its backends are imported when the first URL is opened. They
find credentials and endpoints in the environment themselves; nothing of these is read, stored or shown here.

The classification uses status codes, errno and class names, so that no backend has to be imported. It considers the
complete chain of causes: fsspec's HTTP backend reports any failure as "file not found", with the real error as cause.
"""

import errno
import os
import re
import socket
from collections.abc import Iterator
from enum import Enum
from http import HTTPStatus
from itertools import chain as concatenate
from typing import Any, NamedTuple

from hlat.runtime.errors import HlatError
from hlat.runtime.urls import WEB_PROTOCOLS, find_secret, is_url, redact
from hlat.runtime.version import install_command


class FailureKind(Enum):
    """Kind of a storage failure, which decides how to handle it."""

    TRANSIENT = "transient"
    MISSING = "missing"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    NO_HOST = "no such host"
    OTHER = "other"


class StorageFailure(NamedTuple):
    """A classified failure; ``reason`` is for people, without secrets and without a full stop."""

    kind: FailureKind
    reason: str


class TransientError(Exception):
    """An error of hlat's own that may not occur again, such as a response body that ended too early."""


_OWN_BUGS = (TypeError, AttributeError, NameError, AssertionError, KeyError, IndexError, MemoryError)
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError",
    "SSOTokenLoadError", "UnauthorizedSSOTokenError", "NoAuthTokenError",
}  # fmt: skip
_TRANSIENT = {
    "TransientError", "ConnectionError", "TimeoutError", "Timeout", "ClientConnectionError", "ClientPayloadError",
    "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ResponseParserError", "ProtocolError",
    "TransportError", "CredentialRetrievalError", "MetadataRetrievalError", "ChunkedEncodingError", "FileExpired",
}  # fmt: skip
_TRANSIENT_ERRNO = {
    errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN,
    errno.ENETRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE,
    errno.ESTALE, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_AGAIN = {408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529, 598, 599}
_UNKNOWN_HOST = {
    number
    for name in ("EAI_NONAME", "EAI_NODATA", "EAI_AGAIN", "EAI_FAIL")
    if (number := getattr(socket, name, None)) is not None
}
_UNRESOLVED = re.compile(  # where a library repeats the resolver's message without its exception
    "name or service not known|temporary failure in name resolution|nodename nor servname provided|"
    "no address associated with hostname|getaddrinfo failed|nameresolutionerror",
    re.IGNORECASE,
)


def classify_error(error: BaseException) -> StorageFailure:
    """Classify an exception; one that is a bug of a program, and no failure of storage, is raised again."""
    if isinstance(error, _OWN_BUGS) or not isinstance(error, Exception):
        raise error
    chain = list(_chain(error))
    names = {base.__name__ for exception in chain for base in type(exception).__mro__}
    status = next(filter(None, map(_status, chain)), None)
    return StorageFailure(_kind(chain, names, status), redact(_reason(chain, names, status)))


def _kind(chain: list[BaseException], names: set[str], status: int | None) -> FailureKind:
    by_status = {404: FailureKind.MISSING, 401: FailureKind.DENIED, 403: FailureKind.DENIED} | dict.fromkeys(
        _AGAIN, FailureKind.TRANSIENT
    )
    refused = "SSLCertVerificationError", "ClientConnectorCertificateError"
    rules = (
        (
            any(getattr(exception, "retryable", False) is True for exception in chain),
            FailureKind.TRANSIENT,
        ),  # set by google.auth
        (bool(names & _NO_CREDENTIALS), FailureKind.NO_CREDENTIALS),
        (status in by_status, by_status.get(status or 0, FailureKind.OTHER)),
        ("OfflineModeIsEnabled" in names, FailureKind.OTHER),  # HF_HUB_OFFLINE, a ConnectionError: no time will help
        (_unknown_host(chain), FailureKind.NO_HOST),
        (not names.isdisjoint(refused), FailureKind.OTHER),
        (bool(names & _TRANSIENT) or _transient_errno(chain) is not None, FailureKind.TRANSIENT),
        ("PermissionError" in names, FailureKind.DENIED),
        ("FileNotFoundError" in names, FailureKind.MISSING),
    )
    return next((kind for holds, kind in rules if holds), FailureKind.OTHER)


def _reason(chain: list[BaseException], names: set[str], status: int | None) -> str:
    text = next((line for exception in chain if (line := _on_one_line(exception))), type(chain[0]).__name__)
    if status is not None:
        code = next(filter(None, map(_code, chain)), None) or _PHRASES.get(status, "")
        return f"HTTP {status} {code}".strip()
    if _unknown_host(chain):
        return "its name does not resolve (no network, or no such host)"
    number = _transient_errno(chain)
    if number is not None:
        return os.strerror(number).lower()
    return "timed out" if "TimeoutError" in names else text


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    exception: BaseException | None = error
    while exception is not None and id(exception) not in seen:
        yield exception
        seen.add(id(exception))
        exception = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    inner = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    attributes = (response, "status_code"), (error, "status"), (error, "code")
    found = concatenate((inner,), (getattr(holder, name, None) for holder, name in attributes))
    return next((int(status) for status in found if isinstance(status, int) and 300 <= status < 600), None)


def _transient_errno(chain: list[BaseException]) -> int | None:
    numbers = (exception.errno for exception in chain if isinstance(exception, OSError))
    return next((number for number in numbers if number in _TRANSIENT_ERRNO), None)


def _code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code) if code and not str(code).isdigit() else None


def _unknown_host(chain: list[BaseException]) -> bool:
    return any(
        exception.errno in _UNKNOWN_HOST
        if isinstance(exception, socket.gaierror)
        else _UNRESOLVED.search(str(exception)) is not None
        for exception in chain
    )


def _on_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_NO_STORES = (
    "abstract", "archive", "async_wrapper", "asyncwrapper", "blockcache", "cache", "cached", "dask", "data", "dir",
    "filecache", "generic", "git", "github", "jlab", "jupyter", "libarchive", "reference", "simplecache", "tar", "zip",
)  # fmt: skip
"""Protocols of fsspec that show files of another place in another way: archives, caches, sessions, repositories."""
_HERE = ("asynclocal", "file", "local", "memory")
_READ_ONLY = (*WEB_PROTOCOLS, "dvc", "gist", "pyscript")
_WHAT_WORKS = "Give the files themselves: s3://, gs://, hf://, https:// or a path; unpack archives first."
_ACCESS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role; FSSPEC_S3_ANON=true for a "
    "public bucket",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS or the machine's account; FSSPEC_GS_TOKEN=anon for a public bucket",
    "http": '~/.netrc, or FSSPEC_HTTPS=\'{"headers": {"Authorization": ...}}\'',
}


def open_filesystem(url: str, wrong: type[HlatError]) -> tuple[Any, str]:
    """Open the fsspec backend of a URL; return the file system, and the path within it.

    Raises:
        HlatError: of type ``wrong``: the URL holds a secret, its protocol is unknown, or its backend is not installed.
        Exception: from a backend that logs in when it is created; ``classify_error`` interprets it.
    """
    check_url(url, wrong)
    protocol = protocol_of(url)
    import fsspec  # noqa: PLC0415 - only where a URL is used: workers and local corpora start without it

    try:
        backend = fsspec.get_filesystem_class(protocol)
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **_options(protocol, fsspec.config.conf))
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        install = install_command(extra) if extra else f"install its backend ({error})"
        raise wrong(f"{url}: {protocol}:// needs a package that is not installed: {install}") from error
    except (ValueError, TypeError, AttributeError) as error:  # the last two: a backend that wants more than a URL
        what = redact(str(error)) if isinstance(error, ValueError) else f"{protocol}:// needs more than a URL"
        raise wrong(f"{url}: {what}. {_WHAT_WORKS}") from error
    if hasattr(backend, "retries"):
        fs.retries = 1  # hlat retries itself: it reports the attempts, and waits longer
    return fs, str(root).rstrip("/") if str(root) != "/" else str(root)


def protocol_of(url: str) -> str:
    """Text of a URL before ``://``, in lower case."""
    return url.partition("://")[0].lower()


def check_url(url: str, wrong: type[HlatError]) -> None:
    """Raise an error of type ``wrong`` if a URL must not be recorded or cannot be understood."""
    secret = find_secret(url)
    if secret is not None:
        raise wrong(
            f"{redact(url)}: the URL holds {secret}, and paths are recorded in manifests, checkpoints and "
            "logs. Give the URL without it; credentials come from the environment."
        )
    if "::" in url:
        raise wrong(f"{url}: chained URLs are not supported; give the URL of the files themselves.")
    if (protocol := protocol_of(url)) in _NO_STORES:
        raise wrong(f"{url}: {protocol}:// is a view of other files, and no store of its own. {_WHAT_WORKS}")


def why_not_writable(url: str) -> str | None:
    """Return why no run can keep files at a URL, as the protocols of fsspec go; None if it can."""
    if not is_url(url) or "::" in url:
        return "this is not the URL of a store"
    protocol = protocol_of(url)
    if protocol in _NO_STORES:
        return f"{protocol}:// is a view of other files, and no store of its own"
    if protocol in _HERE:
        return f"{protocol}:// is this machine itself"
    if protocol in _READ_ONLY:
        return f"{protocol}:// can be read only"
    import fsspec  # noqa: PLC0415 - as above

    return None if protocol in fsspec.available_protocols() else f"no installed package knows {protocol}://"


def explain_failure(url: str, failure: StorageFailure, rights: str = "read and list") -> str:
    """Return a message about a failed access, which needs these ``rights``, with what would work."""
    protocol = protocol_of(url)
    access = _ACCESS.get(_EXTRAS.get(protocol, ""), f"what the fsspec backend of {protocol}:// reads")
    match failure.kind:
        case FailureKind.MISSING:
            why = f" ({failure.reason})" if failure.reason not in url else ""
            return f"{url}: nothing there{why}. Check the name, and the endpoint if one is set."
        case FailureKind.DENIED:
            return (
                f"{url}: permission denied: {failure.reason}. Grant the right to {rights} it, or use other "
                f"credentials: {access}."
            )
        case FailureKind.NO_CREDENTIALS:
            return f"{url}: no credentials: {failure.reason}. They come from the environment: {access}."
        case FailureKind.NO_HOST:
            return (
                f"{url}: the store cannot be reached: {failure.reason}. Check the name, the endpoint if one is set, "
                "and the network of this machine; without one, copy the files and give their path."
            )
    done = "read" if rights == "read and list" else "used"
    return f"{url}: cannot be {done}: {failure.reason}. Check the URL, and the endpoint if one is set."


def _options(protocol: str, environment: dict[str, dict[str, Any]]) -> dict[str, Any]:
    # Settings from FSSPEC_* variables stay. Listings that are cached may be old.
    given = {**environment.get(_EXTRAS.get(protocol, protocol), {}), **environment.get(protocol, {})}
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        config = given.get("config_kwargs", {})
        # hlat retries itself.
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, **config}
    if protocol in WEB_PROTOCOLS:
        import aiohttp  # noqa: PLC0415 - the backend of this protocol, and only of this one

        # Limits for silence only: a large file may take hours.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        session = given.get("client_kwargs", {})
        headers = {"Accept-Encoding": "identity", **session.get("headers", {})}  # not compressed
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True, **session, "headers": headers}
    return options
