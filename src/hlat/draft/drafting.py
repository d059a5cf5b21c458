"""Draft a recipe: numbers for a corpus, a machine and a time, as YAML with a comment at each number.

    corpus, machine, hours, model or none --> Texts, Machine --choose_sizes--> Sizes
                                          --recipe_text--> text of a recipe --load_recipe--> checked

    FLOP/s x time -> C -> model and tokens of least loss -> at most 4 epochs -> batch and rate for C

Sources: the size for an amount of compute, ``hlat.planner`` (Hoffmann et al. 2022, as fitted by Besiroglu et al.
2024). Up to 4 epochs of the same text are nearly as good as new text: Muennighoff et al. 2023 (arXiv 2305.16264).
Batch, rate, warm-up and checkpoints are what a recipe without them gets too (``hlat.planner.defaults``).
"""

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hlat.config import PRESETS, ModelConfig, load_recipe, load_yaml, model_section
from hlat.data import Tokenizer, load_tokenizer
from hlat.draft.facts import Machine, Texts, look_at_corpus, look_at_machine, reached
from hlat.draft.sources import left_out_line
from hlat.forecast import CHINCHILLA
from hlat.model import count_parameters, flops_per_token
from hlat.planner import (
    LEAST_STEPS,
    compute_batch,
    held_tokens,
    peak_rate,
    save_every,
    warmup_steps,
)
from hlat.runtime.quantities import rounded_text
from hlat.runtime.terminal import escape_name, plural, wrapped


def draft_recipe(
    paths: Sequence[str],
    *,
    name: str,
    hours: float = 1.0,
    column: str | None = None,
    start: str | None = None,
    model: str | None = None,
    device: str = "auto",
) -> str:
    """Draft a recipe for a corpus and this machine; return its text, which ``load_recipe`` has accepted.

    Args:
        paths: the corpus: files, folders or globs.
        name: name of the run.
        hours: time to train.
        column: column or key of the text; None tries the usual names.
        start: model to continue from, as ``model.from`` takes it; None trains a new one.
        model: preset or config.json of a new model; None chooses the size.
        device: as ``run.device`` takes it.

    Raises:
        RecipeError: there is no such model, or hlat does not support it.
        DataError: the corpus or the tokenizer cannot be used.
        LaunchError: there is no such device.
    """
    texts = look_at_corpus(paths, column)
    given, tokenizer = _given_model(paths[0], start, model)
    machine = look_at_machine(device)
    vocab_size = given.vocab_size if given is not None else vocabulary_for(texts.text_bytes)
    epoch = texts.tokens(vocab_size, tokenizer)
    sizes = choose_sizes(texts, epoch, machine, hours, given, trained=start is not None)
    field = "preset" if model in PRESETS else "hf_config"
    line = {"from": start} if start is not None else {} if model is None else {field: model}
    text = recipe_text(name, texts, machine, sizes, line, hours)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        load_recipe(file, world=machine.devices)
    return text


def _given_model(path: str, start: str | None, model: str | None) -> tuple[ModelConfig | None, Tokenizer | None]:
    """The model that is given, and its tokenizer; None for what is to be made."""
    if start is None:
        return (None if model is None else model_section(model)), None
    with tempfile.TemporaryDirectory() as folder:  # resolved as the recipe will be
        file = Path(folder) / "recipe.yaml"
        file.write_text("{data: {sequence_length: 8}, training: {steps: 1}, batch: {global_batch: 1}}")
        found = load_recipe(file, [f"model.from={start}", f"data.path={path}"])
    tokenizer = found.data.tokenizer
    return found.model, None if tokenizer.path is None else load_tokenizer(tokenizer.path, tokenizer.eos_token)


