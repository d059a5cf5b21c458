"""Errors of pydantic in the words of recipes, and the names and values of other programs.

    location, kind of error, value --explain--> Problem: field, value, reason, and the description of the field
    a name of another program --FIELDS, VALUES, ...--> what recipes call it --> the remedy of the Problem

A recipe that uses a name of another program is refused, with the name that works here. These names are those of
transformers' configurations and trainer, litgpt, nanoGPT, torchtitan, Megatron-LM and axolotl. Only error messages read
them.
"""

import difflib
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from hlat.config.errors import Problem, short
from hlat.config.recipe import Recipe
from hlat.config.sections.base import Section
from hlat.config.sections.model import HF_NAMES
from hlat.config.sections.training import OWN
from hlat.runtime.backend.table import OTHER_DEVICE_NAMES

_NAMES_ELSEWHERE = {
    # what is meant here: the names of other programs
    "optimizer.kind": "optim optimizer_type optimizer_name",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr matrix_lr embedding_lr unembedding_lr",
    "schedule.min_ratio, a share of optimizer.lr": "min_lr final_lr_frac",
    "optimizer.weight_decay": "weight_decay_rate",
    "optimizer.betas, a list of two": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.clip_norm": "grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val max_norm",
    "schedule.kind": "lr_scheduler_type lr_scheduler lr_decay_style decay_type",
    "schedule.warmup_steps": "warmup_iters lr_warmup_steps warmup",
    "schedule.warmup_steps, a number of steps": "warmup_ratio warmup_fraction",
    "schedule.decay_fraction, with schedule.kind=wsd": "decay_ratio warmdown_ratio",
    "batch.global_batch (sequences per step) and batch.micro_batch (sequences per pass)": "batch_size",
    "batch.global_batch": "global_batch_size train_batch_size",
    "batch.global_batch, in sequences of data.sequence_length tokens": "total_batch_size",
    "batch.micro_batch": "micro_batch_size per_device_train_batch_size local_batch_size device_batch_size",
    "batch.global_batch: a step accumulates until it is reached": "gradient_accumulation_steps accumulate_grad_batches",
    "training.steps": "max_steps max_iters train_iters num_iterations num_steps total_steps",
    "training.steps or training.tokens; passes over the text follow from them": "num_train_epochs num_epochs epochs",
    "training.tokens": "max_tokens train_tokens total_tokens",
    "training.log_every": "logging_steps log_interval log_freq log_every_n_steps",
    "model.layers": "num_layers n_layer n_layers depth",
    "model.hidden_size": "n_embd dim d_model hidden_dim",
    "model.intermediate_size": "ffn_hidden_size ffn_dim",
    "model.heads": "num_heads n_head n_heads",
    "model.kv_heads": "num_query_groups n_kv_heads n_kv_head",
    "model.rope.scaling": "rope_scaling rope_parameters",
    "model.preset, or model.from for a model that exists": "model_name flavor",
    "model.from": "model_name_or_path pretrained_model_name_or_path base_model",
    "data.sequence_length": "seq_length seq_len block_size context_length max_seq_length max_seq_len",
    "data.path": "dataset dataset_name dataset_path train_file",
    "data.workers": "num_workers dataloader_num_workers",
    "data.tokenizer.path": "tokenizer_path tokenizer_name",
    "run.dir": "output_dir out_dir save_dir logging_dir dump_folder",
    "run.name": "run_name experiment_name",
    "checkpoint.every_steps": "save_steps save_interval save_every save_strategy",
    "checkpoint.keep_last": "save_total_limit keep_latest_k",
    "the same command, which resumes by itself": "resume_from_checkpoint resume",
    "evaluation.every_steps": "eval_steps eval_interval eval_every eval_strategy evaluation_strategy",
    "precision.mode": "dtype torch_dtype",
    "precision.mode=mixed": "mixed_precision bf16",
    "precision.mode=mixed, which is bfloat16": "fp16",
    "precision.mode=fp8": "fp8 float8",
    "memory.activation_checkpointing": "gradient_checkpointing",
    "run.compile": "torch_compile",
    "parallel.tensor": "tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp",
    "parallel.pipeline": "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp",
    "parallel.context": "context_parallel_size context_parallel_degree cp",
    "parallel.zero": "zero_stage fsdp deepspeed data_parallel_shard_degree",
    "parallel.replicas": "data_parallel_replicate_degree",
    "tracking.wandb, tracking.mlflow or tracking.trackio": "report_to enable_wandb wandb_project",
    "--nproc of hlat train: what is left of the processes shares the batch": "data_parallel_size dp",
    "--nproc of hlat train": "gpus num_gpus devices nproc_per_node",
    "--nodes of hlat train": "num_nodes nnodes",
}
FIELDS = {name: meant for meant, names in _NAMES_ELSEWHERE.items() for name in names.split()} | {
    name: f"model.{field}" for name, field in HF_NAMES.items()
}
"""What a name of another program is called here: a field, or an option of ``hlat train``, with a note where needed."""

