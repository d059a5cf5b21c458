"""Checks of a start: what would stop a run minutes after its command, or is odd, before anything has started.

    valid sections of a recipe, Here (this machine) --> StartPlace --START_CHECKS, in the order of the table-->
        files     written folders, corpus, sequence length, weights to start from, tasks   --> Problem
        machine   device, precision, schedule, memory, disk                                --> Problem, SettingNote
        odd       short text, many passes, validation, tokenizer, files, cores             --> SettingNote

A problem stops the run; a note is a warning. ``start_examination`` runs the checks. To add one, write a function of a
``StartPlace`` and add its line to ``START_CHECKS``.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hlat.config import (
    ZERO_BUBBLE,
    Problem,
    Recipe,
    SettingNote,
    StageConfig,
    changeable,
    in_stage,
    model_differences,
    own_parts,
)
from hlat.hardware import Cluster
from hlat.launch.local_processes import own_cores
from hlat.launch.preflight.request import available_memory, memory_limit
from hlat.launch.start_place import StartPlace
from hlat.model import count_parameters
from hlat.runtime.backend import torch_private
from hlat.runtime.backend.table import absent_device, expects_accelerator
from hlat.runtime.errors import LaunchError, PlanError
from hlat.runtime.storage.hub import CONFIG_FILES, HubError, HubModel
from hlat.runtime.storage.local_files import absence, broken_link, nearest_folder
from hlat.runtime.storage.run_folder import RECIPE_NAME, is_foreign_recipe
from hlat.runtime.terminal import plural
from hlat.runtime.urls import is_url


def check_inputs_given(place: StartPlace) -> Iterator[Problem]:
    """Yield the problems of files and tokenizer."""
    for each in place.inputs.problems:
        yield Problem(each.field, each.message, "", each.value, True)


def check_weights(place: StartPlace) -> Iterator[Problem]:
    """Yield a checkpoint to start from that does not exist, or a model that the Hub does not give."""
    checkpoint = place.sections.get("checkpoint")
    path = None if checkpoint is None else checkpoint.init_from
    if path is None or is_url(path):
        return
    if not (reason := absence(path)):
        if Path(path).is_file():
            reason = "this is a file, and a run starts from the folder of a checkpoint, of a run, or of a model."
            remedy = (
                "`hlat import FOLDER` reads Hugging Face, NxDT and torchtitan (DCP); files of torch.save are not read: "
                "save the weights as Hugging Face's safetensors in the program that wrote them."
            )
            yield Problem("checkpoint.init_from", reason, remedy, path, True)
            return
        yield from _other_model(place, path)
        return
    if (hub := HubModel.parse(path)) is None:
        remedy = "Name a checkpoint, a run folder, or a Hugging Face folder."
        yield Problem("checkpoint.init_from", f"{reason}.", remedy, path, True)
        return
    try:
        hub.snapshot(CONFIG_FILES)  # the weights follow when training starts
    except HubError as error:
        yield Problem("checkpoint.init_from", f"{error}.", "", path, True)


def _other_model(place: StartPlace, path: str) -> Iterator[Problem]:
    """Yield weights of a model of other shapes; a run that has begun does not read them."""
    model, run_dir = place.sections.get("model"), place.run_dir
    if model is None or (run_dir is not None and any(run_dir.glob("checkpoints/step-*"))):
        return
    # Shapes that differ would stop the run only when it loads the weights, after the data is prepared.
    differences = model_differences(model, Path(path))
    if differences:
        named = ", ".join(f"{name} {there} (here {here})" for name, (there, here) in differences.items())
        remedy = f"Give the model these numbers, or write model: {{from: {path}}}, which takes them from there."
        yield Problem("checkpoint.init_from", f"these are weights of another model: {named}.", remedy, path, True)


def check_task_files(place: StartPlace) -> Iterator[Problem]:
    """Yield the files of tasks that do not exist."""
    evaluation = place.sections.get("evaluation")
    for index, path in enumerate(() if evaluation is None else evaluation.tasks):
        if not own_parts.TASKS.has(path) and (reason := absence(path)):
            remedy = "`hlat evaluate --render` writes such files."
            yield Problem(f"evaluation.tasks.{index}", f"{reason}.", remedy, path, True)


_MOST_PASSES = 4  # over the same text that help nearly as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)


def check_ladder(place: StartPlace) -> Iterator[Problem | SettingNote]:
    """Yield the forecast of a run by its ladder, and what is wrong with either; a registered one needs no ladder."""
    recipe, folder = place.recipe, place.run_dir
    if recipe is None or folder is None or recipe.run.ladder is None:
        return
    from hlat.forecast import read_forecast, recipe_forecast  # noqa: PLC0415 - fits with numpy, where there is a ladder

    try:
        known = read_forecast(folder)
        forecast = known or recipe_forecast(recipe)
    except PlanError as error:
        yield Problem("run.ladder", str(error), "", recipe.run.ladder, True)
        return
    yield SettingNote(FORECAST_NOTE, f"run.ladder: {forecast.words}.", kind="note")
    if known is not None:
        return
    yield from (SettingNote(FORECAST_NOTE, f"run.ladder: {each}.") for each in forecast.warnings)
    tokens = place.inputs.training_tokens
    if tokens and (passes := recipe.total_tokens / tokens) > _MOST_PASSES:
        reason = f"text is read {passes:.1f} times, and the law of a ladder is of new text: expect a higher loss"
        yield SettingNote("ladder", f"run.ladder: {reason}.")


def check_written_folders(place: StartPlace) -> Iterator[Problem]:
    """Yield folders of the run and its data that cannot be written, and a recipe of the user's in the first."""
    folder, data = place.run_dir, place.sections.get("data")
    if folder is not None:
        yield from _unwritable("run.dir", place.sections["run"].dir or str(folder))
        if is_foreign_recipe(folder):
            reason = f"{folder / RECIPE_NAME} was not written by a run, and the run's own recipe would replace it."
            yield Problem("run.dir", reason, "Rename that file, or choose another run.dir.", str(folder), True)
    if data is not None and data.prepared_dir is not None and not place.inputs.is_prepared:
        yield from _unwritable("data.prepared_dir", data.prepared_dir)