STATE_BYTES = 18
"""Bytes per parameter of weights, gradients and AdamW's state in mixed precision: the 16 of ZeRO (Rajbhandari et al.
2020), with gradients accumulated in fp32."""
MOST_EPOCHS = 4
"""Passes over the same text that help nearly as much as new text."""
_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3
_SEQUENCES = ((3e7, 512), (3e8, 1024), (3e9, 2048))  # parameters below which samples are this long; then 4096
_VOCABULARIES = ((2e7, 4096), (2e8, 8192), (2e9, 16384))  # bytes of text below which a vocabulary is trained this large
_LARGEST_VOCABULARY = 32768
_ROUNDS = 4  # the rate depends on the size, and the size on what the rate does in the time: each round is closer
_SHAPE = ("vocab_size", "layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "tie_embeddings")


@dataclass(frozen=True)
class Sizes:
    """Numbers of a run: model, tokens, batch and learning rate."""

    model: dict[str, Any]  # fields of the section; empty for a model that is given
    parameters: int
    vocab_size: int
    epoch_tokens: int  # of the corpus, estimated
    tokens: int  # of the training
    sequence_length: int  # tokens per sample
    global_batch: int  # samples per step
    micro_batch: int  # samples at a time on one device
    learning_rate: float  # peak
    seconds: float  # of the training, expected

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.global_batch * self.sequence_length))


def vocabulary_for(text_bytes: int) -> int:
    """Size of the vocabulary to train on so many bytes of text."""
    return next((size for limit, size in _VOCABULARIES if text_bytes < limit), _LARGEST_VOCABULARY)


