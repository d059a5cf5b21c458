"""Reading of recipe files: YAML with includes, and overrides, become one plain mapping.

    text --load_yaml--> None, bool, int, float, str, lists and mappings of them; YamlError
    file --include--> base files, merged first --> the file's own keys --> a.b=c overrides

Every error of the text is one sentence with its line. Scalars follow YAML 1.2 where 1.1 would misread recipes: 3e-4 is
a number, 1:40 is not 100, 0100 is not 64, and 2001-01-01 is a string. A duplicate key is an error.

Mappings merge key by key, everything else replaces. Relative includes start at the file that names them.
"""

import difflib
import itertools
import re
from collections.abc import Callable, Hashable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hlat.config.errors import Problem, RecipeError, short, size_problem
from hlat.config.sections.model import HF_NAMES
from hlat.runtime.storage.local_files import read_small_file

_SHOWN_CHARACTERS = 100  # characters of a line that a message repeats
_FIRST_OF_NUMBERS = list("-+0123456789.")
_CONFLICT = re.compile(r"<{7} |={7}$|>{7} ")
_DOT = re.compile(r"(?<!\\)\.")  # between two names of a path
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


# YAML 1.1's patterns of numbers and dates go; those of 1.2 are added below. ASCII: \d takes the digits of every script.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$", re.ASCII),
    _FIRST_OF_NUMBERS,
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?"
        r"|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
        r"|^\.(?:nan|NaN|NAN)$",
        re.ASCII,
    ),
    _FIRST_OF_NUMBERS,
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
    """Parse a YAML text; raises YamlError, whose message begins with the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: the character {_code_point(error.character)} may not stand in YAML") from None
    except yaml.MarkedYAMLError as error:
        raise YamlError(_error_sentence(error, text)) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error)) from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None


def _code_point(character: Any) -> str:
    return f"U+{character if isinstance(character, int) else ord(character):04X}"


def _error_sentence(error: yaml.MarkedYAMLError, text: str) -> str:
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
    shown = line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 3]}..."
    place = f", column {column + 1}" if lines[1:] else ""
    return f"line {at + 1}{place}: {what}" + (f": {shown}" if shown else "")


RECIPE_ENDINGS = (".yaml", ".yml", ".json")
"""Endings of the names of recipe files; others are read too."""

_DEEPEST_FIELD = 32  # names in the dotted path of an override
_LARGEST_FILE = 1 << 18  # bytes of a recipe file: room for thousands of sources
_DEEPEST_INCLUDE = 32  # nested includes
_MOST_DIGITS = 10  # limit for the digits of a list index
_NAMED_FILES = 10  # files of a folder that a message names
_FILES_LOOKED_AT = 1_000  # files of a folder whose names are compared
_LONGEST_NAME = 100  # characters of a name that is compared


def find_recipe(name: str | Path) -> Path:
    """Find a recipe: the file of that path or, if there is none, the shipped recipe of that name.

    Raises:
        RecipeError: neither exists (the shipped names are listed), or the name looks like an option.
    """
    if str(name).startswith("-"):
        remedy = f"Write ./{name}."
        raise RecipeError([Problem(str(name), "commands take a name that begins with a dash for an option.", remedy)])
    path = Path(name)
    shipped = {file.stem: file for file in _shipped_folder().glob("*.yaml")}
    try:
        if path.is_file():
            return path
        # hlat quickstart writes to a folder called quickstart, and is to be given again.
        if path.is_dir() and str(name) not in shipped:
            inside = sorted(str(file) for file in path.glob("*.y*ml"))[:_NAMED_FILES]
            drafts = f"Name a recipe file. Of a folder of texts, hlat init {path} drafts one."
            remedy = f"Name a file in it: {', '.join(inside)}." if inside else drafts
            raise RecipeError([Problem(str(name), "is a folder.", remedy)])
    except (OSError, ValueError):  # a name that no file can have
        pass
    if path.name == str(name) and path.stem in shipped:
        return shipped[path.stem]
    remedy = f"{_similar_recipe(path, shipped)}Shipped recipes: {', '.join(sorted(shipped))}."
    raise RecipeError([Problem(str(name), "there is no such recipe file.", remedy)])


def _similar_recipe(path: Path, shipped: Iterable[str]) -> str:
    try:
        beside = {file.name: str(file) for file in itertools.islice(path.parent.glob("*.y*ml"), _FILES_LOOKED_AT)}
    except (OSError, ValueError):
        beside = {}
    known = beside if path.parent != Path() else beside | {name: name for name in shipped}
    if (same := next((file for name, file in beside.items() if Path(name).stem == path.stem), None)) is not None:
        return f"Did you mean {same}? "
    close = difflib.get_close_matches(path.name[:_LONGEST_NAME], known, n=1, cutoff=0.7)
    return f"Did you mean {known[close[0]]}? " if close else ""


def _shipped_folder() -> Path:
    package = Path(str(files("hlat")))
    # In an editable installation the recipes are next to src.
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay ``over`` over ``base``: mappings merge key by key, everything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def with_own_names(content: dict[str, Any]) -> dict[str, Any]:
    """Rename Hugging Face's names in the model section; those stay whose field is given too, with another value."""
    model = content.get("model")
    if not isinstance(model, dict):
        return content
    given_names = [name for name in HF_NAMES if name in model]
    for name in given_names:
        field, _, below = HF_NAMES[name].partition(".")
        value = {below: model[name]} if below else model[name]
        given = model.get(field, {} if below else value)
        if isinstance(given, dict) and below and given.get(below, model[name]) == model[name]:
            value = given | value
        elif given != value:
            continue
        model = {other: kept for other, kept in model.items() if other != name} | {field: value}
    return {**content, "model": model} if given_names else content