_SECTIONS_ELSEWHERE = {
    # section here: the names of other programs
    "run": "job experiment project",
    "model": "model_args model_config network",
    "data": "dataset datasets corpus dataloader data_args",
    "batch": "batches batching",
    "optimizer": "optim optimiser opt",
    "schedule": "scheduler lr_scheduler lr_schedule",
    "training": "train trainer training_args training_arguments",
    "evaluation": "eval evaluate",
    "checkpoint": "checkpoints checkpointing ckpt",
    "parallel": "parallelism distributed dist",
    "memory": "activation_checkpoint",
    "tracking": "metrics logging logger",
    "recovery": "fault_tolerance",
}
SECTIONS = {name: meant for meant, names in _SECTIONS_ELSEWHERE.items() for name in names.split()}
"""What a section of another program is called here."""

FIELDS_OF_SECTION = {
    ("parallel", "data"): FIELDS["data_parallel_size"],
    ("batch", "size"): FIELDS["batch_size"],
    ("run", "output"): "run.dir",
    **{
        (f"optimizer.{kind}", name): "optimizer.kind, adamw or muon"
        for kind in ("adamw", "muon")  # the kind in force, adamw if none is given
        for name in ("name", "type", "optimizer", "algorithm")
    },
}
"""Names that mean this only in a section."""

VALUES = {("run.device", name): device for name, device in OTHER_DEVICE_NAMES.items()} | {
    ("precision.mode", "float32"): "fp32",
    ("precision.mode", "32"): "fp32",
    ("precision.mode", "float16"): "mixed",
    ("precision.mode", "fp16"): "mixed",
    ("precision.mode", "bfloat16"): "mixed",
    ("precision.mode", "bf16-mixed"): "mixed",
    ("precision.mode", "amp"): "mixed",
    ("optimizer.kind", "adam"): "adamw",
}
"""The value of a field that one of another program stands for."""

MAIN_FIELDS = {
    "run": "name",
    "model": "preset",
    "data": "path",
    "batch": "global_batch",
    "optimizer": "lr",
    "schedule": "warmup_steps",
    "training": "steps",
    "checkpoint": "every_steps",
    "evaluation": "every_steps",
    "precision": "mode",
    "parallel": "tensor",
    "memory": "activation_checkpointing",
    "data.tokenizer": "path",
    "data.validation": "fraction",
}
"""The field that a value most likely means if it stands where a section belongs."""

SECTIONS_OFF = {
    "data.tokenizer": "To train one on the corpus, leave it out, or write data.tokenizer.path=null.",
    "data.validation": "Write data.validation.fraction=0 to keep nothing aside for validation.",
    "evaluation": "Write evaluation.every_steps=null to evaluate nothing.",
}
"""What to write in place of a section that is null, by those who want to do without it."""

INSTEAD = {"data.path": "data.sources", "training.steps": "training.tokens", "training.tokens": "training.steps"}
"""The field that has to be given where another is null."""

REQUIRED = {
    "data": "Give data.path=FILE_OR_FOLDER, or data.sources; hlat init FILE_OR_FOLDER drafts a recipe.",
    "training": "Give training.tokens or training.steps, as in training.tokens=100M.",
}
"""What to write for a section that is missing."""

