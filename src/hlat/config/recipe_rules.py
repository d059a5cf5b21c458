"""Rules between fields of a recipe. Each yields problems: field, reason, and the nearest values that would work.

    Values --MODEL_RULES, DATA_RULES, step, schedule, faults, ..., LAYOUT_RULES--> problems of all rules

The rules of the data section (sources, their weights, and phases) come first. A rule reads the recipe through
``Values``, where an invalid field is unavailable: then the rule is skipped, because its report would only repeat that
error.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from hlat.config.errors import Problem
from hlat.config.layout_checks import Rule, Unavailable, Values, batches, divisors, steps_of
from hlat.config.layout_rules import LAYOUT_RULES, ROUNDING_RULES
from hlat.config.sections.model import (
    ARCHITECTURES,
    FULL_ATTENTION,
    OPTIONS,
    SLIDING_ATTENTION,
    ModelConfig,
    RopeConfig,
    architecture_entry,
)
from hlat.config.sections.operation import FaultConfig
from hlat.config.sections.training import ZERO_BUBBLE, AdamWFields, compile_obstacle
from hlat.runtime.storage.object_stores import why_not_writable
from hlat.runtime.terminal import plural

LONGEST_PERIOD = 100_000
"""Longest period of the mixture in samples: the order of sources repeats after it, and one period is kept in memory."""


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Smallest integers in the proportions of the weights as written in decimal; not all may be zero."""
    # From the decimal text: 0.1 as a float is a fraction with a huge denominator.
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    numbers = [int(fraction * scale) for fraction in exact]
    divisor = gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _wrong_value(path: str, value: Any, reason: str, remedy: str = "") -> Problem:
    return Problem(path, reason, remedy, value, True)


def _corpus(v: Values) -> Iterator[Problem]:
    path, sources = v("data.path"), v("data.sources")
    if path is None and not sources:
        remedy = "Give data.path=FILE_OR_FOLDER, or data.sources."
        yield _wrong_value("data.path", path, "the recipe names no text.", remedy)
    if path is not None and sources:
        yield _wrong_value("data.path", path, "the recipe gives both path and sources.", "Keep one of them.")


def _source_names(v: Values) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, source in enumerate(v("data.sources")):
        if source.label in seen:
            reason = f"source {seen[source.label]} is called so too."
            yield _wrong_value(f"data.sources.{index}.name", source.label, reason, "Give each a name of its own.")
        seen.setdefault(source.label, index)


def _source_columns(v: Values) -> Iterator[Problem]:
    sources, default = v("data.sources"), v("data.tokens_column")
    for index, source in enumerate(sources):
        if source.text_column is not None and source.tokens_column is not None:
            reason = f"the source gives text_column ({source.text_column}) too, and a document is read from one column."
            yield _wrong_value(f"data.sources.{index}.tokens_column", source.tokens_column, reason, "Keep one of them.")
    own = [source.tokens_column for source in sources]
    inherit = [source for source in sources if source.text_column is None and source.tokens_column is None]
    if inherit or v("data.path") is not None or v("data.validation.path") is not None:
        own.append(default)
    names = [name for name in own if name is not None]
    if names and v("data.tokenizer.path") is None:
        reason = f"{names[0]} holds token ids, which mean nothing without the tokenizer that made them."
        remedy = "Give that tokenizer. None can be trained on ids; for that, give the text (text_column)."
        yield _wrong_value("data.tokenizer.path", None, reason, remedy)


