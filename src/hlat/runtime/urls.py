"""Paths that are URLs: which of them hold a secret, and how text is shown without one.

A recipe is copied into checkpoints, logs and manifests, so a URL in it must not open anything by itself.
"""

import re
from urllib.parse import parse_qsl

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_PASSWORD = re.compile(r"(://)[^/?#\s'\"@]*:[^/?#\s'\"]*@")
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s?'\")\]]*=[^\s'\")\]]*")  # a ? without a = is a glob's
_SECRET_NAMES = {"sig", "key", "policy", "auth", "authorization", "pwd", "pass", "passwd", "code", "jwt"}
_SECRET_PARTS = ("signature", "token", "secret", "password", "credential", "apikey", "api_key", "api-key", "accesskey",
                 "access_key", "security", "sessionid", "key-pair")  # fmt: skip


def is_url(path: str) -> bool:
    """Whether a path is for fsspec: ``protocol://...``, or a chain of protocols joined by ``::``."""
    return _URL.match(path) is not None


def secret_in(url: str) -> str | None:
    """What of a URL is secret, in words and without its value; None for a URL that may be recorded."""
    if _PASSWORD.search(url):
        return "a password"
    for name, _ in parse_qsl(url.partition("?")[2].partition("#")[0], keep_blank_values=True):
        low = name.lower()
        if low in _SECRET_NAMES or any(part in low for part in _SECRET_PARTS):
            return f"the query parameter {name}, which gives access"
    return None


def without_secrets(text: str) -> str:
    """Text with the passwords and queries of all URLs in it replaced by dots."""
    return _QUERY.sub(r"\1?...", _PASSWORD.sub(r"\1...@", text))