_INTEGER = "must be a whole number"
_QUOTED = re.compile(r"'([^']+)'")
_REASONS = {
    "int_parsing": f"{_INTEGER}, as in 100, 100M or 1e9",
    "int_parsing_size": _INTEGER,
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "float_parsing": "must be a number, as in 0.1 or 3e-4",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a section: fields with their values",
    "model_attributes_type": "must be a section: fields with their values",
    "missing": "is required",
    "string_pattern_mismatch": "has characters that may not stand there",
    "string_too_short": "must not be empty",
    "too_short": "has too few entries",
    "ip_any_address": "must be an IP address, as in 127.0.0.1",
}
_COMMA = re.compile(r"[-+]?\d+,\d+")
_TYPOGRAPHIC = "\u201c\u201d\u201e\u2018\u2019"
FIELD_LIST = "Fields here"
"""How a list of the fields that there are begins."""
_NAMED_FIELDS = 3
_FIRST_FIELD = re.compile(r"\w+(\.\w+)+")  # without a note
_LONGEST_NAME = 100  # characters; a longer name is no misspelling of a field


def explain(detail: ErrorDetails) -> Problem:
    """Turn an error of ``ValidationError.errors()`` of ``Recipe`` into a problem."""
    path = dotted_path(detail["loc"])
    if detail["type"] in ("kind", "union_tag_invalid", "union_tag_not_found"):
        return _wrong_kind(path, detail)
    if detail["type"] == "extra_forbidden":
        meant = _section_meant(detail["loc"], detail["input"]) or _where_meant(detail["loc"])
        return Problem(path, "there is no such field.", meant)
    if detail["type"] == "missing":
        return Problem(path, "is required.", REQUIRED.get(path) or _description(detail["loc"]))
    value, reason = detail["input"], _reason(detail)
    if detail["type"] == "quantity":
        return Problem(path, f"{reason}.", "", value, True)
    remedy = f"{_how_to_write(path, detail['type'], value)}{_nearest(path, detail)}{_description(detail['loc'])}"
    return Problem(path, f"{reason}.", remedy.rstrip(), value, not isinstance(value, dict))


def _wrong_kind(path: str, detail: ErrorDetails) -> Problem:
    union = _sections_at((*detail["loc"],))
    kinds = [tag for each in union for tag in _tags(each) if tag != OWN]
    section = detail["input"]
    given = section.get("kind") if isinstance(section, dict) else None
    known = f"Known: {', '.join(kinds)}."
    if given is None:
        return Problem(f"{path}.kind", "is required.", known)
    known = f"{suggestion(str(given), kinds)}{known}"
    if any(OWN in _tags(each) for each in union):
        known += " One of your own is package.module:Name (docs/extend.md)."
    return Problem(f"{path}.kind", "there is no such kind.", known, given, True)


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """Return ``Did you mean 'name'? `` if a known name is close, else an empty string."""
    # difflib takes quadratic time, so long names are not compared.
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6) if len(name) <= _LONGEST_NAME else []
    return f"Did you mean {close[0]!r}? " if close else ""


def _section_meant(location: tuple[int | str, ...], value: Any) -> str:
    """Say what a section of another program is called here, and some of its fields; empty if it is none."""
    name = str(location[-1])
    if len(location) > 1 or name not in SECTIONS or (name in FIELDS and not isinstance(value, dict)):
        return ""
    written = [_field_in(SECTIONS[name], str(key)) for key in (value if isinstance(value, dict) else ())]
    known = [each for each in written if each][:_NAMED_FIELDS]
    return f"Here it is {SECTIONS[name]}{': write ' if known else ''}{', '.join(known)}."


def _field_in(section: str, name: str) -> str:
    """Return the field that a name within a section of another program stands for; empty if that is not known."""
    own = any(name in each.model_fields for each in _sections_at((section,)))
    found = _FIRST_FIELD.match(f"{section}.{name}" if own else field_called(name) or "")
    return found[0] if found else ""


