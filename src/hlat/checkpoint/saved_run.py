"""The run that a checkpoint was saved by: its recipe, its software and its tokenizer, compared with those of a run now.

    recipe in the checkpoint, recipe now --field by field--> refused changes (one error), allowed changes (recorded)
                                         --check_fork------> the same, for a new run from the checkpoint on
    checkpoint/tokenizer/ --read_tokenizer--> Tokenizer
                          --sha256, check_same_tokenizer--> the prepared data has the token ids of the weights, or error

A field marked ``fixed`` in its section defines the model or the order of the data: a run with another value is another
run. One marked ``forks`` defines the updates, whose past no recipe can change: another value takes a fork, unless the
learning rates of the steps done stay what they were. Data is compared by the content of the prepared data, not by its
path. Both recipes have the resolved precision mode, never ``auto``.
"""

import json
import platform
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hlat.checkpoint.format.filesystem import FileRecord
from hlat.checkpoint.inventory import open_unverified
from hlat.checkpoint.protocol.reader import Checkpoint, read_meta
from hlat.config import ARCHITECTURES, PrecisionConfig, Recipe, ScheduleConfig, short
from hlat.data import PreparedData, Tokenizer, load_tokenizer
from hlat.optim import learning_rate
from hlat.runtime import version
from hlat.runtime.errors import CheckpointError, DataError, HlatError
from hlat.runtime.terminal import TABLE_ROWS, listed

_LENGTH = ("training.steps", "training.tokens")
_MODE = "precision.mode"
_OTHER_MODE = (
    "Each mode computes different numbers from the same state, and has extra state that other modes would drop (wider "
    "weights or moments, compensation). Use checkpoint.init_from to start a new run with these weights in any mode."
)


@dataclass(frozen=True)
class RecipeChange:
    """A field whose value differs between the checkpoint and the recipe; JSON values, None for a missing one."""

    path: str
    old: Any
    new: Any


def software_versions() -> dict[str, str]:
    """Versions of hlat, torch and Python, to be saved with the state that they computed."""
    return {"hlat": version.VERSION, "torch": version_of("torch"), "python": platform.python_version()}