def choose_sizes(
    texts: Texts, epoch_tokens: int, machine: Machine, hours: float, given: ModelConfig | None, *, trained: bool
) -> Sizes:
    """Choose the numbers of a run for the text, the devices and the hours; None chooses the model too."""
    vocab_size = given.vocab_size if given is not None else vocabulary_for(texts.text_bytes)
    # At most as many as the text can train, and as have their training state in half of the memory of all devices.
    by_text = MOST_EPOCHS * epoch_tokens / _TOKENS_PER_PARAMETER
    by_memory = machine.devices * machine.memory_bytes / 2 / STATE_BYTES
    size = min(by_text, by_memory)
    for _ in range(_ROUNDS):
        best, _ = CHINCHILLA.optimal_size(machine.rate(size) * hours * 3600)
        size = min(best, by_text, by_memory)
    model = given or _nearest_shape(size, vocab_size)
    parameters = count_parameters(model).total
    rate = machine.rate(parameters)
    flops = rate * hours * 3600
    length = next((one for limit, one in _SEQUENCES if parameters < limit), 4096)
    length = min(length, model.max_sequence_length or length)
    per_token = flops_per_token(model, length)
    tokens = int(min(flops / per_token, MOST_EPOCHS * epoch_tokens))
    spent = tokens * per_token
    batch = _batch(spent, tokens, length, machine.devices)
    return Sizes(
        model={} if given is not None else {name: getattr(model, name) for name in _SHAPE},
        parameters=parameters,
        vocab_size=vocab_size,
        epoch_tokens=epoch_tokens,
        tokens=max(tokens, batch * length),
        sequence_length=length,
        global_batch=batch,
        micro_batch=_micro_batch(batch // machine.devices, parameters, length, machine),
        learning_rate=peak_rate(spent, tokens, trained=trained),
        seconds=spent / rate,
    )


def _batch(flops: float, tokens: int, length: int, devices: int) -> int:
    """Samples per step: a multiple of the devices, and small enough for 200 steps."""
    wanted = min(compute_batch(flops), tokens / LEAST_STEPS) / length
    size = devices
    while 2 * size <= wanted:
        size *= 2
    return size


def _micro_batch(most: int, parameters: int, length: int, machine: Machine) -> int:
    """Samples at a time: what a fifth of the memory holds."""
    tokens = held_tokens(machine.memory_bytes, parameters, is_host=machine.is_host)
    size = 1
    while 2 * size <= most and 2 * size * length <= tokens:
        size *= 2
    return size


def _nearest_shape(parameters: float, vocab_size: int) -> ModelConfig:
    # By ratio: twice as large is as far as half.
    return min(_shapes(vocab_size), key=lambda shape: max(shape[0] / parameters, parameters / shape[0]))[1]


@cache
def _shapes(vocab_size: int) -> list[tuple[int, ModelConfig]]:
    """Parameters and shapes of a layer per 64 to 128 of width, heads of 64 or 128, and LLaMA's feed-forward layers."""
    found = []
    for width in (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192):
        head = 64 if width <= 2048 else 128
        heads = width // head
        for layers in {max(2, round(width / ratio)) for ratio in (128, 96, 64)}:
            model = ModelConfig(
                vocab_size=vocab_size,
                layers=layers,
                hidden_size=width,
                intermediate_size=round(width * 8 / 3 / 64) * 64,
                heads=heads,
                kv_heads=heads if heads % 4 else heads // 4,
                tie_embeddings=width <= 1024,
            )
            found.append((count_parameters(model).total, model))
    return found


_PLAIN = re.compile("[A-Za-z_/][A-Za-z0-9._/@-]*")


def recipe_text(name: str, texts: Texts, machine: Machine, sizes: Sizes, model: dict[str, str], hours: float) -> str:
    """Return the text of a recipe file; ``model`` is the line of a given one, as in {"preset": ...}, or empty."""
    gib, share = machine.memory_bytes / 2**30, reached(sizes.parameters, is_host=machine.is_host)
    sections = [
        [
            f"# Drafted by hlat init for {time_text(hours * 3600)} on this machine: "
            f"{machine.devices} x {machine.name}, {gib:.0f} GiB.",
            f"# Expected: {sizes.parameters:,} parameters, {sizes.tokens:,} tokens, {plural(sizes.steps, 'step')} in "
            f"about {time_text(sizes.seconds)}, at {machine.rate(sizes.parameters) / 1e12:.3g} TFLOP/s ({share:.0%} of "
            "the peak, an assumption).",
        ],
        [f"run: {{name: {_quoted(name)}}}"],
        _model_lines(sizes, model),
        _data_lines(texts, sizes, model),
        [
            "batch:",
            f"  global_batch: {sizes.global_batch}  # samples per step; best for this much compute (arXiv 2401.02954)",
            f"  micro_batch: {sizes.micro_batch}  # samples at a time on one device; lower it if memory runs out",
        ],
        *_parallel_lines(machine, sizes),
        [
            "optimizer:",
            f"  lr: {sizes.learning_rate:g}  # peak; {_rate_source(model)}",
        ],
        [f"schedule: {{kind: cosine, warmup_steps: {warmup_steps(sizes.steps)}}}"],
        [
            "training:",
            f"  steps: {sizes.steps}  # {_passes(sizes)}",
        ],
        [f"evaluation: {{every_steps: {max(1, sizes.steps // 10)}, sequences: 64}}"],
        [f"checkpoint: {{every_steps: {_save_every(sizes)}}}  # {_when(sizes)}; Ctrl-C saves too"],
    ]
    return "\n\n".join("\n".join(line for one in lines for line in _fitted(one)) for lines in sections) + "\n"


_COLUMNS = 80  # of a terminal
_COMMENTED = re.compile(r"(?P<indent> *)(?P<setting>.*?) *# (?P<comment>[^\"]*)")  # no value with a # in quotes


def _fitted(line: str) -> list[str]:
    """Put the comment of a line that is too long for a terminal on lines of its own before it."""
    found = _COMMENTED.fullmatch(line) if len(line) > _COLUMNS else None
    if found is None:
        return [line]
    head = f"{found['indent']}# "
    comment = [head + part for part in wrapped(found["comment"], _COLUMNS - len(head))]
    return [*comment, found["indent"] + found["setting"]] if found["setting"] else comment


def _passes(sizes: Sizes) -> str:
    passes = sizes.tokens / sizes.epoch_tokens
    ended = "; more would learn it by heart, so a longer run needs more text" if passes > 0.95 * MOST_EPOCHS else ""
    return f"{passes:.2g} passes over the text{ended}"


def _model_lines(sizes: Sizes, model: dict[str, str]) -> list[str]:
    if model:
        return ["model:", *(f"  {field}: {_quoted(value)}" for field, value in model.items())]
    lines = [f"  {field}: {json.dumps(value)}" for field, value in sizes.model.items()]
    return ["model:  # the size of least loss for this much compute and text (docs/planning.md)", *lines]


def _data_lines(texts: Texts, sizes: Sizes, model: dict[str, str]) -> list[str]:
    *first, last = texts.kinds
    kinds = f"{', '.join(first)} and {last}" if first else last
    lines = [
        f"data:  # {plural(texts.files, f'{kinds} file')}, about {texts.text_bytes / 1e6:,.3g} MB of text and "
        f"{sizes.epoch_tokens:,} tokens (from a sample)",
    ]
    if texts.sources:
        lines += ["  sources:  # mixed by their sizes; weight: N in each of them mixes otherwise"]
        lines += [_source_line(source, texts.text_bytes) for source in texts.sources]
    else:
        lines.append(f"  path: {_quoted(texts.path)}")
    if texts.left_out:
        lines.append(left_out_line([_plain(file) for file in texts.left_out]))
    if texts.column is not None:
        lines.append(f"  text_column: {_quoted(texts.column)}")
    lines.append(f"  sequence_length: {sizes.sequence_length}")
    if "from" not in model:
        lines.append(f"  tokenizer: {{train: bpe, vocab_size: {sizes.vocab_size}}}")
    return [*lines, "  validation: {fraction: 0.01}  # whole documents; the end of a source of few documents"]


def _source_line(source: Texts, whole: int) -> str:
    fields = {"name": source.name, "path": source.path} | ({"text_column": source.column} if source.column else {})
    written = ", ".join(f"{field}: {_quoted(value)}" for field, value in fields.items())
    return f"    - {{{written}}}  # {plural(source.files, 'file')}, {source.text_bytes / whole:.1%} of the text"


def _plain(text: str) -> str:
    return escape_name(text).replace("\n", " ")


def _parallel_lines(machine: Machine, sizes: Sizes) -> Sequence[list[str]]:
    if machine.devices == 1:
        return []
    # The rest of the memory is for activations.
    shards = sizes.parameters * STATE_BYTES > machine.memory_bytes / 2
    why = "weights, gradients and optimizer state are divided" if shards else "the optimizer state is divided"
    head = (
        "parallel:  # hlat plan THIS_FILE --cluster INSTANCE:1 --fragment layout.yaml searches for the fastest layout"
    )
    return [[head, f"  zero: {3 if shards else 1}  # {why} among {plural(machine.devices, 'device')}"]]


def _rate_source(model: dict[str, str]) -> str:
    usual = "by compute and tokens (arXiv 2401.02954, 2503.04715), at most 3e-3"
    return f"a tenth of the usual ({usual}), since the model is trained already" if "from" in model else usual


def _save_every(sizes: Sizes) -> int:
    return save_every(sizes.steps, max(sizes.seconds, 1.0) / sizes.steps)


def _when(sizes: Sizes) -> str:
    return "about every ten minutes" if _save_every(sizes) < sizes.steps else "at the end, within ten minutes"


def time_text(seconds: float) -> str:
    """Write a duration in the largest unit of which it has at least 1.5, with two digits."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{rounded_text(seconds / length, 2)} {unit}"
    return f"{rounded_text(seconds, 2)} seconds"


def _quoted(text: str) -> str:
    # JSON's quotes are YAML's, which takes some characters only as escapes.
    plain = _PLAIN.fullmatch(text) and load_yaml(text) == text  # not "true"
    return text if plain else escape_name(json.dumps(text, ensure_ascii=False))