def _where_meant(location: tuple[int | str, ...]) -> str:
    """Say what an unknown field may be: misspelled, one of another section, one of another program."""
    section, name = _section_at(location[:-1]), str(location[-1])
    known = list(section.model_fields) if section is not None else []
    above = ".".join(map(str, location[:-1]))
    if (meant := FIELDS_OF_SECTION.get((above, name))) is not None:
        return f"Here it is {meant}."
    if "\u00a0" in name:
        return "It holds a no-break space (U+00A0), as text of web pages does: write an ordinary blank instead."
    if name.isdigit():
        return f"Is it half of a number with a comma? Write a dot, as in 0.{name}."
    if places := [place for place in _owners(name) if place != above]:
        return _as_field_of(places, name)
    if (meant := FIELDS.get(name)) is not None:
        return f"Here it is {meant}."
    return (suggestion(name, known) or f"{FIELD_LIST}: {', '.join(known)}.").rstrip()


def _as_field_of(places: list[str], name: str) -> str:
    if len(places) == 1:
        return f"It is a field of {places[0]}: write {places[0]}.{name}, or indent it below {places[0]}."
    shown = [f"{place}.{name}" for place in places]
    return f"It is a field of several sections: write {', '.join(shown[:-1])} or {shown[-1]}."


def field_called(name: str) -> str | None:
    """Return the dotted field or the option of ``hlat train`` that a name stands for, here or in another program."""
    return f"{owners[0]}.{name}" if (owners := _owners(name)) else FIELDS.get(name)


def _owners(name: str) -> list[str]:
    """Return the sections that have a field of this name, the outermost ones: the name was given without a section."""
    found = [path.rpartition(".")[0] for path in _PATHS if path.rpartition(".")[2] == name]
    outermost = min((place.count(".") for place in found), default=0)
    return list(dict.fromkeys(place for place in found if place.count(".") == outermost))


def _field_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        # Below a list or mapping, a path has an index or a name that the user chooses.
        if typing.get_origin(field.annotation) not in (tuple, dict):
            for kind in _section_classes(field.annotation):
                yield from _field_paths(kind, f"{prefix}{name}.")


def _how_to_write(path: str, kind: str, value: Any) -> str:
    """Say how to write what seems to be meant, as a sentence with a space after it; empty if unknown."""
    hint = ""
    if kind in ("model_type", "model_attributes_type"):
        hint = _as_section(path, value)
    elif kind == "dict_type":
        hint = "Write {NAME: VALUE}, with a name of your own."
    elif not isinstance(value, str):
        pass
    elif kind.startswith("float_") and _COMMA.fullmatch(value):
        hint = f"Write {value.replace(',', '.')}, with a dot."
    elif kind == "tuple_type":
        hint = f"Write [{', '.join(part.strip() for part in short(value).strip(chr(39)).split(','))}]."
    elif any(quote in value for quote in _TYPOGRAPHIC):
        hint = "Its quotes are typographic, and belong to the text; write plain ones or none."
    return f"{hint} " if hint else ""


def _as_section(path: str, value: Any) -> str:
    if value is None:
        return SECTIONS_OFF.get(path, "Indent its fields below it.")
    if path not in MAIN_FIELDS or not isinstance(value, str | int | float):
        return ""
    written = short(value).strip(chr(39))
    # A name stands for one of several kinds, as in optimizer: adamw.
    has_kinds = any("kind" in each.model_fields for each in _sections_at(tuple(path.split("."))))
    main = "kind" if has_kinds and isinstance(value, str) else MAIN_FIELDS[path]
    hint = f"Write {path.rpartition('.')[2]}: {{{main}: {written}}}."
    if path == "data.tokenizer" and "/" not in written and not Path(written).exists():
        hint = (
            "Write data.tokenizer.path=FILE_OR_FOLDER, or the id of a model of the Hugging Face Hub, which has an "
            "owner, as in data.tokenizer.path=openai-community/gpt2."
        )
    return hint


def explain_none(content: Any) -> Iterator[Problem]:
    """Yield a problem for each field that holds the text ``None``: Python's word, for which YAML has null."""
    yield from _explain_none(content, (), content)