def read_saved_run(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    """Recipe of a run's checkpoint, as JSON values, and fingerprint of its data; CheckpointError if not of a run."""
    meta = checkpoint.meta
    if missing := [name for name in ("recipe", "data_fingerprint") if not meta.get(name)]:
        raise CheckpointError(
            f"{checkpoint.path}: is not the checkpoint of a run: its meta.json has no {' and no '.join(missing)}. To "
            "start a run with its weights, move it out of the run folder and set checkpoint.init_from to it."
        )
    return meta["recipe"], meta["data_fingerprint"]


def find_saved_recipe(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the recipe in the newest checkpoint of a run folder, as JSON values; None without a readable one."""
    with suppress(HlatError, OSError):
        return read_saved_run(open_unverified(run_dir))[0]
    return None


class _Mark(IntEnum):
    """Ways in which a field may change."""

    FREE = 0
    FORKS = 1  # in a fork
    FIXED = 2  # not at all


def check_resume(
    saved_recipe: Mapping[str, Any], saved_data_fingerprint: str, recipe: Recipe, data_fingerprint: str, step: int
) -> list[RecipeChange]:
    """Compare the recipe of a checkpoint, as JSON values, with the one that a run is to resume with after ``step``.

    Returns the allowed changes, to be recorded; CheckpointError lists all changes that are not allowed.
    """
    changes = list(_changes("", saved_recipe, recipe, _Mark.FREE))
    fixed, forks, free = ([change for change, mark in changes if mark is each] for each in reversed(_Mark))
    # The content, not the path: prepared data may be moved.
    if saved_data_fingerprint != data_fingerprint:
        fixed.append(RecipeChange("data (content of the prepared tokens)", saved_data_fingerprint, data_fingerprint))
    same_rates = _same_rates(saved_recipe, recipe, step)
    refused = fixed + [change for change in forks if not (same_rates and _is_of_schedule(change.path))]
    if refused:
        remedies = [_fork_remedy(recipe.run_dir, step, forks)] if len(refused) > len(fixed) else []
        head = "the run cannot resume with this recipe: the model, the data or the training trajectory would differ"
        raise CheckpointError("\n".join([_listed_changes(head, refused), *_fixed_remedies(fixed), *remedies]))
    return forks + free


def check_fork(saved_recipe: Mapping[str, Any], recipe: Recipe) -> list[RecipeChange]:
    """Return how the recipe of a fork differs from that of its checkpoint; CheckpointError lists what may not."""
    changes = list(_changes("", saved_recipe, recipe, _Mark.FREE))
    # Stages are compared with what the checkpoint has done when the run goes on.
    if fixed := [change for change, mark in changes if mark is _Mark.FIXED and not change.path.startswith("stages")]:
        head = "a fork cannot have this recipe: its checkpoint has another model, or another order of the data"
        may = (
            "A fork may change the optimizer's rates, the schedule, the length, the layout and how the run is operated."
        )
        raise CheckpointError("\n".join([_listed_changes(head, fixed), *_fixed_remedies(fixed), may]))
    return [change for change, _ in changes]


def _listed_changes(head: str, refused: list[RecipeChange]) -> str:
    lines = [f"{change.path}: saved with {short(change.old)}, now {short(change.new)}" for change in refused]
    return "\n  ".join([head, listed(lines, TABLE_ROWS, "\n  ")])


def _fixed_remedies(fixed: list[RecipeChange]) -> Iterator[str]:
    if fixed:
        yield "Set the saved values again, or use another run.dir (run.name) for a new run."
    if any(change.path == _MODE for change in fixed):
        yield _OTHER_MODE


def _fork_remedy(run_dir: Path, step: int, changes: list[RecipeChange]) -> str:
    names = (f"{run_dir}-fork{number}" for number in ("", *range(2, 1000)))
    free = next((name for name in names if not Path(name).exists()), "NEW")
    words = (f"{change.path}={json.dumps(change.new)}" for change in changes)
    command = shlex.join(["hlat", "fork", f"{run_dir}@{step}", "--to", free, *words])
    return f"The steps done so far had other values. Set the saved ones again, or fork the run:\n  {command}"


def _is_of_schedule(path: str) -> bool:
    return path.startswith("schedule.") or path in _LENGTH


def _same_rates(saved: Mapping[str, Any], recipe: Recipe, step: int) -> bool:
    """Return True if the schedule of a saved recipe gave each step done the share of the peak that it gets now."""
    content, training = recipe.model_dump(mode="json"), saved.get("training")
    length = {name: training.get(name.partition(".")[2]) if isinstance(training, dict) else None for name in _LENGTH}
    content["training"] |= {name.partition(".")[2]: value for name, value in length.items()}
    try:
        before = Recipe.model_validate({**content, "schedule": saved.get("schedule", {})}).placed(recipe.place)
        old, new = ((each.schedule, each.horizon_steps) for each in (before, recipe))
    except (ValidationError, AssertionError):  # a file that was edited
        return False
    return old == new or all(_share(*old, number) == _share(*new, number) for number in range(1, step + 1))


def _share(schedule: ScheduleConfig, horizon: int, step: int) -> float:
    return learning_rate(schedule, peak=1.0, horizon=horizon, step=step)


def saved_precision_mode(saved_recipe: Mapping[str, Any]) -> str:
    """Precision mode of the run that a checkpoint belongs to, from ``recipe`` in its metadata."""
    section = _saved_value(saved_recipe, "precision", Recipe.model_fields["precision"])
    return str(_saved_value(section if isinstance(section, dict) else {}, "mode", PrecisionConfig.model_fields["mode"]))


def saved_determinism(saved_recipe: Mapping[str, Any]) -> bool:
    """``run.deterministic`` of the run that a checkpoint belongs to, from ``recipe`` in its metadata."""
    section = saved_recipe.get("run")
    return not isinstance(section, dict) or section.get("deterministic") is not False


def _changes(
    path: str, saved: Mapping[str, Any], section: BaseModel, outer: _Mark
) -> Iterator[tuple[RecipeChange, _Mark]]:
    """Yield the fields of a section that differ, each with its mark, or that of the section if this is stricter."""
    current = section.model_dump(mode="json")
    fields = type(section).model_fields
    # Fields that this version no longer has are changes too.
    for name in [*fields, *(key for key in saved if key not in fields)]:
        here = f"{path}.{name}" if path else name
        field = fields.get(name)
        mark = max(outer, _mark(field))
        if field is None and mark is _Mark.FORKS and section.model_config.get("extra") != "allow":
            mark = _Mark.FREE  # no recipe can set a field that this version no longer has
        old = _saved_value(saved, name, field)
        new = current.get(name)
        value = getattr(section, name, None)
        if isinstance(value, BaseModel) and isinstance(old, dict):
            yield from _changes(here, old, value, mark)
        elif isinstance(value, tuple) and isinstance(old, list) and _pairs(value, old):
            for index, (saved_inner, inner) in enumerate(_pairs(value, old)):
                yield from _changes(f"{here}.{index}", saved_inner, inner, mark)
        elif _effective_value(name, old, saved) != _effective_value(name, new, current):
            yield RecipeChange(here, old, new), _Mark.FIXED if _has_fixed(value, old, field) else mark


def _pairs(sections: tuple[Any, ...], saved: list[Any]) -> list[tuple[Any, BaseModel]]:
    """Pair saved sections with present ones; empty if their numbers differ or they are not sections."""
    pairs = list(zip(saved, sections, strict=False))
    matching = len(saved) == len(sections) and all(isinstance(section, BaseModel) for section in sections)
    return pairs if matching and all(isinstance(fields, dict) for fields in saved) else []


def _has_fixed(value: Any, old: Any, field: FieldInfo | None) -> bool:
    """True if sections were added to a list or removed from it, and any section sets a fixed field."""
    if field is None or not isinstance(value, tuple):
        return False
    kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    names = {name: inner for kind in kinds for name, inner in kind.model_fields.items() if _mark(inner) is _Mark.FIXED}
    if not names:
        return False
    sections = [section.model_dump(mode="json") for section in value] + (old if isinstance(old, list) else [])
    return any(
        not isinstance(section, dict) or section.get(name, inner.get_default()) != inner.get_default()
        for section in sections
        for name, inner in names.items()
    )


def _mark(field: FieldInfo | None) -> _Mark:
    extra = field.json_schema_extra if field is not None else None
    words = {"fixed": _Mark.FIXED, "fork": _Mark.FORKS}
    return words.get(str(extra.get("resume")), _Mark.FREE) if isinstance(extra, dict) else _Mark.FREE


def _saved_value(saved: Mapping[str, Any], name: str, field: FieldInfo | None) -> Any:
    """Saved value of a field. One that is newer than the checkpoint had its default, or its ``formerly`` value."""
    if name in saved or field is None or field.is_required():
        return saved.get(name)
    if isinstance(field.json_schema_extra, dict) and "formerly" in field.json_schema_extra:
        return field.json_schema_extra["formerly"]
    default = field.get_default(call_default_factory=True)
    if not isinstance(default, BaseModel):
        return list(default) if isinstance(default, tuple) else default  # as JSON has it
    return {inner: _saved_value({}, inner, field) for inner, field in type(default).model_fields.items()}


def _effective_value(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Replace null by the value it stands for, so that writing out a default is no change."""
    heads, width = values.get("heads"), values.get("hidden_size")
    if name == "architecture" and value in ARCHITECTURES:
        return ARCHITECTURES[value].computes_as  # its options are fields of their own
    if name == "by" and value == "auto":
        return "document"  # its only other outcome is other data, whose fingerprint differs
    if value is None and name == "kv_heads":
        return heads
    if value is None and name == "head_dim" and isinstance(heads, int) and isinstance(width, int) and heads:
        return width // heads
    return value


TOKENIZER = "tokenizer"  # folder of the tokenizer's files in a checkpoint

_TOKENIZER_JSON, _SENTENCEPIECE_MODEL = "tokenizer.json", "tokenizer.model"


def tokenizer_files(source: Path) -> dict[str, Path]:
    """Map the files of a tokenizer folder for ``CheckpointStore.save``: path in the checkpoint -> file."""
    return {f"{TOKENIZER}/{file.name}": file for file in sorted(source.iterdir())}


def stored_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Map the tokenizer's files of a checkpoint, as ``tokenizer_files`` does; empty if it has none."""
    return tokenizer_files(folder / TOKENIZER) if (folder / TOKENIZER).is_dir() else {}


def differing_tokenizers(files: Mapping[str, FileRecord], others: Mapping[str, FileRecord]) -> bool:
    """True if two checkpoints, by the files in their manifests, both have a vocabulary, and not the same one."""
    names = [f"{TOKENIZER}/{name}" for name in (_TOKENIZER_JSON, _SENTENCEPIECE_MODEL)]
    return any(name in files and name in others and files[name].sha256 != others[name].sha256 for name in names)


def has_tokenizer(folder: Path) -> bool:
    """True if a checkpoint has a tokenizer that hlat can read."""
    return any((folder / TOKENIZER / name).is_file() for name in (_TOKENIZER_JSON, _SENTENCEPIECE_MODEL))


def read_tokenizer(folder: Path, eos_token: str | None = "auto") -> Tokenizer:
    """Load the tokenizer of a checkpoint, with an end-of-sequence token as for ``load_tokenizer``.

    CheckpointError if it has no tokenizer; DataError if that is unreadable, or has no such token.
    """
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder}: has no tokenizer, so text cannot be converted to tokens: the model it was imported from had "
            f"neither {_TOKENIZER_JSON} nor {_SENTENCEPIECE_MODEL}. "
            "Put one of them next to its config.json and run hlat import again."
        )
    return load_tokenizer(_tokenizer_file(folder), eos_token)


