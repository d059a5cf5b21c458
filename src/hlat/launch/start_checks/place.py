"""The view of the checks of a start: the valid parts of a recipe, and the machine that is to run it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config import DataConfig, Recipe, RunConfig

if TYPE_CHECKING:
    from hlat.data import InputReport


@dataclass(frozen=True)
class Here:
    """The machine of a start.

    Attributes:
        processes: processes of the run on this machine; None if it is not said that the run is to start here.
        world: processes of the run on all machines; None if unknown.
        stores: ask object stores for the files that URLs name.
    """

    processes: int | None = 1
    world: int | None = 1
    stores: bool = True


class StartPlace:
    """A recipe and a machine, for checks.

    Args:
        sections: the sections of the recipe that are valid on their own, by name.
        recipe: the recipe, if all of it is valid.
        here: the machine.
    """

    def __init__(self, sections: Mapping[str, Any], recipe: Recipe | None, here: Here) -> None:
        self.sections, self.recipe, self.here = sections, recipe, here

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None if the section is not valid."""
        run: RunConfig | None = self.sections.get("run")
        return None if run is None else Path(run.dir or f"runs/{run.name}")

    @cached_property
    def inputs(self) -> "InputReport":
        """Report on files and tokenizer; an empty one if the section ``data`` is not valid."""
        from hlat.data import InputReport, check_inputs  # noqa: PLC0415 - libraries of file formats

        data, model, evaluation = (self.sections.get(name) for name in ("data", "model", "evaluation"))
        if data is None:
            return InputReport()
        assert isinstance(data, DataConfig), "sections have their names"
        prepared = Path(data.prepared_dir or (self.run_dir or Path("runs/run")) / "data")
        sets = {} if evaluation is None else evaluation.sets
        rows = None if model is None else model.vocab_size
        return check_inputs(data, prepared, rows, sets, stores=self.here.stores)


def absence(path: str) -> str:
    """Return why a file or folder of the user cannot be used, without a full stop; empty if it is there."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is nothing (looked in {Path.cwd()})"
    except OSError as error:
        return f"it cannot be accessed: {error.strerror}"
    return ""


def nearest_folder(path: Path) -> Path:
    """Return the path itself or the nearest parent that exists.

    Raises:
        PermissionError: a parent may not be entered.
    """
    path = path.absolute()
    for each in (path, *path.parents):
        try:
            each.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return each
    return Path("/")