def _source_weights(v: Values) -> Iterator[Problem]:
    sources, phases = v("data.sources"), v("data.phases")
    given = [index for index, source in enumerate(sources) if source.weight is not None]
    for index in given if phases else []:
        reason = "the weights are those of data.phases."
        yield _wrong_value(f"data.sources.{index}.weight", sources[index].weight, reason, "Keep one of them.")
    if given and not phases:
        for index, source in enumerate(sources):
            if source.weight is None:
                reason = f"source {given[0]} has a weight, this one ({source.label}) has none."
                yield _wrong_value(f"data.sources.{index}.weight", None, reason, "Give all of them one, or none.")
        if len(given) == len(sources):
            yield from _proportions("data.sources", [source.weight for source in sources])
    weighted = bool(given) or bool(phases)
    for index, source in enumerate(sources):
        if weighted and source.repeat != 1:
            reason = "how often a source is seen follows from the weights."
            yield _wrong_value(f"data.sources.{index}.repeat", source.repeat, reason, "Remove it, or the weights.")
        if not weighted and source.max_epochs is not None:
            reason = "without weights all sources are seen equally often."
            yield _wrong_value(
                f"data.sources.{index}.max_epochs", source.max_epochs, reason, "Remove it, or give weights."
            )


def _phases(v: Values) -> Iterator[Problem]:
    phases, names = v("data.phases"), [source.label for source in v("data.sources")]
    if phases and not names:
        yield _wrong_value(
            "data.phases", None, "phases weigh sources, and there are none.", "Name them in data.sources."
        )
        return
    before = 0.0
    for index, phase in enumerate(phases):
        here = f"data.phases.{index}"
        for name in phase.weights:
            if name not in names:
                remedy = f"The sources are called {', '.join(names)}."
                yield _wrong_value(f"{here}.weights.{name}", phase.weights[name], "no source has this name.", remedy)
        yield from _proportions(f"{here}.weights", [phase.weights.get(name, 0.0) for name in names])
        if phase.until_tokens is None and index < len(phases) - 1:
            yield _wrong_value(f"{here}.until_tokens", None, "other phases follow, so this one has to end.")
        elif phase.until_tokens is not None and phase.until_tokens <= before:
            reason = f"the phase begins at {before:,.0f} tokens."
            yield _wrong_value(f"{here}.until_tokens", phase.until_tokens, reason, "Count from the start of the run.")
        before = max(before, phase.until_tokens or 0.0)


def _last_phase(v: Values) -> Iterator[Problem]:
    phases, total = v("data.phases"), batches(v).first_of(steps_of(v)) * v("data.sequence_length")
    if phases and phases[-1].until_tokens is not None and phases[-1].until_tokens < total:
        path = f"data.phases.{len(phases) - 1}.until_tokens"
        reason = f"the run goes on to {total:,} tokens, without weights."
        yield _wrong_value(path, phases[-1].until_tokens, reason, "Set it to null in the last phase.")


def _proportions(path: str, weights: list[float]) -> Iterator[Problem]:
    if not any(weights):
        yield Problem(path, "all weights are zero.", "Give at least one source a share.")
        return
    period = sum(whole_weights(weights))
    if period > LONGEST_PERIOD:
        reason = (
            f"shares in these proportions come out even only after {period:,} samples, the limit is {LONGEST_PERIOD:,}."
        )
        yield _wrong_value(path, None, reason, "Round the weights to fewer digits, 35.47 for one.")


def _online(v: Values) -> Iterator[Problem]:
    if v("data.mode") != "online":
        return
    if v("data.duplicates") == "drop":
        reason = "which document is a copy is only known when all have been read."
        yield _wrong_value("data.duplicates", "drop", reason, "Use data.mode=prepared, or keep them.")
    if v("data.validation.path") is None and v("data.validation.fraction") and v("data.validation.by") == "tail":
        reason = "where the tail of a source begins is only known when all of it has been read."
        yield _wrong_value("data.validation.by", "tail", reason, "Use document, or data.validation.path.")
    for index, source in enumerate(v("data.sources")):
        for name in ("max_tokens", "max_epochs"):
            if getattr(source, name) is not None:
                reason = "how many tokens a source has is only known when all of it has been tokenized."
                remedy = "Use data.mode=prepared, or name fewer of its files."
                yield _wrong_value(f"data.sources.{index}.{name}", getattr(source, name), reason, remedy)