def check_same_tokenizer(folder: Path, prepared: PreparedData) -> None:
    """Check that prepared data has the token ids that weights were trained on; weights without tokenizer pass.

    ``folder`` is a checkpoint or a Hugging Face folder. DataError if the data was prepared with another tokenizer.
    """
    place = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder  # a Hugging Face folder holds it itself
    files = [place / name for name in (_TOKENIZER_JSON, _SENTENCEPIECE_MODEL) if (place / name).is_file()]
    # A checkpoint may have a SentencePiece model and its conversion to tokenizer.json; the data may have been
    # prepared with either.
    if files and not any(_prepared_with(prepared, file) for file in files):
        raise DataError(
            f"{prepared.dir}: was prepared with another tokenizer than the weights in {folder} were trained with, so "
            f"its token ids mean other text. Prepare the text with "
            f"data.tokenizer.path={place} into another data.prepared_dir."
        )


def _prepared_with(prepared: PreparedData, file: Path) -> bool:
    try:
        # With the end-of-document token of the data, which is a setting and is not compared.
        stored = load_tokenizer(file, prepared.tokenizer.eos_token)
        return stored.sha256 == prepared.manifest.tokenizer_sha256
    except DataError:  # it lacks the end-of-sequence token
        return False


def _tokenizer_file(folder: Path) -> Path:
    # Of a run's checkpoint, the file that its data was prepared with; of an import, that which transformers would load.
    first, second = (
        (_SENTENCEPIECE_MODEL, _TOKENIZER_JSON)
        if "recipe" in read_meta(folder)
        else (_TOKENIZER_JSON, _SENTENCEPIECE_MODEL)
    )
    file = folder / TOKENIZER / first
    return file if file.is_file() else file.with_name(second)
