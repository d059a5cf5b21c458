"""The machine: its devices, memory and disk, against what the run needs."""

import shutil
from collections.abc import Iterator

from hlat.config import ZERO_BUBBLE, Problem, Recipe, SettingNote
from hlat.launch.preflight.host_memory import available_memory, memory_limit
from hlat.launch.start_checks.place import StartPlace, nearest_folder
from hlat.model import count_parameters
from hlat.runtime.backend import torch_private
from hlat.runtime.backend.table import absent_device, expects_accelerator

_LEAST_STATE = 8  # bytes per parameter: weights, gradients and two moments in bf16, the smallest of all modes
_SURELY_STATE = 24  # bytes per parameter: no mode and no optimizer keeps as many (fp32 weights, gradients, two moments)
_SURELY_ACTIVATIONS = 64  # elements of 4 bytes per token, layer and element of the widest of its activations
_FREE_SHARE = 0.5  # of the free memory: what surely fits into it needs no exact plan, which imports torch
_MODE_STATE = 12  # bytes per parameter of a checkpoint in fp32: weights and two moments; half of that in bf16
_TOKEN_BYTES = 4


def device(place: StartPlace) -> Iterator[Problem]:
    """Yield a device that this machine does not have."""
    run = place.sections.get("run")
    if run is None or place.here.processes is None:
        return
    if reason := absent_device(run.device):
        remedy = "Use run.device=auto, or start the run where there is one; `hlat check --no-files` checks the rest."
        yield Problem("run.device", reason, remedy, run.device, True)


def precision(place: StartPlace) -> Iterator[Problem]:
    """Yield fp8 on a CPU; whether an accelerator has it is known when it is opened."""
    run, section = place.sections.get("run"), place.sections.get("precision")
    if run is None or section is None or place.here.processes is None or section.mode != "fp8":
        return
    if not expects_accelerator(run.device) and not absent_device(run.device):
        remedy = "Use precision.mode=mixed, or bf16-sr for half the memory."
        yield Problem("precision.mode", "torch has no fp8 products on a CPU.", remedy, section.mode, True)


def schedule(place: StartPlace) -> Iterator[Problem]:
    """Yield a schedule of pipelines that the installed release of PyTorch computes wrongly."""
    parallel = place.sections.get("parallel")
    if parallel is None or place.here.processes is None or parallel.pipeline == 1:
        return
    if parallel.schedule in ZERO_BUBBLE and (reason := torch_private.split_backward_problem()):
        remedy = "Use parallel.schedule=interleaved-1f1b or 1f1b, or PyTorch 2.13 or 2.14."
        yield Problem("parallel.schedule", reason, remedy, parallel.schedule, True)


def memory(place: StartPlace) -> Iterator[Problem | SettingNote]:
    """Yield a run that needs more memory than this machine, or its container, has; a note if others use it now.

    Only runs on CPUs are judged: the memory of an accelerator is not known without torch.
    """
    recipe, processes, world = place.recipe, place.here.processes, place.here.world
    if recipe is None or processes is None or world is None or expects_accelerator(recipe.run.device):
        return
    free, total = available_memory(), memory_limit()
    if _surely_less(recipe) * processes < _FREE_SHARE * free:
        return
    least = _least_memory(recipe)  # sharded or not: all processes are here
    if least > total:
        yield _too_much(recipe, f"over {_gib(least)} of memory for weights, gradients and optimizer alone", total)
        return
    import torch  # noqa: PLC0415 - only where memory may be short

    from hlat.launch.preflight.ranks.plan import plan_needs  # noqa: PLC0415

    each = plan_needs(recipe, world, torch.device("cpu"))["host_bytes"]
    needed = f"{processes} x {_gib(each)}" if processes > 1 else _gib(each)
    if each * processes > total:
        yield _too_much(recipe, f"{needed} of memory at its peak", total)
    elif each * processes > free:
        text = f"memory: the run needs {needed} at its peak, and {_gib(free)} are free now."
        yield SettingNote("free-memory", text, "End other programs, or use a smaller batch.micro_batch.")


def _too_much(recipe: Recipe, needed: str, total: int) -> Problem:
    reason = f"the run needs {needed}, and this machine (or container) has {_gib(total)}."
    remedy = (
        "Use a smaller batch.micro_batch or model, memory.activation_checkpointing, or a larger machine; `hlat plan` "
        "shows what the memory is for."
    )
    return Problem("batch.micro_batch", reason, remedy, recipe.batch.micro_batch, True)


def disk(place: StartPlace) -> Iterator[Problem]:
    """Yield a disk without room for the checkpoints that are kept, and the prepared data."""
    recipe, folder = place.recipe, place.run_dir
    if recipe is None or folder is None or place.here.processes is None:
        return
    try:
        total, _, free = shutil.disk_usage(nearest_folder(folder))
        had = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    except OSError:
        return  # ``files.written_folders`` reports that
    if total == 0:
        return  # so does it a file system without a disk
    saved = _checkpoint_bytes(recipe) * (recipe.checkpoint.keep_last + 1)
    prepared = 0.0
    if recipe.data.mode == "prepared" and recipe.data.prepared_dir is None and not place.inputs.is_prepared:
        prepared = (place.inputs.training_tokens or 0.0) * _TOKEN_BYTES
    if saved + prepared - had <= free:
        return
    text = f", and the prepared data about {_gib(prepared)}" if prepared else ""
    kept = recipe.checkpoint.keep_last
    reason = (
        f"{kept} checkpoints and the next one take {_gib(saved)}{text}, and {_gib(free)} are free where {folder} is."
    )
    remedy = "Keep fewer (checkpoint.keep_last), free space, or choose another run.dir."
    yield Problem("checkpoint.keep_last", reason, remedy, kept, True)


def _least_memory(recipe: Recipe) -> float:
    return count_parameters(recipe.model).total * _LEAST_STATE


def _surely_less(recipe: Recipe) -> float:
    """Return bytes that a process certainly does not exceed, from the sizes of the model alone."""
    model, tokens = recipe.model, recipe.batch.micro_batch * recipe.data.sequence_length
    heads = model.heads * (model.head_dim or model.hidden_size // model.heads)
    widest = max(model.hidden_size, model.intermediate_size, heads)
    activations = tokens * 4.0 * (model.layers * widest * _SURELY_ACTIVATIONS + 4 * model.vocab_size)
    return count_parameters(model).total * (_SURELY_STATE + recipe.component_bytes) + activations


def _checkpoint_bytes(recipe: Recipe) -> float:
    """Return the bytes of a checkpoint: weights and two moments, in fp32 or bf16."""
    halved = 0.5 if recipe.precision.mode.startswith("bf16") else 1.0
    return count_parameters(recipe.model).total * (_MODE_STATE * halved + recipe.component_bytes)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