def _unwritable(field: str, folder: str) -> Iterator[Problem]:
    other = f"Choose another {field}."
    remedy = f"Choose another {field}, or ask for the permission."
    try:
        nearest = nearest_folder(Path(folder))
        if link := broken_link(Path(folder)):
            reason, remedy = f"{link}.", f"Make that folder, mount its disk, or choose another {field}."
        elif not nearest.is_dir():
            reason, remedy = f"{nearest} is a file, so no folder can be there.", other
        elif os.statvfs(nearest).f_flag & os.ST_RDONLY:
            reason, remedy = f"{nearest} is in a file system that is mounted read-only.", other
        elif not os.access(nearest, os.W_OK | os.X_OK):
            reason = f"permission denied: {nearest} cannot be written by this user."
        elif shutil.disk_usage(nearest).total == 0:
            reason, remedy = f"{nearest} is in a file system without a disk, which holds no files.", other
        else:
            return
    except OSError as error:
        reason = f"{error.filename or folder} cannot be accessed: {error.strerror}."
    yield Problem(field, reason, remedy, folder, True)


def check_sequence_length(place: StartPlace) -> Iterator[Problem]:
    """Yield a sequence length for which the corpus has too few training tokens, whatever the tokenizer."""
    data, most = place.sections.get("data"), place.inputs.most_tokens
    if data is None or most is None or place.inputs.is_prepared or data.packing != "concat":
        return
    if most > data.sequence_length:
        return
    keeps_aside = data.validation.path is None and data.validation.fraction > 0
    kept = " without its validation text" if keeps_aside else ""
    reason = (
        f"the corpus of {plural(place.inputs.text_bytes, 'byte')} has at most {plural(most, 'token')}{kept}: too few "
        f"for one sample of {data.sequence_length:,} tokens and the one that follows it."
    )
    less = ", or a smaller data.validation.fraction" if keeps_aside else ""
    remedy = f"Give more text, or shorter sequences{less}."
    yield Problem("data.sequence_length", reason, remedy, data.sequence_length, True)


