"""URLs in recipes and messages: find credentials in them, and redact them.

    value of a recipe --find_secret--> None, or a description of the credential
    message, line of a log --redact--> the same text, with user names, queries and fragments of URLs as dots

A recipe is copied into checkpoints, logs and manifests, so its URLs must not grant access to anything. A credential
cannot be recognized by its form. So nothing is allowed in the positions that can hold one, except the few query
parameters of public downloads.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

WEB_PROTOCOLS = ("http", "https")  # protocols whose stores are read-only and have no folders

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_START = re.compile(r":/+")
_IN_PROSE = re.compile(r"[^\s'\"<>]*")  # in prose a URL ends at whitespace or a quote
_IN_VALUE = re.compile(r".*", re.DOTALL)  # in a value the URL extends to the end
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*\Z")
_LONGEST_SCHEME = 32  # characters that are searched before "://"
_AT = re.compile(r"@|%(?:25)*40")  # also percent-encoded, once or several times
_COLON = re.compile(r":|%(?:25)*3[aA]")
_WEB_QUERY = re.compile(r"\?.|;[\w.\-%]+=|#.", re.DOTALL)
_QUERY = re.compile(r"[?#][\w.\-%]+=")  # elsewhere ? may be a glob pattern, and # part of a name
_PUBLIC = re.compile(
    r"(download|dl|raw)(=(0|1|true|false|yes|no))?|alt=media|version_?id=[\w.\-]{1,1024}|generation=\d{1,20}",
    re.IGNORECASE,
)
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")  # Azure: the container's name precedes the @
_SECRET_NAMES = {"sig", "key", "policy", "auth", "authorization", "pwd", "pass", "passwd", "code", "jwt"}
_SECRET_PARTS = ("signature", "token", "secret", "password", "credential", "apikey", "api_key", "api-key", "accesskey",
                 "access_key", "security", "sessionid", "key-pair")  # fmt: skip


class _Parts(NamedTuple):
    """A URL after its scheme. ``user`` and ``suffix`` (query and fragment) may hold credentials."""

    user: str  # including its @
    location: str
    suffix: str


def is_url(path: str) -> bool:
    """Return True if fsspec opens the path: ``protocol://...``, or protocols joined by ``::``."""
    return _URL.match(path) is not None


def find_secret(value: str) -> str | None:
    """Describe a credential in the URLs of a complete value, without repeating it; None if it may be recorded."""
    for start in _START.finditer(value):
        if len(start[0]) > 2:
            parts = _split(_scheme_before(value, start.start()), value[start.end() :])
            if parts.user:
                return "a password" if _COLON.search(parts.user) else "a user name or a token"
            if parts.suffix:
                return _describe_suffix(parts.suffix)
    return None


def redact(text: str) -> str:
    """Replace user names, queries and fragments of all URLs in a text by dots."""
    return _without(text, _IN_PROSE)


def redact_value(value: str) -> str:
    """Redact the URLs of a complete value, each of which extends to the end of the value."""
    return _without(value, _IN_VALUE)


def redact_json(value: Any) -> Any:
    """Redact all texts of a JSON value, so that it can be recorded."""
    if isinstance(value, str):  # text with whitespace is prose
        return redact(value) if any(char.isspace() for char in value) else redact_value(value)
    if isinstance(value, Mapping):
        return {key: redact_json(inner) for key, inner in value.items()}
    return [redact_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _without(text: str, extent: re.Pattern[str]) -> str:
    pieces, at = [], 0
    while (start := _START.search(text, at)) is not None:
        found = extent.match(text, start.end())
        assert found is not None, "the pattern also matches the empty string"
        rest = found[0]
        tail = "" if extent is _IN_VALUE else rest[len(rest.rstrip(".,:;)]}")) :]  # punctuation of the sentence
        parts = _split(_scheme_before(text, start.start()), rest[: len(rest) - len(tail)])
        pieces += [text[at : start.end()], "...@" if parts.user else ""]
        nested = _START.search(parts.location)  # in a chain, or in a path
        if nested is not None:
            pieces.append(parts.location[: nested.start()])
            at = start.end() + len(parts.user) + nested.start()
            continue
        pieces += [parts.location, f"{parts.suffix[0]}..." if parts.suffix else "", tail]
        at = start.end() + len(rest)
    return "".join([*pieces, text[at:]])


def _scheme_before(text: str, end: int) -> str:
    found = _SCHEME.search(text[max(0, end - _LONGEST_SCHEME) : end])
    return found[0].lower() if found is not None else ""


def _split(scheme: str, rest: str) -> _Parts:
    end = min((at for sign in "/?#" if (at := rest.find(sign)) >= 0), default=len(rest))
    authority, path = rest[:end], rest[end:]
    ats = list(_AT.finditer(authority))
    user, host = (authority[: ats[-1].end()], authority[ats[-1].end() :]) if ats else ("", authority)
    if scheme in _CONTAINERS and user and not _COLON.search(user):
        user, host = "", authority
    if scheme in WEB_PROTOCOLS and not _is_port(host):  # https://user:pass/word@host: a slash in the password
        return _Parts(rest, "", "")
    found = (_WEB_QUERY if scheme in WEB_PROTOCOLS else _QUERY).search(path)
    location, suffix = (path, "") if found is None else (path[: found.start()], path[found.start() :])
    if suffix.startswith("?") and all(_PUBLIC.fullmatch(parameter) for parameter in suffix[1:].split("&")):
        location, suffix = path, ""
    return _Parts(user, host + location, suffix)


def _is_port(host: str) -> bool:
    # An IPv6 address is in brackets, with colons of its own.
    port = host.rpartition("]")[2].partition(":")[2]
    return port == "" or (port.isascii() and port.isdigit())


def _describe_suffix(suffix: str) -> str:
    if suffix.startswith("#"):
        return "a fragment (#...), which may give access"
    for name in re.split("[?&;]", suffix.partition("#")[0]):
        low = name.partition("=")[0].lower()
        if "=" in name and (low in _SECRET_NAMES or any(part in low for part in _SECRET_PARTS)):
            return f"the query parameter {name.partition('=')[0]}, which gives access"
    return "a query (?...), which may give access"