DATA_RULES: tuple[Rule, ...] = (_corpus, _source_names, _source_columns, _source_weights, _phases, _last_phase, _online)


_MOST_TOKENS = 1 << 31  # of a step


def _wrong(v: Values, path: str, reason: str, remedy: str = "") -> Problem:
    return Problem(path, reason, remedy, v(path), True)


def _divisors_near(n: int, wanted: int, count: int = 2) -> str:
    nearest = sorted(sorted(divisors(n), key=lambda d: abs(d - wanted))[:count])
    return " or ".join(map(str, nearest))


def _architecture(v: Values) -> Iterator[Problem]:
    name = v("model.architecture")
    family = architecture_entry(name)
    for option, none in OPTIONS.items():
        path = f"model.{option}"
        if option in family.free or path not in v or v(path) == family.fixed.get(option, none):
            continue
        having = [
            other for other, its in ARCHITECTURES.items() if option in its.free or its.fixed.get(option) == v(path)
        ]
        reason = f"models of the architecture {name} {'always have' if option in family.fixed else 'do not have'} it."
        yield _wrong(v, path, reason, f"Remove it, or use model.architecture={' or '.join(having)}.")


def _step_tokens(v: Values) -> Iterator[Problem]:
    # Tokens of a step are counted in 32 bits: some devices have no collectives of 64.
    batch, length = v("batch.global_batch"), v("data.sequence_length")
    if batch * length >= _MOST_TOKENS:
        reason = f"a step would have {batch * length:,} tokens, and at most {_MOST_TOKENS - 1:,} are possible."
        yield _wrong(v, "batch.global_batch", reason, f"Use at most {(_MOST_TOKENS - 1) // length}.")


