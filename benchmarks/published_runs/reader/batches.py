"""Batches: sequences per micro-batch and per step, by the convention of the framework and its layout.

    stated micro-batch, accumulation, framework, layout -> sequences of a data-parallel replica per pass

| framework | a stated micro-batch is | with a pipeline |
|---|---|---|
| Megatron, NeMo, NxDT, DeepSpeed, LLM Foundry | of a data-parallel replica, per accumulation step | the same |
| torchtitan, fms-fsdp | the replica's batch per step (accumulation only if stated) | in passes of one sequence |
| XLA (MaxText, Levanter) | of a device; all sequences in one pass, even fractions | as many passes as stages |
"""

import re

from published_runs.reader.frameworks import Framework
from published_runs.reader.reading import Certainty, Reading, UnreadableError
from published_runs.reader.texts import is_unstated, lower, parse_number

_MAX_MICRO_BATCH = 8  # sequences, if the row states none
_ACCUMULATION = re.compile(
    r"(?:grad(?:ient)?[ _-]?acc(?:um(?:ulation)?)?(?:[ _-]?steps)?|accumulation)\s*[=: ]\s*(\d+)"
)
_TOKENS = re.compile(r"(.+?)\s*(?:tokens|tok)\b\.?(?:\s*(?:per|/)\s*(?:step|batch))?")
_SEQUENCES = re.compile(r"(.+?)\s*(?:sequences|seqs?|samples|examples)\b\.?(?:\s*(?:per|/)\s*(?:step|batch))?")


def read_accumulation(notes: str) -> int:
    """Accumulation steps that a row's notes state; 0 if none."""
    match = _ACCUMULATION.search(lower(notes))
    return int(match[1]) if match else 0


def read_sequence(text: str | None) -> Reading[int]:
    """Read the tokens per sequence; k is 1,024, since lengths are powers of two ("8k" is 8,192).

    Raises:
        UnreadableError: not stated, or no whole number.
    """
    value = parse_number(re.sub(r"\s*tok(?:en)?s?$", "", lower(text)), kilo=1024)
    if value < 1 or value != int(value):
        raise UnreadableError(f"not a sequence length: {text!r}")
    return Reading("seq_len", text or "", int(value))


def read_global_batch(
    text: str | None,
    sequence: int,
    stated_micro: float,
    data: int,
    accumulation: int,
    framework: Framework,
    devices: int,
) -> Reading[int]:
    """Read the sequences per step, given in sequences or in tokens; else from the batch of a replica or device.

    Raises:
        UnreadableError: not stated, and it does not follow from other columns.
    """
    if not is_unstated(text) and lower(text) not in ("0", "0.0"):
        folded = lower(text)
        tokens, sequences = _TOKENS.fullmatch(folded), _SEQUENCES.fullmatch(folded)
        match = tokens or sequences
        value = parse_number(match[1] if match else folded) / (sequence if tokens else 1)
        if tokens:
            return Reading("global_batch", text or "", max(1, round(value)), "implied", "tokens over sequence length")
        if value != int(value) or value < 1:
            raise UnreadableError(f"not a number of sequences: {text!r}")
        return Reading("global_batch", text or "", int(value))
    per = devices if framework.passes == "accelerator" else data
    known = accumulation or framework.passes != "replica"
    if stated_micro and known:
        total = round(stated_micro * per * max(1, accumulation))
        return Reading("global_batch", text or "", max(1, total), "implied", "batch of a replica times replicas")
    raise UnreadableError("not stated: global_batch")


def read_micro_batch(
    text: str | None, framework: Framework, pipeline: int, sequences: float, accumulation: int
) -> Reading[float]:
    """Read the sequences per micro-batch of a data-parallel replica.

    Args:
        text: micro-batch column.
        framework: its convention.
        pipeline: pipeline stages.
        sequences: sequences of a replica per step.
        accumulation: stated accumulation steps; 0 if none.

    Raises:
        UnreadableError: the text is no number.
    """
    stated = 0.0 if is_unstated(text) else parse_number(text or "")
    if stated > sequences * (1 + 1e-6) and framework.passes == "replica":
        raise UnreadableError(f"micro-batch {stated:g} larger than the {sequences:g} sequences of a replica")
    value, sure, reason, spread = _CONVENTIONS[framework.passes](framework, stated, pipeline, sequences, accumulation)
    return Reading("micro_batch", text or "", value, sure, reason, spread)


_Passes = tuple[float, Certainty, str, float]


def _accelerator(framework: Framework, stated: float, pipeline: int, sequences: float, accumulation: int) -> _Passes:
    """XLA: the column counts a device's sequences, and a program takes all of them in one pass."""
    if pipeline > 1:
        return sequences / pipeline, "implied", f"{framework.name}: as many micro-batches as pipeline stages", 0.03
    local = sequences / max(1, accumulation)
    return local, "implied", f"{framework.name}: all sequences of a device in one pass", 0.0


def _one(framework: Framework, stated: float, pipeline: int, sequences: float, accumulation: int) -> _Passes:
    """The replica's batch in one pass, or through a pipeline sequence by sequence."""
    local = sequences / max(1, accumulation)
    whole = not stated or abs(stated - local) < 1e-6 * local
    if pipeline > 1 and whole:
        return 1.0, "implied", f"{framework.name}: a local batch goes through a pipeline sequence by sequence", 0.03
    if not stated:
        return local, "implied", f"{framework.name}: one pass per step", 0.0
    return stated, "stated", "", 0.0


def _replica(framework: Framework, stated: float, pipeline: int, sequences: float, accumulation: int) -> _Passes:
    """The micro-batch of a data-parallel replica, as stated; else from its accumulation, else assumed."""
    if stated:
        return stated, "stated", "", 0.0
    if accumulation:
        return sequences / accumulation, "implied", "batch over accumulation steps", 0.0
    usual = micro_batches_assumed(pipeline, sequences)[0]
    return float(usual), "assumed", f"micro-batch {usual}", 0.05


def micro_batches_assumed(pipeline: int, sequences: float) -> list[int]:
    """Micro-batches that a run without a stated one may have had, the likeliest first.

    Pipelines need many micro-batches. Without one, only memory limits the micro-batch.

    Args:
        pipeline: pipeline stages.
        sequences: sequences of a replica per step.
    """
    complete = max(1, int(sequences))
    divisors = [count for count in range(_MAX_MICRO_BATCH, 0, -1) if complete % count == 0]
    return [1] if pipeline > 1 else divisors


_CONVENTIONS = {"accelerator": _accelerator, "one": _one, "replica": _replica}
