"""A drafted recipe as YAML, with a comment at each number that says where it comes from."""

import json
import re
from collections.abc import Sequence

from hlat.config import load_yaml
from hlat.draft.machine import REACHED, Machine
from hlat.draft.sizes import MOST_EPOCHS, STATE_BYTES, Sizes
from hlat.draft.texts import Texts
from hlat.runtime.terminal_text import escape_name, plural

_WARMUP, _MOST_WARMUP = 0.02, 2000
_SAVE_SECONDS = 600.0
_PLAIN = re.compile("[A-Za-z_/][A-Za-z0-9._/@-]*")


def recipe_text(name: str, texts: Texts, machine: Machine, sizes: Sizes, model: dict[str, str], hours: float) -> str:
    """Return the text of a recipe file.

    Args:
        name: name of the run.
        texts: the corpus.
        machine: the devices.
        sizes: the numbers.
        model: the line of a model that is given, as in {"preset": ...}; empty for the numbers in ``sizes``.
        hours: the time that was asked for.
    """
    gib = machine.memory_bytes / 2**30
    sections = [
        [
            f"# Drafted by hlat init for {_time(hours * 3600)} on this machine: {machine.devices} x {machine.name}, "
            f"{gib:.0f} GiB.",
            f"# Expected: {sizes.parameters:,} parameters, {sizes.tokens:,} tokens, {plural(sizes.steps, 'step')} in "
            f"about {_time(sizes.seconds)},",
            f"# at {machine.rate / 1e12:.3g} TFLOP/s ({REACHED:.0%} of the peak, an assumption). hlat check reads it, "
            "hlat train runs it.",
        ],
        [f"run: {{name: {_quoted(name)}}}"],
        _model(sizes, model),
        _data(texts, sizes, model),
        [
            "batch:",
            f"  global_batch: {sizes.global_batch}  # samples per step; best for this much compute (arXiv 2401.02954)",
            f"  micro_batch: {sizes.micro_batch}  # samples at a time on one device; lower it if memory runs out",
        ],
        *_parallel(machine, sizes),
        [
            "optimizer:",
            f"  lr: {sizes.learning_rate:g}  # peak; {_rate_source(model)}",
        ],
        [f"schedule: {{kind: cosine, warmup_steps: {_warmup(sizes.steps)}}}"],
        [
            "training:",
            f"  steps: {sizes.steps}  # {sizes.tokens / sizes.epoch_tokens:.2g} passes over the text, of which about "
            f"{MOST_EPOCHS} still help",
        ],
        [f"evaluation: {{every_steps: {max(1, sizes.steps // 10)}, sequences: 64}}"],
        [f"checkpoint: {{every_steps: {_save_every(sizes)}}}  # {_when(sizes)}; Ctrl-C saves too"],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _model(sizes: Sizes, model: dict[str, str]) -> list[str]:
    if model:
        return ["model:", *(f"  {field}: {_quoted(value)}" for field, value in model.items())]
    lines = [f"  {field}: {json.dumps(value)}" for field, value in sizes.model.items()]
    return ["model:  # the size of least loss for this much compute and text (docs/planning.md)", *lines]


def _data(texts: Texts, sizes: Sizes, model: dict[str, str]) -> list[str]:
    kinds = " and ".join(texts.kinds)
    lines = [
        f"data:  # {plural(texts.files, f'{kinds} file')}, about {texts.text_bytes / 1e6:,.3g} MB of text and "
        f"{sizes.epoch_tokens:,} tokens (from a sample)",
        f"  path: {_quoted(texts.path)}",
    ]
    if texts.column is not None:
        lines.append(f"  text_column: {_quoted(texts.column)}")
    lines.append(f"  sequence_length: {sizes.sequence_length}")
    if "from" not in model:
        lines.append(f"  tokenizer: {{train: bpe, vocab_size: {sizes.vocab_size}}}")
    return [*lines, "  validation: {fraction: 0.01, by: document}"]


def _parallel(machine: Machine, sizes: Sizes) -> Sequence[list[str]]:
    """The layout of several devices; one device needs none."""
    if machine.devices == 1:
        return []
    shards = sizes.parameters * STATE_BYTES > machine.memory_bytes / 2
    why = "weights, gradients and optimizer state are divided" if shards else "the optimizer state is divided"
    head = (
        "parallel:  # hlat plan THIS_FILE --cluster INSTANCE:1 --fragment layout.yaml searches for the fastest layout"
    )
    return [[head, f"  zero: {3 if shards else 1}  # {why} among {plural(machine.devices, 'device')}"]]


def _rate_source(model: dict[str, str]) -> str:
    usual = "by compute (arXiv 2401.02954), at most 3e-3"
    return f"a tenth of the usual ({usual}), since the model is trained already" if "from" in model else usual


def _warmup(steps: int) -> int:
    return min(_MOST_WARMUP, round(_WARMUP * steps))


def _save_every(sizes: Sizes) -> int:
    wanted = sizes.steps * _SAVE_SECONDS / max(sizes.seconds, 1.0)
    return max(1, min(sizes.steps, round(wanted)))


def _when(sizes: Sizes) -> str:
    return "about every ten minutes" if _save_every(sizes) < sizes.steps else "at the end, within ten minutes"


def _time(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"


def _quoted(text: str) -> str:
    """A YAML scalar; JSON's quotes are YAML's, which takes some characters only as escapes."""
    plain = _PLAIN.fullmatch(text) and load_yaml(text) == text  # not "true"
    return text if plain else escape_name(json.dumps(text, ensure_ascii=False))