def _explain_none(content: Any, location: tuple[str | int, ...], recipe: Any) -> Iterator[Problem]:
    if isinstance(content, dict | list | tuple):
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        for name, value in entries:
            yield from _explain_none(value, (*location, name), recipe)
    elif content == "None":
        path = dotted_path(location)
        yield Problem(path, "is the text None; for no value, YAML has null.", _unset(path, location, recipe))


def _unset(path: str, location: tuple[str | int, ...], recipe: Any) -> str:
    if path in SECTIONS_OFF:
        return SECTIONS_OFF[path]
    if path in INSTEAD and not _holds_value(recipe, INSTEAD[path]):
        return f"Give a value, or {INSTEAD[path]} instead."
    sections, name = _sections_at(location[:-1]), str(location[-1])
    field = next((each.model_fields[name] for each in sections if name in each.model_fields), None)
    if field is None:
        is_field = sections and isinstance(location[-1], str)  # else an entry of a list or mapping
        return _where_meant(location) if is_field else "Remove it, or give a value."
    if type(None) in typing.get_args(field.annotation):
        return f"Write {path}=null."
    if not field.is_required():
        return "Leave it out for its default."
    is_section = bool(_section_classes(field.annotation))
    return "Indent its fields below it." if is_section else "A value is required here: give one."


def _holds_value(recipe: Any, path: str) -> bool:
    section, _, name = path.partition(".")
    fields = recipe.get(section)
    return isinstance(fields, dict) and fields.get(name) not in (None, "None", [], ())


def _nearest(path: str, detail: ErrorDetails) -> str:
    value, allowed = detail["input"], _QUOTED.findall(str(detail.get("ctx", {}).get("expected", "")))
    if (meant := VALUES.get((path, str(value).lower()))) in allowed:
        return f"Here it is {meant!r}. "
    return suggestion(value, allowed) if isinstance(value, str) else ""


def _reason(detail: ErrorDetails) -> str:
    known = _REASONS.get(detail["type"])
    if known is not None:
        return known
    # pydantic puts these words in front of a validator's own.
    message = detail["msg"].removeprefix("Value error, ").replace("True, False or", "true, false or")  # as in YAML
    return (message[:1].lower() + message[1:]).replace("input should be", "must be").replace("input should", "must")


def _section_classes(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in typing.get_args(annotation) for section in _section_classes(inner)]


def _section_at(location: tuple[int | str, ...]) -> type[Section] | None:
    found = _sections_at(location)
    return found[0] if len(found) == 1 else None


def _sections_at(location: tuple[int | str, ...]) -> list[type[Section]]:
    candidates: list[type[Section]] = [Recipe]
    for part in location:
        if len(candidates) > 1:
            # pydantic puts the tag of the union's member into the location.
            candidates = [c for c in candidates if part in _tags(c)]
        elif candidates and isinstance(part, str):
            field = candidates[0].model_fields.get(part)
            candidates = _section_classes(field.annotation) if field is not None else []
    return candidates


def dotted_path(location: tuple[int | str, ...]) -> str:
    """Return the dotted path as a recipe writes it, without the tags of unions that pydantic inserts."""
    location = tuple(part for part in location if part != "[key]")  # pydantic's name for the key of a mapping
    parts = [part for index, part in enumerate(location) if not (index and _is_tag(location[:index], part))]
    return ".".join(map(str, parts))


def _is_tag(before: tuple[int | str, ...], part: int | str) -> bool:
    union = _sections_at(before)
    return len(union) > 1 and any(part in _tags(c) for c in union)


def _tags(section: type[Section]) -> tuple[Any, ...]:
    """Return the tags under which a section is a member of a union."""
    return typing.get_args(section.model_fields["kind"].annotation) or (OWN,)


def _description(location: tuple[int | str, ...]) -> str:
    section = _section_at(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section is not None else None
    return f"It means: {' '.join(field.description.split())}" if field is not None and field.description else ""


_PATHS = tuple(path for path in _field_paths(Recipe) if "." in path)
"""Dotted paths of the fields of all sections, without those in lists and mappings."""
