"""Parts of the user's own: what a recipe may name besides hlat's own optimizers, schedules, architectures and so on.

    package.module:Name   a module beside the recipe, in the working directory, or installed
    NAME                  an installed package's entry point of the group hlat.<seam>
    an object             handed to ``hlat.train`` in this process, under the name that it has in its module

    seam, name --load_part--> the object; RecipeError says why there is none, or what it lacks
    object --options_class--> its ``Options``, or its keyword arguments --read_options--> options, or all their problems

Reading a recipe imports nothing: whoever uses a part, or checks a start, loads it.
"""

import difflib
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from hlat.config.errors import Problem, RecipeError

Part = TypeVar("Part")
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_LONGEST_NAME = 100  # characters; a longer name is no misspelling
_LISTED = 10  # names that a message lists


@dataclass(frozen=True)
class Seam:
    """A place where recipes name parts."""

    name: str  # its entry points are those of the group hlat.<name>
    what: str  # one such part, for messages

    @property
    def group(self) -> str:
        return f"hlat.{self.name}"

    def has(self, name: object) -> bool:
        """Return True if a name is that of a part of the user's own; imports nothing."""
        return isinstance(name, str) and bool(_NAME.fullmatch(name) or entry_points(group=self.group, name=name))


ARCHITECTURES = Seam("architectures", "architecture")
COMPONENTS = Seam("components", "component")
FORMATS = Seam("formats", "file format")
LOSSES = Seam("losses", "loss term")
OPTIMIZERS = Seam("optimizers", "optimizer")
SCHEDULES = Seam("schedules", "schedule")
TASKS = Seam("tasks", "task")
TRACKERS = Seam("trackers", "tracker")

_folders: list[str] = []  # folders of recipe files, whose modules can be imported
_given: dict[str, Any] = {}  # objects of this process by name
_loaded: dict[str, Any] = {}  # parts that recipes of this process have named


def search_beside(file: Path) -> None:
    """Let recipes name modules that lie beside a recipe file."""
    if (folder := str(file.absolute().parent)) not in _folders:
        _folders.append(folder)


def search_folders() -> list[str]:
    """Return the folders that are searched for modules, after those of Python itself.

    They are searched only in a process that was given a recipe file: a checkpoint, which comes from anywhere, must not
    run what lies in the working directory.
    """
    return [*_folders, str(Path.cwd())] if _folders else []


def give_part(part: Any) -> str:
    """Make an object of this process available to recipes; return the name by which they find it."""
    kind = part if inspect.isclass(part) or inspect.isfunction(part) else type(part)
    name = f"{kind.__module__}:{kind.__qualname__.replace('<locals>.', '')}"
    _given[name] = part
    return name


def load_part(seam: Seam, path: str, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
    """Import the part that a field of the recipe names.

    Args:
        seam: what it is.
        path: dotted field of the recipe, for messages.
        name: ``package.module:Name``, or the name of an entry point.
        wanted: what the part has to be, for messages: the words after "is not".
        fits: returns True for a part that is that.

    Raises:
        RecipeError: there is no such part, its import fails, or it is something else.
    """
    part, origin = _given.get(name), name
    if part is None:
        part, origin = _import_name(path, name) if ":" in name else _load_entry(seam, path, name)
    if not fits(part):
        found = f"the class {part.__qualname__}" if inspect.isclass(part) else f"of type {type(part).__name__}"
        raise _refused(path, f"{origin} is {found}, and not {wanted}.", "docs/extend.md has an example.", name)
    _loaded[name] = part
    return part


def part_sources(names: Iterable[str]) -> dict[str, str]:
    """Return the source of parts that have been loaded, by name; of one whose source is not there, nothing."""
    found = {}
    for name in names:
        part = _loaded.get(name)
        kind = part if inspect.isclass(part) or inspect.isfunction(part) else type(part)
        with suppress(OSError, TypeError):  # a part of C, or typed into a prompt that keeps no text
            found[name] = inspect.getsource(kind)
    return found


def _import_name(path: str, name: str) -> tuple[Any, str]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not all(word.isidentifier() for word in (*module_name.split("."), *attribute.split("."))):
        raise _refused(path, "this is no name of a part.", "Write package.module:Name.", name)
    if module_name not in sys.modules:
        # At the end: a module of the user's must not replace one of Python's or of a library.
        sys.path += [folder for folder in search_folders() if folder not in sys.path]
        importlib.invalidate_caches()  # the user may have just written it
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may raise anything
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise _refused(
                path, f"importing {module_name} failed: {_error_text(error)}.", "Repair it.", name
            ) from error
        raise _refused(path, f"there is no module {missing}.", _places(missing), name) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module), name
    except AttributeError as error:
        public = [each for each in vars(module) if not each.startswith("_")]
        reason = f"{module_name} ({getattr(module, '__file__', None) or 'built in'}) has no {attribute}."
        raise _refused(path, reason, nearest(attribute, public), name) from error


