"""Rules of the data section: sources, their weights, and phases. See ``recipe_rules.py`` for rules in general."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from hlat.config.errors import Problem
from hlat.config.rules.rule_context import Rule, Values, batches

LONGEST_PERIOD = 100_000
"""Longest period of the mixture in samples: the order of sources repeats after it, and one period is kept in memory."""


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Smallest integers in the proportions of the weights as written in decimal; not all may be zero."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    numbers = [int(fraction * scale) for fraction in exact]
    divisor = gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _wrong(path: str, value: Any, reason: str, remedy: str = "") -> Problem:
    return Problem(path, reason, remedy, value, True)


def _corpus(v: Values) -> Iterator[Problem]:
    path, sources = v("data.path"), v("data.sources")
    if path is None and not sources:
        remedy = "Give data.path=FILE_OR_FOLDER, or data.sources."
        yield _wrong("data.path", path, "the recipe names no text.", remedy)
    if path is not None and sources:
        yield _wrong("data.path", path, "the recipe gives both path and sources.", "Keep one of them.")


def _names(v: Values) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, source in enumerate(v("data.sources")):
        if source.label in seen:
            reason = f"source {seen[source.label]} is called so too."
            yield _wrong(f"data.sources.{index}.name", source.label, reason, "Give each a name of its own.")
        seen.setdefault(source.label, index)


def _columns(v: Values) -> Iterator[Problem]:
    sources, default = v("data.sources"), v("data.tokens_column")
    for index, source in enumerate(sources):
        if source.text_column is not None and source.tokens_column is not None:
            reason = f"the source gives text_column ({source.text_column}) too, and a document is read from one column."
            yield _wrong(f"data.sources.{index}.tokens_column", source.tokens_column, reason, "Keep one of them.")
    own = [source.tokens_column for source in sources]
    inherit = [source for source in sources if source.text_column is None and source.tokens_column is None]
    if inherit or v("data.path") is not None or v("data.validation.path") is not None:
        own.append(default)
    names = [name for name in own if name is not None]
    if names and v("data.tokenizer.path") is None:
        reason = f"{names[0]} holds token ids, which mean nothing without the tokenizer that made them."
        remedy = "Give that tokenizer. None can be trained on ids; for that, give the text (text_column)."
        yield _wrong("data.tokenizer.path", None, reason, remedy)


def _weights(v: Values) -> Iterator[Problem]:
    sources, phases = v("data.sources"), v("data.phases")
    given = [index for index, source in enumerate(sources) if source.weight is not None]
    for index in given if phases else []:
        reason = "the weights are those of data.phases."
        yield _wrong(f"data.sources.{index}.weight", sources[index].weight, reason, "Keep one of them.")
    if given and not phases:
        for index, source in enumerate(sources):
            if source.weight is None:
                reason = f"source {given[0]} has a weight, this one ({source.label}) has none."
                yield _wrong(f"data.sources.{index}.weight", None, reason, "Give all of them one, or none.")
        if len(given) == len(sources):
            yield from _proportions("data.sources", [source.weight for source in sources])
    weighted = bool(given) or bool(phases)
    for index, source in enumerate(sources):
        if weighted and source.repeat != 1:
            reason = "how often a source is seen follows from the weights."
            yield _wrong(f"data.sources.{index}.repeat", source.repeat, reason, "Remove it, or the weights.")
        if not weighted and source.max_epochs is not None:
            reason = "without weights all sources are seen equally often."
            yield _wrong(f"data.sources.{index}.max_epochs", source.max_epochs, reason, "Remove it, or give weights.")


def _phases(v: Values) -> Iterator[Problem]:
    phases, names = v("data.phases"), [source.label for source in v("data.sources")]
    if phases and not names:
        yield _wrong("data.phases", None, "phases weigh sources, and there are none.", "Name them in data.sources.")
        return
    before = 0.0
    for index, phase in enumerate(phases):
        here = f"data.phases.{index}"
        for name in phase.weights:
            if name not in names:
                remedy = f"The sources are called {', '.join(names)}."
                yield _wrong(f"{here}.weights.{name}", phase.weights[name], "no source has this name.", remedy)
        yield from _proportions(f"{here}.weights", [phase.weights.get(name, 0.0) for name in names])
        if phase.until_tokens is None and index < len(phases) - 1:
            yield _wrong(f"{here}.until_tokens", None, "other phases follow, so this one has to end.")
        elif phase.until_tokens is not None and phase.until_tokens <= before:
            reason = f"the phase begins at {before:,.0f} tokens."
            yield _wrong(f"{here}.until_tokens", phase.until_tokens, reason, "Count from the start of the run.")
        before = max(before, phase.until_tokens or 0.0)


def _last_phase(v: Values) -> Iterator[Problem]:
    phases, steps, tokens = v("data.phases"), v("training.steps"), v("training.tokens")
    schedule, length = batches(v), v("data.sequence_length")
    total = schedule.first_of(steps if steps is not None else schedule.count(-(-(tokens or 0) // length))) * length
    if phases and phases[-1].until_tokens is not None and phases[-1].until_tokens < total:
        path = f"data.phases.{len(phases) - 1}.until_tokens"
        reason = f"the run goes on to {total:,} tokens, without weights."
        yield _wrong(path, phases[-1].until_tokens, reason, "Set it to null in the last phase.")


def _proportions(path: str, weights: list[float]) -> Iterator[Problem]:
    if not any(weights):
        yield Problem(path, "all weights are zero.", "Give at least one source a share.")
        return
    period = sum(whole_weights(weights))
    if period > LONGEST_PERIOD:
        reason = (
            f"shares in these proportions come out even only after {period:,} samples, the limit is {LONGEST_PERIOD:,}."
        )
        yield _wrong(path, None, reason, "Round the weights to fewer digits, 35.47 for one.")


def _online(v: Values) -> Iterator[Problem]:
    if v("data.mode") != "online":
        return
    if v("data.duplicates") == "drop":
        reason = "which document is a copy is only known when all have been read."
        yield _wrong("data.duplicates", "drop", reason, "Use data.mode=prepared, or keep them.")
    if v("data.validation.path") is None and v("data.validation.fraction") and v("data.validation.by") == "tail":
        reason = "where the tail of a source begins is only known when all of it has been read."
        yield _wrong("data.validation.by", "tail", reason, "Use document, or data.validation.path.")
    for index, source in enumerate(v("data.sources")):
        for name in ("max_tokens", "max_epochs"):
            if getattr(source, name) is not None:
                reason = "how many tokens a source has is only known when all of it has been tokenized."
                remedy = "Use data.mode=prepared, or name fewer of its files."
                yield _wrong(f"data.sources.{index}.{name}", getattr(source, name), reason, remedy)


DATA_RULES: tuple[Rule, ...] = (_corpus, _names, _columns, _weights, _phases, _last_phase, _online)
