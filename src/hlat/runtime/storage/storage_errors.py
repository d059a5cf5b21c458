"""Classify an exception of a storage backend: its kind (transient or not), and the reason in one line.

    botocore, aiohttp, gcsfs, requests, fsspec, the operating system --> StorageFailure(kind, reason)

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
from typing import NamedTuple

from hlat.runtime.urls import redact


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
    """Classify an exception.

    Raises:
        BaseException: the error itself, if it is a bug in a program rather than a failure of storage.
    """
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
        code = next(filter(None, map(_code, chain)), None) or _phrase(status)
        return f"HTTP {status} {code}".strip()
    if _unknown_host(chain):
        return "its name does not resolve (no network, or no such host)"
    number = _transient_errno(chain)
    if number is not None:
        return os.strerror(number).lower()
    return "timed out" if "TimeoutError" in names else text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    exception: BaseException | None = error
    while exception is not None and id(exception) not in seen:
        yield exception
        seen.add(id(exception))
        exception = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)


def _status(error: BaseException) -> int | None:
    """HTTP status of an exception of aiohttp, gcsfs, botocore or requests; None if it has none."""
    response = getattr(error, "response", None)
    inner = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    attributes = (response, "status_code"), (error, "status"), (error, "code")
    found = concatenate((inner,), (getattr(holder, name, None) for holder, name in attributes))
    return next((int(status) for status in found if isinstance(status, int) and 300 <= status < 600), None)


def _transient_errno(chain: list[BaseException]) -> int | None:
    numbers = (exception.errno for exception in chain if isinstance(exception, OSError))
    return next((number for number in numbers if number in _TRANSIENT_ERRNO), None)


def _code(error: BaseException) -> str | None:
    """Error code of S3, such as SlowDown; None if there is none."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code) if code and not str(code).isdigit() else None


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in {known.value for known in HTTPStatus} else ""


def _unknown_host(chain: list[BaseException]) -> bool:
    return any(
        exception.errno in _UNKNOWN_HOST
        if isinstance(exception, socket.gaierror)
        else _UNRESOLVED.search(str(exception)) is not None
        for exception in chain
    )


def _on_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
