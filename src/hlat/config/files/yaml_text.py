"""YAML text to plain values; every error is one sentence with its line.

    text --load_yaml--> None, bool, int, float, str, lists and mappings of them; YamlError

Scalars follow YAML 1.2 where 1.1 would misread recipes: 3e-4 is a number, 1:40 is not 100, 0100 is not 64, and
2001-01-01 is a string. A duplicate key is an error.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

_SHOWN = 100  # characters of a line that a message repeats
_SIGNED = list("-+0123456789.")
_CONFLICT = re.compile(r"<{7} |={7}$|>{7} ")
_GLUED = re.compile(r"\s*\w+:[^\s/]")  # a name, a colon and a value without a space
_NO_FIELD = "mapping values are not allowed here"
_NO_COLON = "could not find expected ':'"
_CURES = {
    "'\\t' that cannot start any token": "a tab begins it; indent with spaces",
    _NO_FIELD: "a colon follows where no field may begin; indent a field as those beside "
    "it, and put a text that has a colon into quotes",
    _NO_COLON: "a field needs a colon and a space after its name, as in name: value",
    "but found another document": "a second document begins; a recipe is one, so join them or remove this line",
    "could not determine a constructor": "a tag (!) is not read here; write a plain value",
    "while scanning an alias": "a text that begins with * needs quotes",
    "found undefined alias": "an alias (*) of no anchor (&); a text that begins with * needs quotes",
    "expected ',' or": "a comma or the closing bracket is missing before it",
    "but found '}'": "a closing bracket too many",
    "but found ']'": "a closing bracket too many",
    "expected <block end>": "it is indented differently from the lines beside it",
    "found unexpected end of stream": "a quote that was opened is not closed",
    "that cannot start any token": "a text that begins so needs quotes",
}
"""Errors of the parser, by words of theirs, in words for people who write recipes: what is wrong and how to cure it."""


class YamlError(ValueError):
    """Raised for invalid YAML; the message is a clause that begins with the line, if there is one."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the numbers of YAML 1.2."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            # Errors of SafeLoader for "!!int abc", "!!bool abc" or a number of 5,000 digits.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"this is no {kind}", node.start_mark) from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$", re.ASCII),
    _SIGNED,
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?"
        r"|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
        r"|^\.(?:nan|NaN|NAN)$",
        re.ASCII,
    ),
    _SIGNED,
)


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        mark = key_node.start_mark
        if key_node.tag == "tag:yaml.org,2002:merge":
            what = "<< is not read here; write the keys out, or move them to a file for include"
            raise yaml.constructor.ConstructorError(None, None, what, mark)
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a name", mark)
        if key in seen:
            what = f"key {key!r} stands here twice, first in line {seen[key]}; write all below one"
            raise yaml.constructor.ConstructorError(None, None, what, mark)
        seen[key] = mark.line + 1
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def load_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        YamlError: not valid YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: the character {_code(error.character)} may not stand in YAML") from None
    except yaml.MarkedYAMLError as error:
        raise YamlError(_sentence(error, text)) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error)) from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None


def _code(character: Any) -> str:
    return f"U+{character if isinstance(character, int) else ord(character):04X}"


def _sentence(error: yaml.MarkedYAMLError, text: str) -> str:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if _CONFLICT.match(line):
            return f"line {number} is a conflict marker of git ({line[:7]}); keep one version and remove the markers"
    what = ", ".join(part for part in (error.context, error.problem) if part)
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return what
    at, column = mark.line, mark.column
    if _NO_COLON in what and error.context_mark is not None:
        at, column = error.context_mark.line, error.context_mark.column  # the name; it is noticed lines later
    elif _NO_FIELD in what and at > 0 and _GLUED.match(lines[at - 1]):
        what, at, column = _NO_COLON, at - 1, 0
    what = next((cure for words, cure in _CURES.items() if words in what), what)
    if at >= len(lines) and lines:
        return f"at its end, after line {len(lines)}: {what}"
    line = lines[at].strip() if lines else ""
    shown = line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
    place = f", column {column + 1}" if lines[1:] else ""
    return f"line {at + 1}{place}: {what}" + (f": {shown}" if shown else "")