def _heads(v: Values) -> Iterator[Problem]:
    hidden, heads, head_dim = v("model.hidden_size"), v("model.heads"), v("model.head_dim")
    if head_dim is None and hidden % heads:
        remedy = f"Try {_divisors_near(hidden, heads)} heads, or give head_dim."
        yield _wrong(v, "model.heads", f"hidden_size {hidden} is not a multiple of it.", remedy)
    elif (head_dim or hidden // heads) % 2:
        path = "model.head_dim" if head_dim else "model.heads"
        yield _wrong(v, path, f"RoPE rotates pairs, so a head must be even; it is {head_dim or hidden // heads} wide.")


def _kv_heads(v: Values) -> Iterator[Problem]:
    heads, kv_heads = v("model.heads"), v("model.kv_heads")
    if kv_heads is not None and heads % kv_heads:
        remedy = f"Try {_divisors_near(heads, kv_heads)}."
        yield _wrong(v, "model.kv_heads", f"{heads} query heads cannot be shared out evenly over it.", remedy)


def _layers(v: Values) -> Iterator[Problem]:
    layers, types = v("model.layers"), v("model.layer_types")
    for path in ("model.layer_types", "model.rope_layers"):
        if v(path) is not None and len(v(path)) > layers:
            yield _wrong(v, path, f"has {len(v(path))} entries, and the model {layers} layers.", "Give a pattern.")
    has_window = types is None or SLIDING_ATTENTION in types
    if types is not None and has_window and v("model.sliding_window") is None:
        reason = "is missing, and model.layer_types names layers that have one."
        yield _wrong(v, "model.sliding_window", reason, f"Set it, or use only {FULL_ATTENTION}.")
    if v("model.sliding_window") is not None and not has_window:
        reason = f"model.layer_types gives no layer a window: none is {SLIDING_ATTENTION}."
        yield _wrong(v, "model.sliding_window", reason, "Remove one of the two.")
    elif v("model.local_rope") is not None and v("model.sliding_window") is None:
        reason = "is that of layers with a sliding window, and there are none."
        yield _wrong(v, "model.local_rope", reason, "Remove it, or set model.sliding_window.")


def _rope(v: Values) -> Iterator[Problem]:
    local, head_dim = v("model.local_rope"), v("model.head_dim") or v("model.hidden_size") // v("model.heads")
    name, family = v("model.architecture"), architecture_entry(v("model.architecture"))
    ropes = {"model.rope": RopeConfig(**{field: v(f"model.rope.{field}") for field in RopeConfig.model_fields})}
    for path, rope in (ropes if local is None else ropes | {"model.local_rope": local}).items():
        scaling, share, rotated = rope.scaling, rope.partial_rotary_factor, rope.width(head_dim)
        for field, reason, remedy in scaling.objections(rope.theta, rotated) if scaling is not None else ():
            yield Problem(f"{path}.scaling.{field}", reason, remedy, getattr(scaling, field), True)
        if scaling is not None and scaling.kind not in family.scalings:
            remedy = f"Use {' or '.join(family.scalings) or 'null'}."
            reason = f"transformers has no such scaling for {name}."
            yield Problem(f"{path}.scaling.kind", reason, remedy, scaling.kind, True)
        if share != 1 and (rotated % 2 or not rotated):
            reason = f"RoPE rotates pairs, and this is {rotated} of the {head_dim} elements of a head."
            yield Problem(f"{path}.partial_rotary_factor", reason, f"Try {2 / head_dim}.", share, True)
        if share != 1 and rope is local and "rope.partial_rotary_factor" not in family.free:
            reason = f"models of the architecture {name} do not have it."
            yield Problem(f"{path}.partial_rotary_factor", reason, "Remove it.", share, True)


_NEEDED_BASES = {"none": (), "mup": ("base_hidden_size",), "completep": ("base_hidden_size", "base_layers")}


def _transfer(v: Values) -> Iterator[Problem]:
    section = v("optimizer")
    if not isinstance(section, AdamWFields):
        return
    rule, optional = section.transfer, "base_head_dim" if section.transfer != "none" else ""
    for name in ("base_hidden_size", "base_layers", "base_head_dim"):
        path, base, is_needed = f"optimizer.{name}", getattr(section, name), name in _NEEDED_BASES[rule]
        if is_needed and base is None:
            reason = f"transfer={rule} scales from the model on which the rates were tuned."
            yield Problem(path, reason, f"Give its {name.removeprefix('base_')}.", None, True)
        if base is not None and not is_needed and name != optional:
            users = " or ".join(other for other, names in _NEEDED_BASES.items() if name in names) or "mup or completep"
            remedy = f"Remove it, or use optimizer.transfer={users}."
            yield Problem(path, f"transfer={rule} does not use it.", remedy, base, True)
    yield from _fixed_norms(v, section)


def _fixed_norms(v: Values, section: AdamWFields) -> Iterator[Problem]:
    if not architecture_entry(v("model.architecture")).has_fixed_norms:
        return
    hidden, layers, heads = v("model.hidden_size"), v("model.layers"), v("model.heads")
    width, depth, head = section.growth(hidden, layers, v("model.head_dim") or hidden // heads)
    # Depth is in what a block adds, width in what the head reads, the width of heads in norms of queries and keys.
    if depth != 1 or (width != 1 and v("model.tie_embeddings")) or (head != 1 and v("model.qk_norm")):
        reason = f"norms of {v('model.architecture')} multiply by 1 + weight, and would have to be multiplied."
        yield Problem("optimizer.transfer", reason, "Use none, or another architecture.", section.transfer, True)


def _context(v: Values) -> Iterator[Problem]:
    longest, length = v("model.max_sequence_length"), v("data.sequence_length")
    if longest is not None and length > longest:
        remedy = f"Use at most {longest}, or raise model.max_sequence_length."
        yield _wrong(v, "data.sequence_length", f"the model is declared for {longest} tokens.", remedy)


def _vocabulary(v: Values) -> Iterator[Problem]:
    if v("data.tokenizer.path") is None and v("data.tokenizer.train") == "bpe":
        trained, rows = v("data.tokenizer.vocab_size"), v("model.vocab_size")
        if trained > rows:
            remedy = f"Set model.vocab_size to {trained}, or train a smaller tokenizer."
            yield _wrong(v, "data.tokenizer.vocab_size", f"exceeds the {rows} rows of the model's embedding.", remedy)
        if trained < 257:
            reason = "a byte-level BPE needs 256 bytes and an end-of-text token."
            yield _wrong(v, "data.tokenizer.vocab_size", reason, "Use 257 or more, or data.tokenizer.train=char.")


def _validation(v: Values) -> Iterator[Problem]:
    # 0.01 is the default, which nobody has chosen.
    if v("data.validation.path") is not None and v("data.validation.fraction") not in (0, 0.01):
        reason = "validation has a path of its own, so no share of the corpus is kept aside."
        yield _wrong(v, "data.validation.fraction", reason, "Remove one of them.")


def _ladder(v: Values) -> Iterator[Problem]:
    if v("run.ladder") is not None and v("data.validation.path") is None and not v("data.validation.fraction"):
        reason = "it forecasts the validation loss, and the run has no validation text."
        yield _wrong(v, "run.ladder", reason, "Give data.validation.fraction=0.01, or remove it.")


def _length(v: Values) -> Iterator[Problem]:
    steps, tokens = v("training.steps"), v("training.tokens")
    if steps is None and tokens is None:
        yield _wrong(
            v,
            "training.steps",
            "the recipe does not say how long to train.",
            "Give training.steps or training.tokens.",
        )
    if steps is not None and tokens is not None:
        yield _wrong(v, "training.steps", f"the recipe gives training.tokens ({tokens}) too.", "Keep one of them.")


def _warmup(v: Values) -> Iterator[Problem]:
    steps, warmup, horizon = steps_of(v), v("schedule.warmup_steps"), v("schedule.horizon_steps")
    end = horizon if horizon is not None else steps
    if warmup >= end:
        # 2 %, of the usual 1 to 5.
        few = round(end / 50)
        usual = f"; {few} would be {100 * few / end:.2g} %" if end >= 50 else ""
        remedy = f"Use at most {end - 1}{usual}." if end > 1 else "Use 0."
        yield _wrong(
            v,
            "schedule.warmup_steps",
            f"the schedule ends at step {end}, so the peak is never reached.",
            remedy,
        )


def _wsd(v: Values) -> Iterator[Problem]:
    if v("schedule.kind") != "wsd":
        return
    end, warmup = v("schedule.horizon_steps") or steps_of(v), v("schedule.warmup_steps")
    decay = round(v("schedule.decay_fraction") * end)
    if warmup < end < warmup + decay:
        reason = f"{plural(decay, 'step')} of decay and {warmup} of warm-up do not fit into {end}."
        yield _wrong(v, "schedule.decay_fraction", reason, f"Use at most {(end - warmup) / end:.2f}.")


def _compile(v: Values) -> Iterator[Problem]:
    if v("run.compile") != "blocks":
        return
    schedule = v("parallel.schedule")
    if reason := compile_obstacle(v("parallel.pipeline"), schedule):
        remedy = "Use none or auto, or the schedule 1f1b."
        yield _wrong(v, "run.compile", f"parallel.schedule = {schedule} {reason}.", remedy)


def _memory_budget(v: Values) -> Iterator[Problem]:
    policy, budget = v("memory.activation_checkpointing"), v("memory.budget_gib")
    if policy == "budget" and budget is None:
        reason = "activation_checkpointing=budget needs the GiB that a rank may keep for backward."
        yield _wrong(v, "memory.budget_gib", reason, "Give memory.budget_gib=8, for one.")
    elif policy != "budget" and budget is not None:
        reason = f"activation_checkpointing={policy} keeps what it keeps, whatever the budget."
        yield _wrong(v, "memory.budget_gib", reason, "Remove it, or set memory.activation_checkpointing=budget.")


def _gather_again(v: Values) -> Iterator[Problem]:
    if v("parallel.gather_again") == "always" and v("parallel.tensor") > 1 and not v("parallel.sequence"):
        reason = "without sequence parallelism nothing is gathered: every tensor rank has the complete inputs."
        yield _wrong(v, "parallel.gather_again", reason, "Use auto, or parallel.sequence=true.")
    schedule = v("parallel.schedule")
    if v("parallel.gather_again") == "always" and v("parallel.pipeline") > 1 and schedule in ZERO_BUBBLE:
        reason = f"parallel.schedule = {schedule} would keep them from one half of a backward pass to the other."
        yield _wrong(v, "parallel.gather_again", reason, "Use auto, or the schedule 1f1b.")


def _faults(v: Values) -> Iterator[Problem]:
    for number, fault in enumerate(v("faults")):
        here = f"faults.{number}"
        if "world" in v and fault.rank >= v("world"):
            there = "there is 1 process" if v("world") == 1 else f"there are {v('world')} processes"
            reason = f"{there}, counted from 0."
            yield _wrong_value(f"{here}.rank", fault.rank, reason, f"Use at most {v('world') - 1}.")
        if "world" in v and fault.kind == "deadlock" and v("world") == 1:
            reason = "a process that is alone waits for nobody."
            yield _wrong_value(f"{here}.kind", fault.kind, reason, "Use hang, or several processes.")
        if fault.kind in ("slow", "slow_disk") and fault.seconds == _FOR_EVER:
            reason = "an hour each time is no slowness."
            yield _wrong_value(f"{here}.seconds", fault.seconds, reason, "Give seconds: 0.5.")


def _remote(v: Values) -> Iterator[Problem]:
    url, path = v("checkpoint.remote"), "checkpoint.remote"
    if url is None:
        return
    wanted = "Name a prefix of an object store, s3://bucket/prefix or gs://bucket/prefix."
    if reason := why_not_writable(url):
        yield _wrong(v, path, f"{reason}.", wanted)
    elif not url.partition("://")[2].partition("/")[2].strip("/"):
        yield _wrong(v, path, "a whole bucket; each run needs a prefix of its own.", wanted)


def _export(v: Values) -> Iterator[Problem]:
    export = v("checkpoint.export")
    if export is not None and export.weights == "ema" and v("training.ema") is None:
        reason = "the run has no average of its weights."
        yield Problem("checkpoint.export.weights", reason, "Add training.ema, or set it to model.", "ema", True)


_FOR_EVER = FaultConfig.model_fields["seconds"].default


MODEL_RULES: tuple[Rule, ...] = (_architecture, _heads, _kv_heads, _layers, _rope)
RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *DATA_RULES,
    _step_tokens,
    _transfer,
    _validation,
    _ladder,
    _context,
    _vocabulary,
    _length,
    _warmup,
    _wsd,
    _compile,
    *ROUNDING_RULES,
    _memory_budget,
    _gather_again,
    _faults,
    _remote,
    _export,
    *LAYOUT_RULES,
)


def model_problems(config: ModelConfig) -> list[Problem]:
    """List the problems between fields of a model section that does not come from a recipe file."""
    return broken_rules(
        Values(
            {f"model.{name}": getattr(config, name) for name in ModelConfig.model_fields}
            | {f"model.rope.{name}": value for name, value in config.rope}
        ),
        MODEL_RULES,
    )


def broken_rules(values: Values, rules: Sequence[Rule] = RULES) -> list[Problem]:
    """List the problems that the rules find in the available values."""
    problems: list[Problem] = []
    for rule in rules:
        try:
            problems.extend(rule(values))
        # The field has an error of its own, or another check has failed: this rule would only repeat it.
        except Unavailable:
            continue
    return problems
