"""A start in numbers, for ``hlat check``: the text and the passes over it, memory of the devices, and time.

    StartReport, Here --summary_lines--> ("data", "3 files, 12 MB; about 2.9M training tokens; 1.4 passes"), ...

What would take long to find out is left out: text in remote or compressed files, and the time of a run that is short on
any machine.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hlat.config import Recipe
from hlat.launch.start_checks import Here, surely_fits
from hlat.launch.start_examination import StartReport
from hlat.model import flops_per_token
from hlat.runtime.errors import LaunchError, PlanError
from hlat.runtime.quantities import amount_text, rounded_text, short_count
from hlat.runtime.terminal import plural

if TYPE_CHECKING:
    from hlat.data import InputReport

_GIB = 1 << 30
_SHORT = 1e14  # FLOPs: minutes on any machine; to know its rate, a CPU is measured, for which torch is imported


def summary_lines(report: StartReport, here: Here) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line: data, memory, time, and the values that were chosen."""
    recipe = report.recipe
    if report.inputs is not None and (line := _data(recipe, report.inputs)):
        yield "data", line
    if here.cluster is not None:
        yield "memory", _memory(recipe, here)
    if time := _time_here(recipe, here) if here.cluster is None else _planned_time(recipe, here):
        yield "time", time
    for line in report.chosen:
        yield "chosen", line


def _data(recipe: Recipe, inputs: "InputReport") -> str:
    """Describe the files of a recipe, their tokens and the passes over them, as far as these are known."""
    about = "" if inputs.is_prepared else "about "
    words = [f"{plural(inputs.files, 'file')}, {amount_text(inputs.text_bytes, 'B')}"] * bool(inputs.files)
    if (tokens := inputs.training_tokens) is not None:
        words.append(f"{about}{short_count(tokens)} training tokens")
        weighted = recipe.data.phases or any(source.weight is not None for source in recipe.data.sources)
        # With weights each source has passes of its own, which the run says when it has counted them.
        words += [] if weighted else [f"{rounded_text(recipe.total_tokens / max(tokens, 1), 2)} passes"]
    return "; ".join(words)


def _memory(recipe: Recipe, here: Here) -> str:
    assert here.cluster is not None, "only clusters are asked about"
    if surely_fits(recipe, here.cluster):
        return f"surely less than half of the {here.cluster.memory_bytes / _GIB:.0f} GiB of a device"
    from hlat.planner import recipe_fit  # noqa: PLC0415 - imports torch

    return str(recipe_fit(recipe, here.cluster, here.world))


def _planned_time(recipe: Recipe, here: Here) -> str:
    from hlat.planner import days_text, likely, predict_recipe  # noqa: PLC0415 - imports torch

    assert here.cluster is not None, "only clusters are asked about"
    try:
        found = predict_recipe(recipe, here.cluster, here.world)
    except PlanError:  # a recipe that fits, and that the cost model does not cover
        return ""
    return f"{days_text(likely(found))}, at {found.step_seconds:.3g} s a step by the plan"


def _time_here(recipe: Recipe, here: Here) -> str:
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) * recipe.total_tokens
    if here.processes is None or flops < _SHORT:
        return ""
    from hlat.draft import REACHED, look_at_machine, time_text  # noqa: PLC0415 - imports torch

    try:
        machine = look_at_machine(recipe.run.device)
    except LaunchError:  # a check of the start has said that there is no such device
        return ""
    devices = 1 if machine.is_host else here.world or 1
    seconds = flops / (REACHED * machine.peak * devices)
    return f"about {time_text(seconds)}, if steps reach {REACHED:.0%} of the peak of {machine.name}"
