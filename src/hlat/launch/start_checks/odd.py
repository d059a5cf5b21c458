"""Settings that are odd in view of the text or of this machine: warnings, which stop nothing."""

import os
from collections.abc import Iterator

from hlat.config import SettingNote
from hlat.launch.start_checks.place import StartPlace
from hlat.runtime.backend.table import expects_accelerator
from hlat.runtime.terminal_text import plural

VALIDATION_NOTE, TOKENIZER_NOTE = "validation", "tokenizer"
"""Rules of the notes about little validation text, and about text that is lost in tokens."""
_PASSES = 16.0
"""Passes over the text from which more of them teach next to nothing: Muennighoff et al. 2023, arXiv 2305.16264, by
whose law repeated tokens are worth little after 16 epochs, and nearly as much as new ones up to 4."""


def passes(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if the run sees its text again and again."""
    recipe, tokens = place.recipe, place.inputs.training_tokens
    if recipe is None or not tokens or recipe.data.phases or any(s.weight is not None for s in recipe.data.sources):
        return
    count = recipe.total_tokens / tokens
    if count > _PASSES:
        about = "" if place.inputs.is_prepared else "about "
        text = (
            f"{recipe.total_tokens:,} tokens are {about}{count:,.0f} passes over the text, which has {about}"
            f"{tokens:,.0f} training tokens: the model learns it by heart, and the validation loss rises again."
        )
        yield SettingNote("passes", text, "Usual are 1 to 4; give more text, or fewer training.steps.")


def short_text(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if the text seems to be shorter than one sample, or than one batch."""
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


def validation(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if little text of a source is for validation."""
    if place.inputs.scarce_validation is not None:
        text, remedy = place.inputs.scarce_validation
        yield SettingNote(VALIDATION_NOTE, text, remedy)


def tokenizer(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if the given tokenizer loses text, or is not used as its files say."""
    if place.inputs.lossy_tokenizer is not None:
        text, remedy = place.inputs.lossy_tokenizer
        yield SettingNote(TOKENIZER_NOTE, text, remedy)


def files(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if files of the corpus seem to be absent, or are there twice."""
    if place.inputs.doubts:
        yield SettingNote("files", " ".join(place.inputs.doubts), "Fetch what is missing; name each file once.")


def cores(place: StartPlace) -> Iterator[SettingNote]:
    """Yield a note if processes on CPUs share cores."""
    processes, run = place.here.processes, place.sections.get("run")
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processes is None or run is None or processes <= have or expects_accelerator(run.device):
        return
    text = (
        f"--nproc {processes}: this machine has {plural(have, 'core')} for these processes, which take "
        f"turns on them: the run is slower than with {have}."
    )
    yield SettingNote("cores", text, "Usual is 1, or a process per socket.")
