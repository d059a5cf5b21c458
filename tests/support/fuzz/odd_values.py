"""Sixty odd values in YAML, and the fields of a recipe that they are put into.

Values of other types, beyond every bound, in other notations, nested, with control characters, URLs and paths.
"""

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from hlat.config import Recipe

SECRET = "S3CR3T"
"""Credential in a URL, which must not appear in any output."""

ODD_VALUES: tuple[str, ...] = (
    # nothing, and values of other types
    "", "null", "~", "true", "no", "[]", "{}", "[null]", "{a: 1}", "[[[[]]]]", '""', "' '", "!!binary aGFsbG8=",
    "!!set {a, b}", "!!timestamp 2001-01-01", "2001-99-99", "!!int abc", "!!float abc", "!!bool abc", "!!null abc",
    # numbers beyond every bound, and in other notations
    "0", "-1", "1", "1.5", "-0.0", "1e400", "-1e400", ".nan", ".inf", "-.inf", "1e-400", "9223372036854775807",
    "9223372036854775808", "1" + "0" * 30, "9" * 5000, "0x" + "f" * 5000, "100M", "1_000", "1:40", "0100", "٣",
    # texts
    "x", "a" * 300, "b" * 20_000, '"\\e[2J\\x9b1m\\x85"', '"\\u202eabc\\u2066"', '"a\\nb\\tc\\rd"', '"\\0"',
    '"\\ud800"', "[/b]", "é𝔘語", "{" * 500, "[" * 3000,
    # paths and URLs
    "/dev/zero", "/", "../../../etc/passwd", "s3://bucket/prefix/x", f"https://{SECRET}@host/x",
    f"http://h/x?k={SECRET}",
    f"https://u%3A{SECRET}%40host/x#access_token={SECRET}",
)  # fmt: skip


def fields() -> list[str]:
    """Dotted paths of all fields and sections of a recipe; for a list of sections those of its first element."""
    return list(_fields(Recipe, ""))


def _fields(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        within_list = typing.get_origin(field.annotation) is tuple
        seen: set[str] = set()
        for inner in _sections(field.annotation):
            paths = list(_fields(inner, f"{prefix}{name}." + ("0." if within_list else "")))
            yield from (path for path in paths if path not in seen)
            seen.update(paths)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for inner in typing.get_args(annotation) for section in _sections(inner)]
