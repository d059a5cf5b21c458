"""Conditions that a run must share with a ladder, so that losses can be compared, or are as expected.

    Recipe --conditions_of--> {field: value}
    conditions of a ladder, Recipe --differences--> Difference: field, both values, whether a forecast makes no sense

Losses per token of another text, tokenizer or mask measure another thing: that is refused. Another optimizer, schedule,
batch or architecture has another law, usually one close by: that is a warning. Sizes and tokens are what the law is of.

A recipe names text and tokenizers by path, and machines keep the same file in different places. So files and folders
are compared by their own names, without the folders around them, and a glob by the last folder that it names, too;
``data.sources.N.name`` gives them another one. What is in a file is not compared: it need not be on this machine.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hlat.config import Recipe
from hlat.runtime.urls import redact

_SIZES = (
    *("preset", "hf_config", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"),
    *("coalesce", "max_sequence_length"),  # not sizes: neither changes a loss
)
_INCOMPARABLE = ("data.", "model.vocab_size")
_ORDER = ("data.mode", "data.shuffle")  # when a sample comes, not what is measured
_CHOSEN = {"optimizer.lr": "optimizer.lr", "schedule.warmup_share": "schedule.warmup_steps"}
"""Field of the recipe by condition, where a run chooses what the recipe does not give."""


class Difference(NamedTuple):
    """A field in which a recipe differs from a ladder."""

    field: str
    ladder: Any
    recipe: Any  # None if the recipe does not have it
    incomparable: bool  # True if losses cannot be compared, False if the expected loss is another one


def conditions_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields, by dotted path, in which a run must agree with a ladder for its law to hold, as JSON values.

    Where steps mean something else in a longer run, a field is given as a share of the run or in tokens, under a name
    of its own (``schedule.warmup_share``, ``batch.tokens``).
    """
    return {
        **_data(recipe),
        **{f"model.{name}": value for name, value in _json(recipe.model).items() if name not in _SIZES},
        **{f"optimizer.{name}": value for name, value in _json(recipe.optimizer).items()},
        **_schedule(recipe),
        "batch.tokens": recipe.tokens_per_step,
        "evaluation.sequences": recipe.evaluation.sequences,
        "batch.ramp": [_json(part) for part in recipe.batch.ramp],
        "precision.mode": recipe.precision.mode,
        "training.loss_terms": _json(recipe.training)["loss_terms"],
        "stages": [stage.model_dump(mode="json", exclude_defaults=True) for stage in recipe.stages],
    }


def differences(conditions: Mapping[str, Any], recipe: Recipe) -> list[Difference]:
    """Return the conditions of a ladder that a recipe does not meet, those that matter most first."""
    ours = conditions_of(recipe)
    found = [
        Difference(name, value, ours.get(name), name.startswith(_INCOMPARABLE) and name not in _ORDER)
        for name, value in conditions.items()
        if value != ours.get(name) and not _is_open(name, recipe, (value, ours.get(name)))
    ]
    # No ladder has stored weights: they fit one size.
    if (weights := recipe.checkpoint.init_from) is not None:
        found.append(Difference("checkpoint.init_from", None, weights, incomparable=True))
    return sorted(found, key=lambda one: not one.incomparable)


def _is_open(name: str, recipe: Recipe, values: tuple[Any, Any]) -> bool:
    """Return True for a condition whose field a recipe, or the ladder's, leaves to its run to choose."""
    if name == "precision.mode":
        return "auto" in values  # that of the machine; auto in data is a rule of its own, which no run replaces
    path = _CHOSEN.get(name)
    return path is not None and not recipe.gives(path)


def _json(section: Any) -> dict[str, Any]:
    values: dict[str, Any] = section.model_dump(mode="json")
    return values


def _data(recipe: Recipe) -> dict[str, Any]:
    data, tokenizer = recipe.data, recipe.data.tokenizer
    trained = None if tokenizer.path else [tokenizer.train, tokenizer.vocab_size, tokenizer.train_bytes]
    validation = {**_json(data.validation), "path": _own_name(data.validation.path)}
    return {
        "data.mode": data.mode,
        "data.shuffle": data.shuffle,
        "data.text": list(_texts(recipe)),
        "data.phases": [_json(phase) for phase in data.phases],
        "data.duplicates": data.duplicates,
        "data.sequence_length": data.sequence_length,
        "data.packing": data.packing,
        "data.isolate": data.isolate,
        "data.tokenizer.path": _own_name(tokenizer.path),
        "data.tokenizer.train": trained,
        "data.tokenizer.eos_token": tokenizer.eos_token,
        **{f"data.validation.{name}": value for name, value in validation.items()},
    }


def _texts(recipe: Recipe) -> Iterator[list[Any]]:
    """Yield name, column, share, repetition and limit of each source."""
    data = recipe.data
    if data.path is not None:
        yield [_own_name(data.path), data.tokens_column or data.text_column, None, 1.0, None]
    for source in data.sources:
        column = source.tokens_column or source.text_column or data.tokens_column or data.text_column
        yield [source.name or _own_name(source.path), column, source.weight, source.repeat, source.max_tokens]


def _own_name(path: str | None) -> str | None:
    if path is None:
        return None
    parts = redact(path).rstrip("/").split("/")
    # "*.parquet" names no text.
    globs = [at for at, part in enumerate(parts) if re.search(r"[*?[]", part)]
    return "/".join(parts[max(0, globs[0] - 1) if globs else -1 :])


def _schedule(recipe: Recipe) -> dict[str, Any]:
    values = _json(recipe.schedule)
    warmup, horizon = values.pop("warmup_steps"), values.pop("horizon_steps")
    # Whole steps of a short run round a share, so that two digits are kept.
    values["warmup_share"] = _two_digits(warmup / recipe.horizon_steps)
    values["horizon_share"] = _two_digits(1.0 if horizon is None else horizon / recipe.schedule_steps)
    return {f"schedule.{name}": value for name, value in values.items()}


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
