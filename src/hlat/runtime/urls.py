"""URLs in recipes and in messages: what of them may open something, and how text is shown without it.

    value of a recipe --secret_in--> None, or why it is refused
    message, line of a log --without_secrets--> the same text, users, queries and fragments as dots

A recipe is copied into checkpoints, logs and manifests, so a URL in it must not open anything by itself. What a
credential looks like cannot be known; so nothing is allowed where credentials stand, but the few parameters of public
downloads that hold none.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

WEB_PROTOCOLS = ("http", "https")
"""Protocols whose stores are read only and have no folders."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_START = re.compile(r":/+")
_IN_PROSE = re.compile(r"[^\s'\"<>]*")  # a URL ends at a blank or a quote
_IN_VALUE = re.compile(r".*", re.DOTALL)  # the rest of a value belongs to its URL
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*\Z")
_LONGEST_SCHEME = 32
_AT = re.compile(r"@|%(?:25)*40")  # also encoded, once or several times
_COLON = re.compile(r":|%(?:25)*3[aA]")
_WEB_QUERY = re.compile(r"\?.|;[\w.\-%]+=|#.", re.DOTALL)
_QUERY = re.compile(r"[?#][\w.\-%]+=")  # elsewhere ? is also a glob's, and # a character of names
_PUBLIC = re.compile(
    r"(download|dl|raw)(=(0|1|true|false|yes|no))?|alt=media|version_?id=[\w.\-]{1,1024}|generation=\d{1,20}",
    re.IGNORECASE,
)
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")  # Azure's: the name of the container stands before the @
_SECRET_NAMES = {"sig", "key", "policy", "auth", "authorization", "pwd", "pass", "passwd", "code", "jwt"}
_SECRET_PARTS = ("signature", "token", "secret", "password", "credential", "apikey", "api_key", "api-key", "accesskey",
                 "access_key", "security", "sessionid", "key-pair")  # fmt: skip


class _Parts(NamedTuple):
    """A URL after its scheme; ``user`` and ``more`` (query and fragment) are what may open something."""

    user: str  # with its @
    place: str
    more: str


def is_url(path: str) -> bool:
    """Whether a path is for fsspec: ``protocol://...``, or a chain of protocols joined by ``::``."""
    return _URL.match(path) is not None


def find_secret(value: str) -> str | None:
    """What of a value's URLs may be secret, in words and without repeating it; None for one that may be recorded.

    Args:
        value: a whole value, such as a field of a recipe, which may hold a URL anywhere.
    """
    for start in _START.finditer(value):
        if len(start[0]) > 2:
            parts = _parts(_scheme_before(value, start.start()), value[start.end() :])
            if parts.user:
                return "a password" if _COLON.search(parts.user) else "a user name or a token"
            if parts.more:
                return _name_of_more(parts.more)
    return None


def redact(text: str) -> str:
    """Text with the users, queries and fragments of all URLs in it replaced by dots."""
    return _without(text, _IN_PROSE)


def redact_value(value: str) -> str:
    """A whole value with the users, queries and fragments of its URLs, whatever characters they have, as dots."""
    return _without(value, _IN_VALUE)


def redact_json(value: Any) -> Any:
    """A value of JSON whose texts are without the users, queries and fragments of their URLs, as is to be recorded."""
    if isinstance(value, str):  # a text with blanks is a sentence, in which a URL ends somewhere
        return redact(value) if any(char.isspace() for char in value) else redact_value(value)
    if isinstance(value, Mapping):
        return {key: redact_json(inner) for key, inner in value.items()}
    return [redact_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _without(text: str, extent: re.Pattern[str]) -> str:
    shown, at = [], 0
    while (start := _START.search(text, at)) is not None:
        found = extent.match(text, start.end())
        assert found is not None, "it matches nothing, too"
        rest = found[0]
        tail = "" if extent is _IN_VALUE else rest[len(rest.rstrip(".,:;)]}")) :]  # punctuation of the sentence
        parts = _parts(_scheme_before(text, start.start()), rest[: len(rest) - len(tail)])
        shown += [text[at : start.end()], "...@" if parts.user else ""]
        another = _START.search(parts.place)  # of a chain, or in a path
        if another is not None:
            shown.append(parts.place[: another.start()])
            at = start.end() + len(parts.user) + another.start()
            continue
        shown += [parts.place, f"{parts.more[0]}..." if parts.more else "", tail]
        at = start.end() + len(rest)
    return "".join([*shown, text[at:]])


def _scheme_before(text: str, end: int) -> str:
    found = _SCHEME.search(text[max(0, end - _LONGEST_SCHEME) : end])
    return found[0].lower() if found is not None else ""


def _parts(scheme: str, rest: str) -> _Parts:
    end = min((at for sign in "/?#" if (at := rest.find(sign)) >= 0), default=len(rest))
    authority, path = rest[:end], rest[end:]
    ats = list(_AT.finditer(authority))
    user, host = (authority[: ats[-1].end()], authority[ats[-1].end() :]) if ats else ("", authority)
    if scheme in _CONTAINERS and user and not _COLON.search(user):
        user, host = "", authority
    if scheme in WEB_PROTOCOLS and not _port(host):  # https://user:pass/word@host: the password holds a slash
        return _Parts(rest, "", "")
    found = (_WEB_QUERY if scheme in WEB_PROTOCOLS else _QUERY).search(path)
    place, more = (path, "") if found is None else (path[: found.start()], path[found.start() :])
    if more.startswith("?") and all(_PUBLIC.fullmatch(one) for one in more[1:].split("&")):
        place, more = path, ""
    return _Parts(user, host + place, more)


def _port(host: str) -> bool:
    """Whether what follows the colon of a host, if there is one, is a number; an IPv6 address stands in brackets."""
    port = host.rpartition("]")[2].partition(":")[2]
    return port == "" or (port.isascii() and port.isdigit())


def _name_of_more(more: str) -> str:
    if more.startswith("#"):
        return "a fragment (#...), which may give access"
    for name in re.split("[?&;]", more.partition("#")[0]):
        low = name.partition("=")[0].lower()
        if "=" in name and (low in _SECRET_NAMES or any(part in low for part in _SECRET_PARTS)):
            return f"the query parameter {name.partition('=')[0]}, which gives access"
    return "a query (?...), which may give access"