def read_file(path: Path, names: Callable[[dict[str, Any]], dict[str, Any]] = with_own_names) -> dict[str, Any]:
    """Read a recipe file and merge its includes; RecipeError if one is unreadable, no mapping, or in a cycle.

    ``names`` is applied to each file before they are merged.
    """
    return _read_with_includes(path, (), {}, names)


def _is_cut(text: str) -> bool:
    # More opening than closing brackets: a shell has cut the value at a blank.
    return any(text.count(begin) > text.count(end) for begin, end in ("{}", "[]"))


def _read_with_includes(
    path: Path,
    including: tuple[Path, ...],
    known: dict[Path, dict[str, Any]],
    names: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Read a file with its includes; ``known`` caches files, since two may include the same one."""
    try:
        here = path.resolve()
        if here in including:
            cycle = " -> ".join(str(p) for p in (*including, here))
            problem = Problem(str(path), f"includes form a cycle: {cycle}.", "Remove one of them.")
            raise RecipeError([problem])
        if here in known:
            return known[here]
        content = load_yaml(read_small_file(path, _LARGEST_FILE, "a recipe"))
    except YamlError as error:
        remedy = "" if path.suffix in RECIPE_ENDINGS else "A recipe is a YAML file; hlat init writes one."
        raise RecipeError([Problem(str(path), f"is not valid YAML: {error}.", remedy)]) from error
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: symbolic links that form a cycle
        by = f"It is included by {including[-1]}; a relative name starts at that file's folder." if including else ""
        reason = getattr(error, "strerror", None) or error
        raise RecipeError([Problem(str(path), f"cannot be read: {reason}.", by)]) from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        remedy = "Start with 'run:', 'model:', 'data:'."
        if path.suffix not in RECIPE_ENDINGS and not including:
            remedy = f"A recipe is a YAML file; for a text, `hlat init {path}` writes one."
        raise RecipeError([Problem(str(path), "is not a mapping of sections.", remedy)])
    if (too_large := size_problem(content)) is not None:
        raise RecipeError([Problem(str(path), too_large)])
    content = names(content)
    includes = content.pop("include", [])
    bases = [includes] if isinstance(includes, str) else includes
    if not isinstance(bases, list) or not all(isinstance(name, str) for name in bases):
        raise RecipeError([Problem("include", "is not a file name or a list of them.", "", includes, True)], str(path))
    if bases and len(including) == _DEEPEST_INCLUDE:
        raise RecipeError([Problem(str(path), f"is included over {_DEEPEST_INCLUDE} files, and includes another.")])
    # Included files lie underneath, the later ones above the earlier.
    base: dict[str, Any] = {}
    for name in bases:
        base = merge(base, _read_with_includes(path.parent / name, (*including, here), known, names))
    known[here] = merge(base, content)
    return known[here]


def apply_overrides(content: dict[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Apply ``a.b=c`` overrides to a copy of the mapping; values are YAML.

    Elements of a list are addressed by index, and ``-`` is one more at its end. A backslash keeps a dot in a name.
    """
    content, problems = with_own_names(content), list[Problem]()
    given = list(overrides)
    if "=" in given:  # the shell has made three words of it
        at = given.index("=")
        spaced = " ".join(given[max(at - 1, 0) : at + 2])
        remedy = f"Write {spaced.replace(' ', '')}, without spaces."
        return content, [Problem(spaced, "is not an override.", remedy)]
    for override in given:
        path, equals, text = override.partition("=")
        keys = [key.replace("\\.", ".") for key in _DOT.split(path)]
        if keys[0] == "model" and len(keys) == 2:
            keys = ["model", *HF_NAMES.get(keys[1], keys[1]).split(".")]
        if not equals or not all(keys):
            example = override.replace(":", "=", 1) if not equals and ":" in override else "training.steps=100"
            remedy = f"Write section.field=value, as in {example}."
            problems.append(Problem(override, "is not an override.", remedy))
            continue
        try:
            content = with_own_names(_put_value(content, keys, _override_value(text)))
        except YamlError as error:
            remedy = f"Put it in quotes for the shell: '{path}={text} ...'." if _is_cut(text) else ""
            reason = "ends within braces or brackets." if remedy else f"is not valid YAML: {error}."
            problems.append(Problem(override, reason, remedy))
        except _NoSuchField as error:
            problems.append(Problem(override, f"cannot be applied: {error}."))
    return content, problems


class _NoSuchField(Exception):
    """Raised for an override whose path leads to no field."""


def _override_value(text: str) -> Any:
    if text.startswith("*"):
        return text  # not an alias of YAML but a glob, as in data.path=*.jsonl
    value = load_yaml(text)
    if (too_large := size_problem(value)) is not None:
        raise YamlError(too_large.rstrip("."))
    return value


def _put_value(content: Any, keys: list[str], value: Any) -> Any:
    if len(keys) > _DEEPEST_FIELD:
        raise _NoSuchField(f"no field is {len(keys):,} levels deep")
    return _put_below(content, keys, value)


def _put_below(node: Any, keys: list[str], value: Any) -> Any:
    if not keys:
        return value
    head, *rest = keys
    if isinstance(node, list):
        if head == "-":
            return [*node, _put_below(None, rest, value)]
        # isdigit alone takes superscripts, which int refuses.
        if not (head.isascii() and head.isdigit() and len(head) < _MOST_DIGITS):
            raise _NoSuchField(f"{short(head)} is not the number of an element of a list")
        index = int(head)
        if index >= len(node):
            raise _NoSuchField(f"there is no element {index}, the list has {len(node)}")
        return [*node[:index], _put_below(node[index], rest, value), *node[index + 1 :]]
    if node is None or isinstance(node, dict):
        mapping = node or {}
        return {**mapping, head: _put_below(mapping.get(head), rest, value)}
    raise _NoSuchField(f"{short(node)} is a value, it has no field {short(head)}")