def check_stages_text(place: StartPlace) -> Iterator[Problem]:
    """Yield what would let the stages of a run read text twice, or leave one of them without any."""
    recipe = place.recipe
    if recipe is None or recipe.place is None:
        return
    from hlat.data import same_texts, text_problem  # noqa: PLC0415 - libraries of file formats

    its = recipe.place
    for number, message in () if its.index else same_texts(its.run, stores=place.here.stores):
        yield Problem(f"stages.{number}.data", message, "")
    if message := text_problem(recipe, None if place.inputs.is_prepared else place.inputs.most_tokens):
        yield Problem(f"stages.{its.index}", message, "")


_SURELY_STATE = 24  # bytes per parameter: no mode and no optimizer keeps as many (fp32 weights, gradients, two moments)
_SURELY_ACTIVATIONS = 64  # elements of 4 bytes per token, layer and element of the widest of its activations
_FREE_SHARE = 0.5  # of the free memory: what surely fits into it needs no exact plan, which imports torch
# Times the memory of a device that is here: what is estimated above that is refused. Estimates are within 5 % of the
# tensors of an eager step; a compiled block keeps less, by a share that depends on its compiler and was not measured.
# 1.2 leaves it 15 %: below, the run is let start with a warning.
_SURELY_OVER = 1.2
_MODE_STATE = 12  # bytes per parameter of a checkpoint in fp32: weights and two moments; half of that in bf16
_TOKEN_BYTES = 4  # bytes of a token id in prepared data, at most


def check_device(place: StartPlace) -> Iterator[Problem]:
    """Yield a device that this machine does not have, or fp8 on a CPU; an accelerator's is known when it is opened."""
    run, precision = place.sections.get("run"), place.sections.get("precision")
    if run is None or place.here.processes is None:
        return
    if reason := absent_device(run.device):
        remedy = "Use run.device=auto, or start the run where there is one; `hlat check --no-files` checks the rest."
        yield Problem("run.device", reason, remedy, run.device, True)
    elif precision is not None and precision.mode == "fp8" and not expects_accelerator(run.device):
        remedy = "Use precision.mode=mixed, or bf16-sr for half the memory."
        yield Problem("precision.mode", "torch has no fp8 products on a CPU.", remedy, precision.mode, True)


def check_schedule(place: StartPlace) -> Iterator[Problem]:
    """Yield a schedule of pipelines that the installed release of PyTorch computes wrongly."""
    parallel = place.sections.get("parallel")
    if parallel is None or place.here.processes is None or parallel.pipeline == 1:
        return
    if parallel.schedule in ZERO_BUBBLE and (reason := torch_private.split_backward_problem()):
        remedy = "Use parallel.schedule=interleaved-1f1b or 1f1b, or PyTorch 2.13 or 2.14."
        yield Problem("parallel.schedule", reason, remedy, parallel.schedule, True)


def check_memory(place: StartPlace) -> Iterator[Problem | SettingNote]:
    """Yield a run that needs more memory than this machine, or its container, has; a note if others use it now."""
    recipe, processes, world = place.recipe, place.here.processes, place.here.world
    if recipe is None or processes is None or world is None or expects_accelerator(recipe.run.device):
        return
    free, total = available_memory(), memory_limit()
    if _surely_less(recipe) * processes < _FREE_SHARE * free:
        return
    import torch  # noqa: PLC0415 - only where memory may be short

    from hlat.launch.preflight.recipe_needs import plan_needs  # noqa: PLC0415

    each = plan_needs(recipe, world, torch.device("cpu"))["host_bytes"]
    needed = f"{processes} x {_gib(each)}" if processes > 1 else _gib(each)
    if each * processes > total:
        reason = f"the run needs {needed} of memory at its peak, and this machine (or container) has {_gib(total)}."
        remedy = (
            "Use a smaller batch.micro_batch or model, memory.activation_checkpointing, or a larger machine; "
            "`hlat plan` shows what the memory is for."
        )
        yield Problem("batch.micro_batch", reason, remedy, recipe.batch.micro_batch, True)
    elif each * processes > free:
        text = f"memory: the run needs {needed} at its peak, and {_gib(free)} are free now."
        yield SettingNote("free-memory", text, "End other programs, or use a smaller batch.micro_batch.")


