"""Page of every field of a recipe: meaning, type, unit, default, example.

JSON schema of recipes --fields--> Field: path, node, parents --recipe_page--> Markdown
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hlat.config import HF_NAMES, recipe_schema
from hlat.planner.defaults import CHOSEN

UNITS = {
    # end of a field's name -> unit; the longest that fits decides
    "seconds": "seconds",
    "steps": "optimizer steps",
    "tokens": "tokens",
    "bytes": "bytes",
    "gib": "GiB",
    "gb": "GB",
    "mib": "MiB",
    "mb": "MB",
    "batch": "sequences",
    "sequences": "sequences",
    "sequence_length": "tokens",
    "ratio": "share, 0 to 1",
    "fraction": "share, 0 to 1",
    "dropout": "share, 0 to 1",
    "window": "tokens",
}
EXAMPLES: dict[str, Any] = {
    # fields whose type and default alone give no useful example
    "run.name": "mine",
    "run.dir": "/scratch/runs/mine",
    "run.compile_cache": "/scratch/compiled",
    "include": "base.yaml",
    "model.preset": "llama-3.2-1b",
    "model.hf_config": "path/to/config.json",
    "model.vocab_size": 32000,
    "model.layers": 24,
    "model.hidden_size": 2048,
    "model.intermediate_size": 5632,
    "model.heads": 16,
    "model.kv_heads": 4,
    "model.head_dim": 128,
    "model.max_sequence_length": 4096,
    "model.sliding_window": 4096,
    "model.layer_types": ["sliding_attention", "full_attention"],
    "model.rope_layers": [True, True, True, False],
    "model.rope.scaling.factor": 8.0,
    "model.rope.scaling.low_freq_factor": 1.0,
    "model.rope.scaling.high_freq_factor": 4.0,
    "model.rope.scaling.original_max_position": 8192,
    "data.path": "texts/**/*.parquet",
    "data.sources": [{"path": "code/*.py", "weight": 1}, {"path": "books.parquet", "weight": 3}],
    "data.sources[].path": "books.parquet",
    "data.sources[].text_column": "content",
    "data.sources[].tokens_column": "input_ids",
    "data.sources[].name": "books",
    "data.sources[].max_tokens": 1_000_000_000,
    "data.phases": [{"until_tokens": 1_000_000_000, "weights": {"web": 1}}, {"weights": {"web": 1, "code": 1}}],
    "data.phases[].until_tokens": 1_000_000_000,
    "data.phases[].weights": {"web": 0.7, "code": 0.3},
    "data.text_column": "content",
    "data.tokens_column": "input_ids",
    "data.tokenizer.path": "tokenizer.json",
    "data.tokenizer.eos_token": "<|endoftext|>",
    "data.validation.path": "held-out.jsonl",
    "data.prepared_dir": "/scratch/prepared",
    "data.cache_dir": "/scratch/cache",
    "data.unreadable_rows": 0.001,
    "batch.ramp": [{"tokens": 10_000_000, "global_batch": 64}],
    "batch.ramp[].tokens": 10_000_000,
    "batch.ramp[].global_batch": 64,
    "optimizer.betas": [0.9, 0.98],
    "optimizer.z_loss": 1e-4,
    "optimizer.momentum": 0.9,
    "training.ema.decay": 0.9999,
    "training.stop_after": 500,
    "optimizer.adamw_lr": 3e-4,
    "schedule.warmup_steps": 2000,
    "training.seed": 1,
    "training.ema.start_step": 1000,
    "training.components": {"my-component": {"every_steps": 10}},
    "checkpoint.init_from": "start",
    "checkpoint.remote": "s3://bucket/run",
    "checkpoint.local.dir": "/dev/shm/hlat-{node}",
    "checkpoint.export.dir": "/scratch/exports",
    "evaluation.sets": {"books": "held-out.jsonl"},
    "evaluation.tasks": ["tasks/arithmetic.jsonl"],
    "evaluation.prompts": ["Once upon a time"],
    "parallel.split": [3, 2],
    "parallel.replicas": 2,
    "memory.budget_gib": 60,
    "tracking.prometheus.port": 9464,
    "tracking.prometheus.address": "0.0.0.0",
    "tracking.wandb.entity": "my-team",
    "tracking.wandb.group": "sweep-1",
    "tracking.wandb.tags": ["baseline"],
    "tracking.mlflow.uri": "http://127.0.0.1:5000",
    "tracking.trackio.space": "my-team/trackio",
    "recovery.deadline_seconds": 14000,
    "faults": [{"kind": "kill", "at_step": 20}],
    "faults[].at_step": 20,
    "faults[].rank": 1,
    "faults[].seconds": 30,
}
_BY_END = {"tokens": 1_000_000_000, "steps": 1000, "seconds": 60, "step": 100, "epochs": 4, "repeat": 2, "weight": 2}


@dataclass(frozen=True)
class Field:
    """A field of recipes.

    Attributes:
        path: its place, such as ``data.sources[].weight``; ``[]`` stands for the number of an entry of a list.
        node: its JSON schema.
        kind: for a field of one of several alternatives, the value of ``kind`` that chooses it; else empty.
    """

    path: str
    node: dict[str, Any]
    kind: str = ""


def fields(schema: dict[str, Any] | None = None) -> list[Field]:
    """Return every field of recipes, sections first, in the order of the schema."""
    schema = schema or recipe_schema()
    return list(_children(schema, schema, "", ""))


def example(field: Field, schema: dict[str, Any] | None = None) -> Any:
    """Return a value that the schema of a field accepts, if possible not its default; None for a section."""
    if field.path in EXAMPLES:
        return EXAMPLES[field.path]
    alternatives = [one for one in _alternatives(schema or recipe_schema(), field.node) if one.get("type") != "null"]
    default = field.node.get("default")
    for one in alternatives:
        if "const" in one:
            return one["const"]
        values = [value for value in one.get("enum", ()) if value != default]
        if values:
            return values[0]
        if one.get("type") == "boolean":
            return default is False
        if one.get("type") in ("integer", "number"):
            return _number(field.path, one, default)
    return _text_or_list(field, alternatives)


def recipe_page() -> str:
    """Return the page."""
    schema = recipe_schema()
    lines = [
        "# Recipe fields",
        "",
        "Every field of a recipe, generated from the schema that `hlat check` uses; `hlat schema` prints it for",
        "editors. A recipe is a YAML file of sections; a field on the command line is an override:",
        "`hlat train mine.yaml training.steps=100`.",
        "Only `data.path` (or `data.sources`), a model and a length have to be given.",
        "",
    ]
    for field in fields(schema):
        depth = field.path.count(".")
        head = "##" if depth == 0 else "###"
        anchor = re.sub(r"[^a-z0-9_]+", "-", f"{field.path}-{field.kind}".lower()).strip("-")
        chosen = f" ({_parent(field.path)}.kind: {field.kind})" if field.kind else ""
        lines += [f"{head} `{field.path}`{chosen} {{#{anchor}}}", ""]
        if text := _meaning(field, schema):
            lines += [_escape(text), ""]
        if facts := _facts(field, schema):
            lines += [" · ".join(facts), ""]
    return "\n".join(lines)


def _facts(field: Field, schema: dict[str, Any]) -> list[str]:
    found = [_type(schema, field.node)]
    if is_section(field, schema):
        return [] if found == ["section"] else found
    if unit := _unit(field):
        found.append(f"unit: {unit}")
    default = f"default: `{_value(field.node['default'])}`" if "default" in field.node else "no default"
    if field.path in CHOSEN:
        default = default.replace("default:", "default: chosen by size and device; where the devices are not known")
    found.append(default)
    shown = example(field, schema)
    if shown is not None:
        where = field.path if "[]" not in field.path else field.path.rpartition(".")[2]
        joint = "=" if "[]" not in field.path and isinstance(shown, str | int | float | bool) else ": "
        found.append(f"example: `{where}{joint}{_value(shown)}`")
    theirs = next((name for name, own in HF_NAMES.items() if field.path == f"model.{own}"), None)
    if theirs is not None:
        found.append(f"Hugging Face's name, accepted too: `{theirs}`")
    if field.node.get("resume") == "fixed":
        found.append("fixed: neither a resumed run nor a fork can have another value")
    if field.path.startswith(("optimizer.", "schedule.")) or field.node.get("resume") == "fork":
        found.append("another value after the first step: in a fork (`hlat fork`)")
    return found


def is_section(field: Field, schema: dict[str, Any]) -> bool:
    """Return True if a field holds fields of its own."""
    return any("properties" in one for one in _alternatives(schema, field.node))


def _children(schema: dict[str, Any], node: dict[str, Any], path: str, kind: str) -> Iterator[Field]:
    for one in _alternatives(schema, node):
        inner = kind
        chosen = one.get("properties", {}).get("kind", {})
        if "const" in chosen and len([a for a in _alternatives(schema, node) if "properties" in a]) > 1:
            inner = str(chosen["const"])
        for name, child in one.get("properties", {}).items():
            field = Field(f"{path}.{name}" if path else name, child, inner)
            yield field
            yield from _children(schema, child, field.path, "")
        if "items" in one:
            yield from _children(schema, one["items"], f"{path}[]", "")
        if isinstance(one.get("additionalProperties"), dict):
            yield from _children(schema, one["additionalProperties"], f"{path}.NAME", "")


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a node without references: itself, or what it may be."""
    if "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return [{**one, **rest} for one in _alternatives(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])]
    several = next((node[key] for key in ("anyOf", "oneOf", "allOf") if key in node), None)
    return [node] if several is None else [one for each in several for one in _alternatives(schema, each)]