def _places(module: str) -> str:
    beside = [file.stem for folder in search_folders() for file in Path(folder).glob("*.py")]
    hint = nearest(module.partition(".")[0], beside, listed=False)
    places = " or ".join(dict.fromkeys(["PYTHONPATH", *search_folders()]))
    return f"{hint}Modules are found if they are installed, or in {places}."


def _load_entry(seam: Seam, path: str, name: str) -> tuple[Any, str]:
    # Two packages with the same name: hlat must not choose for the user.
    candidates = list(entry_points(group=seam.group, name=name))
    if len(candidates) > 1:
        origins = " and ".join(sorted(map(_origin, candidates)))
        reason = f"several packages have a {seam.what} of this name: {origins}."
        raise _refused(path, reason, "Uninstall all but one, or write package.module:Name.", name)
    if not candidates:
        known = sorted({entry.name for entry in entry_points(group=seam.group)})
        remedy = f"Write package.module:Name, or install the package that provides it. {nearest(name, known)}"
        if not known:
            remedy += f"No installed package has a {seam.what}."
        raise _refused(path, f"no installed package has a {seam.what} of this name.", remedy.strip(), name)
    (entry,) = candidates
    try:
        return entry.load(), _origin(entry)
    except Exception as error:
        reason = f"importing it from {_origin(entry)} failed: {_error_text(error)}."
        raise _refused(path, reason, "Repair that package.", name) from error


def nearest(name: str, known: Collection[str], *, listed: bool = True) -> str:
    """Say which names are close to one, or which there are; with a space at the end if there is anything to say."""
    # difflib takes quadratic time, so long names are not compared.
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=3, cutoff=0.5) if len(name) <= _LONGEST_NAME else []
    if close:
        return f"Did you mean {' or '.join(close)}? "
    if not known or not listed:
        return ""
    some = sorted(known)
    more = f" and {len(some) - _LISTED} more" if len(some) > _LISTED else ""
    return f"There is {', '.join(some[:_LISTED])}{more}. "


def options_class(part: Any, given: Collection[str] = ()) -> type[BaseModel]:
    """Return the pydantic model of a part's options: its ``Options``, or its arguments but those that hlat gives.

    An argument with a default of a number, text or list takes values of that type; others take any value.
    """
    if (own := getattr(part, "Options", None)) is not None:
        return own  # type: ignore[no-any-return]
    fields: dict[str, Any] = {}
    for each in inspect.signature(part).parameters.values():
        if each.name in given or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        fields[each.name] = (Any, ...) if each.default is each.empty else (_type_of(each.default), each.default)
    name = getattr(part, "__name__", "Part")
    return create_model(name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)


def _type_of(default: Any) -> Any:
    if isinstance(default, tuple | list):
        return types.GenericAlias(tuple, (_type_of(default[0]) if default else Any, ...))
    if isinstance(default, int) and not isinstance(default, bool):
        return int | float  # a default of 0 says nothing of fractions
    return type(default) if isinstance(default, bool | float | str) else Any


def read_options(options: type[Part], values: Mapping[str, Any], path: str, also: Collection[str] = ()) -> Part:
    """Validate the options of a part.

    Args:
        options: pydantic model of the options.
        values: the options of the recipe.
        path: dotted field of the recipe that the options stand in, for messages.
        also: other fields that may stand there.

    Raises:
        RecipeError: every problem.
    """
    try:
        return options.model_validate(dict(values))  # type: ignore[attr-defined,no-any-return]
    except ValidationError as error:
        known = [*also, *options.model_fields]  # type: ignore[attr-defined]
        raise RecipeError([_option_problem(path, known, detail) for detail in error.errors()]) from error


def _option_problem(path: str, known: Collection[str], detail: Any) -> Problem:
    name, value = ".".join(map(str, detail["loc"])), detail["input"]
    remedy = f"Options: {', '.join(known) or 'none'}."
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "must")
    reason = message[:1].lower() + message[1:]
    if detail["type"] == "extra_forbidden":
        reason, remedy = "there is no such option", f"{nearest(name, known, listed=False)}{remedy}"
    return Problem(f"{path}.{name}", f"{reason}.", remedy, value, not isinstance(value, dict))


def gather_problems(checks: Iterable[Callable[[], object]]) -> list[Problem]:
    """Call checks; return the problems of all that raise RecipeError."""
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except RecipeError as error:
            problems += error.problems
    return problems


def _refused(path: str, reason: str, remedy: str, name: str) -> RecipeError:
    has_value = not path.endswith(f".{name}")  # a name that is a key of a mapping is part of the path
    return RecipeError([Problem(path, reason, remedy.strip(), name if has_value else None, has_value)])


def _origin(entry: EntryPoint) -> str:
    package = f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
    return f"{package} ({entry.value})"


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