def check_device_memory(place: StartPlace) -> Iterator[Problem | SettingNote]:
    """Yield a run that does not fit into accelerators: of the machines that it is for, else of this one."""
    recipe, here = place.recipe, place.here
    if recipe is None or here.world is None:
        return
    is_here = here.processes is not None and expects_accelerator(recipe.run.device)
    if here.cluster is None and (not is_here or absent_device(recipe.run.device)):
        return
    on = here.cluster
    if surely_fits(recipe, on) if on is not None else not place.opens_device:
        return
    from hlat.planner import fit_here, recipe_fit  # noqa: PLC0415 - imports torch

    try:
        fit = fit_here(recipe, here.world) if on is None else recipe_fit(recipe, on, here.world)
    except (LaunchError, PlanError):  # no such device for torch, or nothing to plan with: the start says what is wrong
        return
    if fit is None or fit.fits:
        return
    # Here nothing is lost by trying, and compiled blocks keep less than is estimated.
    if on is None and fit.needed < _SURELY_OVER * fit.memory:
        yield SettingNote("device-memory", f"memory: {fit}.", fit.remedy)
    else:
        yield fit.problem(recipe)


def surely_fits(recipe: Recipe, cluster: Cluster) -> bool:
    """Return True if a run is so small that no exact plan is needed, which imports torch."""
    return _surely_less(recipe) < _FREE_SHARE * cluster.memory_bytes


def check_disk(place: StartPlace) -> Iterator[Problem]:
    """Yield a disk without room for the checkpoints that are kept, and the prepared data of all stages."""
    recipe, folder = place.recipe, place.run_dir
    if recipe is None or folder is None or place.here.processes is None or place is not place.of_run[0]:
        return
    try:
        total, _, free = shutil.disk_usage(nearest_folder(folder))
        had = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    except OSError:
        return  # ``check_written_folders`` reports that
    if total == 0:
        return  # so does it a file system without a disk
    stages = [(each.recipe, each.inputs) for each in place.of_run if each.recipe is not None]
    # One more than is kept: the oldest goes only when the next one is complete.
    saved = max(_checkpoint_bytes(stage) for stage, _ in stages) * (recipe.checkpoint.keep_last + 1)
    tokens = {
        stage.prepared_dir: inputs.training_tokens or 0.0
        for stage, inputs in stages
        if stage.data.mode == "prepared" and folder in stage.prepared_dir.parents and not inputs.is_prepared
    }
    prepared = sum(tokens.values()) * _TOKEN_BYTES
    if saved + prepared - had <= free:  # checkpoints that the run has are replaced
        return
    text = f", and the prepared data about {_gib(prepared)}" if prepared else ""
    kept = recipe.checkpoint.keep_last
    reason = (
        f"{kept} checkpoints and the next one take {_gib(saved)}{text}, and {_gib(free)} are free where {folder} is."
    )
    remedy = "Keep fewer (checkpoint.keep_last), free space, or choose another run.dir."
    yield Problem("checkpoint.keep_last", reason, remedy, kept, True)


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


VALIDATION_NOTE, TOKENIZER_NOTE, FORECAST_NOTE = "validation", "tokenizer", "forecast"
"""Rules of the notes about little validation text, and about text that is lost in tokens."""
# Passes over the text from which more of them teach next to nothing: Muennighoff et al. 2023, arXiv 2305.16264, by
# whose law repeated tokens are worth little after 16 epochs, and nearly as much as new ones up to 4
_PASSES = 16.0