def _type(schema: dict[str, Any], node: dict[str, Any]) -> str:
    names = []
    for one in _alternatives(schema, node):
        if "properties" in one:
            name = "section"
        elif "enum" in one:
            name = "one of " + ", ".join(f"`{value}`" for value in one["enum"])
        elif "const" in one:
            name = f"`{one['const']}`"
        else:
            name = {"string": "text", "integer": "whole number", "boolean": "true or false", "null": "null"}.get(
                one.get("type", ""), one.get("type", "any value")
            )
            name = {"array": "list", "object": "mapping"}.get(name, name) + _bounds(one)
        names.append(name)
    return " or ".join(dict.fromkeys(names))


def _bounds(node: dict[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    found = [f"{sign} {node[key]}" for key, sign in signs.items() if key in node]
    return f" ({', '.join(found)})" if found else ""


def _unit(field: Field) -> str:
    name = field.path.rpartition(".")[2].removesuffix("[]")
    if not any(one in str(field.node) for one in ("'integer'", "'number'")):
        return ""
    fits = [end for end in UNITS if name == end or name.endswith(f"_{end}")]
    return UNITS[max(fits, key=len)] if fits else ""


def _meaning(field: Field, schema: dict[str, Any]) -> str:
    own = str(field.node.get("description", ""))
    return own or next(
        (str(one["description"]) for one in _alternatives(schema, field.node) if "description" in one), ""
    )


def _number(name: str, node: dict[str, Any], default: Any) -> float | int | None:
    """Twice the default, or half of it, or a usual number for such a name: the first that the schema accepts."""
    wanted = [] if default is None or isinstance(default, bool) else [default * 2, default / 2, default]
    wanted += [number for end, number in _BY_END.items() if name.endswith(end)] + [1, 0.5]
    whole = node["type"] == "integer"
    for number in wanted:
        if whole and number != int(number):
            continue
        value = int(number) if whole else number
        inclusive = node.get("minimum", value) <= value <= node.get("maximum", value)
        exclusive = node.get("exclusiveMinimum", value - 1) < value < node.get("exclusiveMaximum", value + 1)
        if inclusive and exclusive and value != default:
            return value
    return default


def _text_or_list(field: Field, alternatives: list[dict[str, Any]]) -> Any:
    name = field.path.rpartition(".")[2].removesuffix("[]")
    default = field.node.get("default")
    if any("properties" in one for one in alternatives):
        return None
    if any(one.get("type") == "string" for one in alternatives):
        return default or name.replace("_", "-")
    return default


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _escape(text: str) -> str:
    """Return the text of a docstring for Markdown: names in angle brackets and asterisks are no markup."""
    parts = text.replace("``", "`").split("`")  # code is between them
    plain = [
        part.replace("<", "&lt;").replace("*", "\\*") if place % 2 == 0 else part for place, part in enumerate(parts)
    ]
    return "`".join(plain)
