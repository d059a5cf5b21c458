"""A URL -> the fsspec backend that reaches it, set up for a program that keeps its own patience.

    s3://bucket/prefix --connect--> file system, "bucket/prefix"
    url, Fault --refusal--> what to tell the user

fsspec and its backends are imported when the first URL is met, never before. Credentials and endpoints are theirs to
find, in the environment; nothing of them is read, kept or shown here.
"""

from typing import Any

from hlat.runtime.errors import HlatError
from hlat.runtime.storage.storage_errors import FailureKind, StorageFailure
from hlat.runtime.urls import WEB_PROTOCOLS, find_secret, redact

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_ACCESS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role; FSSPEC_S3_ANON=true for a "
    "public bucket",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS or the machine's account; FSSPEC_GS_TOKEN=anon for a public bucket",
    "http": '~/.netrc, or FSSPEC_HTTPS=\'{"headers": {"Authorization": ...}}\'',
}


def open_filesystem(url: str, wrong: type[HlatError]) -> tuple[Any, str]:
    """The backend of a URL, and its name for what the URL names.

    Args:
        url: of a file, a folder or prefix, or a glob.
        wrong: the kind of error that a URL is which cannot be used.

    Raises:
        HlatError: of the kind ``wrong``: a URL that holds a secret, an unknown protocol, or a backend that is not
            installed.
        Exception: what a backend raises that logs in when it is made; ``fault_of`` says what it means.
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
        raise wrong(f"{url}: {protocol}:// takes a package that is not installed: {install}") from error
    except ValueError as error:
        raise wrong(f"{url}: {redact(str(error))}. s3://, gs:// and https:// are known.") from error
    if hasattr(backend, "retries"):
        fs.retries = 1  # ours tell the user, and wait longer
    return fs, str(root).rstrip("/") if str(root) != "/" else str(root)


def protocol_of(url: str) -> str:
    """What stands before ``://``, in lower case."""
    return url.partition("://")[0].lower()


def check_url(url: str, wrong: type[HlatError]) -> None:
    """Raise an error of the kind ``wrong`` for a URL that must not be recorded, or is none that is understood."""
    secret = find_secret(url)
    if secret is not None:
        raise wrong(
            f"{redact(url)}: the URL holds {secret}, and paths are recorded in manifests, checkpoints and "
            "logs. Give it without; credentials come from the environment."
        )
    if "::" in url:
        raise wrong(f"{url}: chained URLs are not read; give the URL of the files themselves.")


def explain_failure(url: str, fault: StorageFailure, rights: str = "read and list") -> str:
    """What to tell the user of a fault that another attempt would not mend.

    Args:
        url: what was asked for.
        fault: of a kind other than TRANSIENT.
        rights: what has to be allowed there.
    """
    protocol = protocol_of(url)
    access = _ACCESS.get(_EXTRAS.get(protocol, ""), f"what the fsspec backend of {protocol}:// reads")
    match fault.kind:
        case FailureKind.MISSING:
            why = f" ({fault.reason})" if fault.reason not in url else ""
            return f"{url}: nothing there{why}. Check the name, and the endpoint if one is set."
        case FailureKind.DENIED:
            return (
                f"{url}: permission denied: {fault.reason}. Grant the right to {rights} it, or use other "
                f"credentials: {access}."
            )
        case FailureKind.NO_CREDENTIALS:
            return f"{url}: no credentials: {fault.reason}. They come from the environment: {access}."
    done = "read" if rights == "read and list" else "used"
    return f"{url}: cannot be {done}: {fault.reason}. Check the URL, and the endpoint if one is set."


def _options(protocol: str, environment: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Options of a backend: no listings from its memory, no attempts of its own, time-outs for silence only.

    Args:
        protocol: of the URL.
        environment: what FSSPEC_* variables set, which stays in force beside these.
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
        headers = {"Accept-Encoding": "identity", **session.get("headers", {})}  # the bytes of the file, and its length
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True, **session, "headers": headers}
    return options
