"""Files: the corpus, validation sets, tokenizer, weights to start from, tasks; and the folder that the run writes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hlat.config import Problem
from hlat.launch.start_checks.place import StartPlace, absence, nearest_folder
from hlat.runtime import is_url
from hlat.runtime.storage import CONFIG_FILES, HubError, HubModel


def inputs(place: StartPlace) -> Iterator[Problem]:
    """Yield the problems of files and tokenizer."""
    for each in place.inputs.problems:
        yield Problem(each.field, each.message, "", each.value, True)


def weights(place: StartPlace) -> Iterator[Problem]:
    """Yield a checkpoint to start from that does not exist, or a model that the Hub does not give."""
    checkpoint = place.sections.get("checkpoint")
    path = None if checkpoint is None else checkpoint.init_from
    if path is None or is_url(path) or not (reason := absence(path)):
        return
    if (hub := HubModel.parse(path)) is None:
        remedy = "Name a checkpoint, a run folder, or a Hugging Face folder."
        yield Problem("checkpoint.init_from", f"{reason}.", remedy, path, True)
        return
    try:
        hub.snapshot(CONFIG_FILES)  # the weights follow when training starts
    except HubError as error:
        yield Problem("checkpoint.init_from", f"{error}.", "", path, True)


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
    if data is not None and data.prepared_dir is not None and not place.inputs.is_prepared:
        yield from _unwritable("data.prepared_dir", data.prepared_dir)


def _unwritable(field: str, folder: str) -> Iterator[Problem]:
    try:
        nearest = nearest_folder(Path(folder).expanduser())
        if not nearest.is_dir():
            reason = f"{nearest} is a file, so no folder can be there."
        elif not os.access(nearest, os.W_OK | os.X_OK):
            reason = f"permission denied: {nearest} cannot be written by this user."
        elif shutil.disk_usage(nearest).total == 0:
            reason = f"{nearest} is in a file system without a disk, which holds no files."
        else:
            return
    except OSError as error:
        reason = f"{error.filename or folder} cannot be accessed: {error.strerror}."
    yield Problem(field, reason, f"Choose another {field}, or ask for the permission.", folder, True)


def length(place: StartPlace) -> Iterator[Problem]:
    """Yield a sequence length for which the corpus has too few tokens, whatever the tokenizer."""
    data, most = place.sections.get("data"), place.inputs.most_tokens
    if data is None or most is None or place.inputs.is_prepared or most > data.sequence_length:
        return
    reason = (
        f"the corpus has {place.inputs.text_bytes:,} bytes, which are at most {most:,} tokens: too few for one sample "
        f"of {data.sequence_length:,} tokens and the one that follows it."
    )
    yield Problem("data.sequence_length", reason, "Give more text, or shorter sequences.", data.sequence_length, True)