def note_short_text(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if the text seems shorter than one sample or one batch, or if the run sees it again and again."""
    recipe, tokens = place.recipe, place.inputs.training_tokens
    if recipe is None or not tokens or recipe.data.phases or any(s.weight is not None for s in recipe.data.sources):
        return
    length, batch = recipe.data.sequence_length, recipe.batch.global_batch
    about = "" if place.inputs.is_prepared else "about "
    has = f"the text has {about}{tokens:,.0f} training tokens"
    if tokens <= length and not place.inputs.is_prepared and recipe.data.packing == "concat":
        text = f"data.sequence_length={length}: {has}, and with fewer than {length + 1:,} the run stops."
        yield SettingNote("short-text", text, "Give more text, or shorter sequences.")
    elif tokens < batch * length:
        text = f"batch.global_batch={batch}: a step takes {batch * length:,} tokens, and {has}: it repeats them."
        yield SettingNote("short-text", text, "Usual are many steps per pass; give more text, or a smaller batch.")
    count = (read := recipe.corpus_tokens) / tokens
    if count > _PASSES:
        text = (
            f"{read:,} tokens are {about}{count:,.0f} passes over the text, which has {about}"
            f"{tokens:,.0f} training tokens: the model learns it by heart, and the validation loss rises again."
        )
        yield SettingNote("passes", text, "Usual are 1 to 4; give more text, or fewer training.steps.")


def note_inputs(place: StartPlace) -> Iterator[SettingNote]:
    """Yield notes about scarce validation text, a tokenizer that loses text, and files that seem absent or doubled."""
    inputs = place.inputs
    if inputs.scarce_validation:
        yield SettingNote(VALIDATION_NOTE, inputs.scarce_validation, kind="note")
    if inputs.lossy_tokenizer is not None:
        yield SettingNote(TOKENIZER_NOTE, *inputs.lossy_tokenizer)
    if inputs.doubts:
        yield SettingNote("files", " ".join(inputs.doubts), "Fetch what is missing; name each file once.")


def note_cores(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if processes on CPUs share cores."""
    processes, run = place.here.processes, place.sections.get("run")
    have = own_cores()
    if processes is None or run is None or processes <= have or expects_accelerator(run.device):
        return
    text = (
        f"--nproc {processes}: this machine has {plural(have, 'core')} for these processes, which take "
        f"turns on them: the run is slower than with {have}."
    )
    yield SettingNote("cores", text, "Usual is 1, or a process per socket.")


StartCheck = Callable[[StartPlace], Iterator[Problem | SettingNote]]
"""Yields problems, which stop a run, and notes, which do not."""

START_CHECKS: tuple[StartCheck, ...] = (
    check_written_folders,
    check_device,
    check_schedule,
    check_inputs_given,
    check_sequence_length,
    check_stages_text,
    check_weights,
    check_task_files,
    check_ladder,
    check_memory,
    check_device_memory,
    check_disk,
    note_short_text,
    note_inputs,
    note_cores,
)
"""All checks. What is odd in a recipe alone, wherever it runs, is in the table of ``hlat.config.notes``."""


def findings(place: StartPlace, checks: Sequence[StartCheck]) -> Iterator[Problem | SettingNote]:
    """Yield what checks find, of each stage what they have not found of an earlier one, under the stage's name."""
    known = set[str]()
    for number, stage in enumerate(place.stages):
        for finding in (one for check in checks for one in check(stage)):
            key = str(finding)
            # What no stage changes is found again in each.
            if isinstance(finding, Problem) and not changeable(finding.path):
                key = finding.path
            if number and key in known:
                continue
            known.add(key)
            yield _named(finding, number, place.recipe.stages) if place.recipe and place.recipe.stages else finding


def _named(finding: Problem | SettingNote, number: int, stages: Sequence[StageConfig]) -> Problem | SettingNote:
    """Name the stage of a finding; what is found of the first holds for the run."""
    if isinstance(finding, SettingNote):
        return replace(finding, text=f"stage {stages[number].name}: {finding.text}") if number else finding
    named = in_stage(finding, number, stages)
    if named == finding and number and changeable(finding.path):
        named = replace(finding, path=f"stages.{number}.{finding.path}")
    return named
