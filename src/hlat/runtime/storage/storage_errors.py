"""What an exception of a storage backend means: worth another attempt, or not, and why in one line.

    botocore, aiohttp, gcsfs, requests, fsspec, the operating system --> Fault(kind, reason)

Judged by status codes, errno and the names of classes, so that no backend has to be imported to know its errors. The
whole chain of causes counts: fsspec's HTTP backend reports any failure as "file not found" and hides why in the cause.
"""

import errno
import os
import socket
from collections.abc import Iterator
from enum import Enum
from http import HTTPStatus
from itertools import chain as one_by_one
from typing import NamedTuple

from hlat.runtime.urls import redact


class FailureKind(Enum):
    """What can be done about a fault."""

    TRANSIENT = "transient"
    MISSING = "missing"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    OTHER = "other"


class StorageFailure(NamedTuple):
    """What went wrong; ``reason`` is for people, without secrets and without a full stop."""

    kind: FailureKind
    reason: str


class TransientError(Exception):
    """Raised by our own code for what may be otherwise next time: a body that ended too early, for one."""


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
_UNKNOWN_HOST = {number for name in ("EAI_NONAME", "EAI_NODATA") if (number := getattr(socket, name, None)) is not None}


def classify_error(error: BaseException) -> StorageFailure:
    """What an exception means.

    Raises:
        BaseException: the error itself, where it is a defect of a program rather than something that went wrong.
    """
    if isinstance(error, _OWN_BUGS) or not isinstance(error, Exception):
        raise error
    chain = list(_chain(error))
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    status = next(filter(None, map(_status, chain)), None)
    return StorageFailure(_kind(chain, names, status), redact(_reason(chain, names, status)))


def _kind(chain: list[BaseException], names: set[str], status: int | None) -> FailureKind:
    by_status = {404: FailureKind.MISSING, 401: FailureKind.DENIED, 403: FailureKind.DENIED} | dict.fromkeys(
        _AGAIN, FailureKind.TRANSIENT
    )
    refused = "SSLCertVerificationError", "ClientConnectorCertificateError"
    judgements = (
        (
            any(getattr(one, "retryable", False) is True for one in chain),
            FailureKind.TRANSIENT,
        ),  # google.auth says so itself
        (bool(names & _NO_CREDENTIALS), FailureKind.NO_CREDENTIALS),
        (status in by_status, by_status.get(status or 0, FailureKind.OTHER)),
        (_unknown_host(chain) or not names.isdisjoint(refused), FailureKind.OTHER),
        (bool(names & _TRANSIENT) or _transient_errno(chain) is not None, FailureKind.TRANSIENT),
        ("PermissionError" in names, FailureKind.DENIED),
        ("FileNotFoundError" in names, FailureKind.MISSING),
    )
    return next((kind for holds, kind in judgements if holds), FailureKind.OTHER)


def _reason(chain: list[BaseException], names: set[str], status: int | None) -> str:
    said = next((line for one in chain if (line := _on_one_line(one))), type(chain[0]).__name__)
    if status is not None:
        code = next(filter(None, map(_code, chain)), None) or _phrase(status)
        return f"HTTP {status} {code}".strip()
    if _unknown_host(chain):
        return "no such host"
    number = _transient_errno(chain)
    if number is not None:
        return os.strerror(number).lower()
    return "timed out" if "TimeoutError" in names else said


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception carries: aiohttp's, gcsfs's, botocore's or requests' way."""
    response = getattr(error, "response", None)
    inner = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    places = (response, "status_code"), (error, "status"), (error, "code")
    found = one_by_one((inner,), (getattr(place, name, None) for place, name in places))
    return next((int(one) for one in found if isinstance(one, int) and 300 <= one < 600), None)


def _transient_errno(chain: list[BaseException]) -> int | None:
    return next((one.errno for one in chain if isinstance(one, OSError) and one.errno in _TRANSIENT_ERRNO), None)


def _code(error: BaseException) -> str | None:
    """S3's own word for an error, such as SlowDown."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code) if code and not str(code).isdigit() else None


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in {one.value for one in HTTPStatus} else ""


def _unknown_host(chain: list[BaseException]) -> bool:
    return any(isinstance(one, socket.gaierror) and one.errno in _UNKNOWN_HOST for one in chain)


def _on_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
