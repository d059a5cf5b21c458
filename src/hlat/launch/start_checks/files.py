"""Files: the corpus, validation sets, tokenizer, weights to start from, tasks; and the folder that the run writes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hlat.config import Problem, model_differences
from hlat.launch.start_checks.place import StartPlace, absence, nearest_folder
from hlat.runtime.storage.file_content import broken_link
from hlat.runtime.storage.hub import CONFIG_FILES, HubError, HubModel
from hlat.runtime.storage.run_folder import RECIPE_NAME, is_foreign_recipe
from hlat.runtime.terminal_text import plural
from hlat.runtime.urls import is_url


def inputs(place: StartPlace) -> Iterator[Problem]:
    """Yield the problems of files and tokenizer."""
    for each in place.inputs.problems:
        yield Problem(each.field, each.message, "", each.value, True)


def weights(place: StartPlace) -> Iterator[Problem]:
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
    differences = model_differences(model, Path(path))
    if differences:
        named = ", ".join(f"{name} {there} (here {here})" for name, (there, here) in differences.items())
        remedy = f"Give the model these numbers, or write model: {{from: {path}}}, which takes them from there."
        yield Problem("checkpoint.init_from", f"these are weights of another model: {named}.", remedy, path, True)


def tasks(place: StartPlace) -> Iterator[Problem]:
    """Yield the files of tasks that do not exist."""
    evaluation = place.sections.get("evaluation")
    for index, path in enumerate(() if evaluation is None else evaluation.tasks):
        if reason := absence(path):
            remedy = "`hlat evaluate --render` writes such files."
            yield Problem(f"evaluation.tasks.{index}", f"{reason}.", remedy, path, True)


def written_folders(place: StartPlace) -> Iterator[Problem]:
    """Yield the folders of the run and of its prepared data, if they cannot be made or written."""
    run, data = place.sections.get("run"), place.sections.get("data")
    if run is not None and place.run_dir is not None:
        yield from _unwritable("run.dir", run.dir or str(place.run_dir))
        yield from _own_recipe(place.run_dir)
    if data is not None and data.prepared_dir is not None and not place.inputs.is_prepared:
        yield from _unwritable("data.prepared_dir", data.prepared_dir)


def _own_recipe(run_dir: Path) -> Iterator[Problem]:
    """Yield a recipe of the user's where the run writes its own."""
    if is_foreign_recipe(run_dir):
        reason = f"{run_dir / RECIPE_NAME} was not written by a run, and the run's own recipe would replace it."
        remedy = "Rename that file, or choose another run.dir."
        yield Problem("run.dir", reason, remedy, str(run_dir), True)


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


def length(place: StartPlace) -> Iterator[Problem]:
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
