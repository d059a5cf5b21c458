"""The subject of the checks of a start: a recipe, or what of it is valid, and the machine that is to run it.

recipe or its valid sections, Here --> StartPlace: what the recipe leaves open is chosen, files are looked at once
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.config import DataConfig, Recipe, RunConfig
from hlat.hardware import Cluster
from hlat.planner import resolve_defaults

if TYPE_CHECKING:
    from hlat.data import InputReport


@dataclass(frozen=True)
class Here:
    """The machine of a start, and how much of the run it gets."""

    # processes of the run on this machine; None if it is not said that the run is to start here
    processes: int | None = 1
    world: int | None = 1  # processes of the run on all machines; None if unknown
    cluster: Cluster | None = None  # machines on which the run is to start instead
    files: bool = True  # look at files, device, memory and disk of this machine
    stores: bool = True  # ask object stores for the files that URLs name


class StartPlace:
    """A machine and a recipe, or only its sections, by name, that are valid on their own: the subject of checks."""

    def __init__(self, sections: Mapping[str, Any], recipe: Recipe | None, here: Here) -> None:
        self.sections, self.recipe, self.here = sections, recipe, here
        self.opens_device = True  # False in a process from which those of the run are forked
        self.of_run: Sequence[StartPlace] = (self,)  # places of all stages, if this is that of one

    def choose_defaults(self) -> list[str]:
        """Choose the values that the recipe leaves open, as its processes will; return what is new, with reasons."""
        if self.recipe is None:
            return []
        here = self.here
        recipe, choices = resolve_defaults(self.recipe, here.world, here.cluster, here=here.processes is not None)
        self.recipe = recipe
        self.sections = sections_of(recipe)
        return list(map(str, choices))

    @cached_property
    def stages(self) -> "list[StartPlace]":
        """The place of each stage of the recipe; this one if it has none."""
        if self.recipe is None or not self.recipe.stages:
            return [self]
        found = [StartPlace(sections_of(stage), stage, self.here) for stage in self.recipe.each_stage()]
        for place in found:
            place.opens_device, place.of_run = self.opens_device, found
        return found

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run; None if the section is not valid."""
        run: RunConfig | None = self.sections.get("run")
        return None if run is None else Path(run.dir or f"runs/{run.name}")

    @cached_property
    def inputs(self) -> "InputReport":
        """Report on files and tokenizer; an empty one if the section ``data`` is not valid."""
        from hlat.data import InputReport, check_inputs, with_first_tokenizer  # noqa: PLC0415 - libraries of formats

        data, model, evaluation = (self.sections.get(name) for name in ("data", "model", "evaluation"))
        if data is None:
            return InputReport()
        assert isinstance(data, DataConfig), "sections have their names"
        data = data if self.recipe is None else with_first_tokenizer(self.recipe)
        prepared = Path(data.prepared_dir or (self.run_dir or Path("runs/run")) / "data")
        sets = {} if evaluation is None else evaluation.sets
        rows = None if model is None else model.vocab_size
        return check_inputs(data, prepared, rows, sets, stores=self.here.stores)


def sections_of(recipe: Recipe) -> dict[str, Any]:
    """Return the sections of a recipe by name."""
    return {name: getattr(recipe, name) for name in type(recipe).model_fields}
