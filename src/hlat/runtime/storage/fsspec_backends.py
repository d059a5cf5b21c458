"""Open a URL with the fsspec backend of its protocol, without the backend's own retries and caches.

    s3://bucket/prefix --open_filesystem--> file system, "bucket/prefix"
    url, StorageFailure --explain_failure--> message for the user

fsspec and its backends are imported when the first URL is opened. They find credentials and endpoints in the
environment themselves; nothing of these is read, stored or shown here.
"""

from typing import Any

from hlat.runtime.errors import HlatError
from hlat.runtime.storage.storage_errors import FailureKind, StorageFailure
from hlat.runtime.urls import WEB_PROTOCOLS, find_secret, is_url, redact

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
    """Open the backend of a URL.

    Args:
        url: URL of a file, a folder or prefix, or a glob.
        wrong: type of error to raise for a URL that cannot be used.

    Returns:
        The file system, and the path of the URL within it.

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
        install = f"pip install 'hlat[{extra}]'" if extra else f"install its backend ({error})"
        raise wrong(f"{url}: {protocol}:// needs a package that is not installed: {install}") from error
    except (ValueError, TypeError, AttributeError) as error:  # the last two: a backend that wants more than a URL
        what = redact(str(error)) if isinstance(error, ValueError) else f"{protocol}:// needs more than a URL"
        raise wrong(f"{url}: {what}. {_WHAT_WORKS}") from error
    if hasattr(backend, "retries"):
        fs.retries = 1  # hlat retries itself: it reports the attempts, and waits longer
    return fs, str(root).rstrip("/") if str(root) != "/" else str(root)


def protocol_of(url: str) -> str:
    """Protocol of a URL, in lower case: the text before ``://``."""
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
    """Return a message for the user about a failed access: what went wrong and what would work.

    Args:
        url: URL that was accessed.
        failure: classified failure.
        rights: permission that is needed, for the message.
    """
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
    """Options of a backend: no cached listings, no retries of its own, time-outs for silence only.

    Args:
        protocol: protocol of the URL.
        environment: settings from FSSPEC_* variables, which are kept.
    """
    given = {**environment.get(_EXTRAS.get(protocol, protocol), {}), **environment.get(protocol, {})}
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        config = given.get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, **config}
    if protocol in WEB_PROTOCOLS:
        import aiohttp  # noqa: PLC0415 - the backend of this protocol, and only of this one

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
        session = given.get("client_kwargs", {})
        headers = {"Accept-Encoding": "identity", **session.get("headers", {})}  # not compressed
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True, **session, "headers": headers}
    return options
