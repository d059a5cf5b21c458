"""Checks of a layout against model, data and batch, and the values of a recipe as checks and rules see them.

    recipe, also one with invalid fields -> Values, by dotted path; an invalid field is Unavailable
    Values -> check -> reasons why it fails; none if it holds
    degrees, model, sequence length, batch, world -> CHECKS -> reasons why the layout is impossible

If the number of processes is not given, a check asks for any number with which the layout would work.
``layout_rules.py`` searches for values that would pass.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hlat.config.errors import Problem
from hlat.config.recipe import BatchSchedule
from hlat.config.sections.training import INTERLEAVED, ZERO_BUBBLE, default_virtual_stages, resolved_virtual_stages
from hlat.runtime.terminal import plural


class Unavailable(Exception):
    """Raised when a rule reads a field that has no valid value, or depends on another check that failed."""


class Values:
    """Validated values by dotted path; reading a missing one raises ``Unavailable``.

    Besides the fields of the recipe there is ``world``, the number of processes, if it was given.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __call__(self, path: str) -> Any:
        try:
            return self._values[path]
        except KeyError:
            raise Unavailable(path) from None

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def having(self, path: str, value: Any) -> "Values":
        return Values({**self._values, path: value})


Rule = Callable[[Values], Iterable[Problem]]
"""Lists problems, each with its remedy."""
Check = Callable[[Values], Iterator[str]]
"""Yields reasons why it fails; each ends with a full stop."""


def batches(v: Values) -> BatchSchedule:
    """Read the boundaries of the global batches from batch and sequence length."""
    return BatchSchedule.of(v("batch.global_batch"), v("batch.ramp"), v("data.sequence_length"))


def steps_of(v: Values) -> int:
    """Optimizer steps of the run; unavailable if the recipe does not say how long to train."""
    steps, tokens = v("training.steps"), v("training.tokens")
    if steps is None and tokens is None:
        raise Unavailable("training.steps")
    return int(steps) if steps is not None else batches(v).count(-(-tokens // v("data.sequence_length")))


def holds(check: Check, v: Values, otherwise: bool = True) -> bool:
    """Return True if a check passes, and ``otherwise`` if it does not apply."""
    try:
        return next(check(v), None) is None
    except Unavailable:
        return otherwise


def divisors(n: int, factor_limit: int = 1 << 16) -> list[int]:
    """Divisors of n > 0, ascending: all up to 2**32; beyond, those up to factor_limit and their cofactors."""
    # Trial division; the limit keeps it fast for a huge number.
    small = [d for d in range(1, min(factor_limit, math.isqrt(n)) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def model_ranks(v: Values) -> int:
    """Processes that work on the same sequences."""
    return int(v("parallel.tensor") * v("parallel.pipeline") * v("parallel.context"))


def data_degree(v: Values) -> int:
    """The data-parallel degree; unavailable without a world, or where the world is not a multiple of the model."""
    degree, rest = divmod(v("world"), model_ranks(v))
    if rest or degree < 1:
        raise Unavailable("world")
    return int(degree)


def stages_per_rank(v: Values) -> int:
    """Stages that one pipeline rank runs."""
    return resolved_virtual_stages(v("parallel.pipeline"), v("parallel.schedule"), v("parallel.virtual_stages"))


def micro_batch_counts(v: Values) -> list[int]:
    """Possible numbers of micro-batches per step of one data-parallel rank: a single one if the world size is given."""
    whole, micro = v("batch.global_batch"), v("batch.micro_batch")
    degree = data_degree(v) if "world" in v else 1
    if whole % (micro * degree):
        raise Unavailable("batch.micro_batch")
    count = whole // (micro * degree)
    # Without a world any data-parallel degree is possible that divides the micro-batches.
    return [count] if "world" in v else divisors(count)


def tensor_degree(v: Values) -> Iterator[str]:
    """Heads, feed-forward columns and vocabulary divide over the tensor group."""
    tensor, kv_heads = v("parallel.tensor"), v("model.kv_heads") or v("model.heads")
    sizes = [(name, v(f"model.{name}")) for name in ("heads", "intermediate_size")]
    uneven = [f"model.{name} {size}" for name, size in sizes if size % tensor]
    if uneven:
        yield f"{' and '.join(uneven)} cannot be shared out evenly over it."
    # With fewer key heads than ranks, each is copied to as many ranks.
    if kv_heads % tensor and tensor % kv_heads:
        yield f"model.kv_heads {kv_heads} can neither be shared out nor copied evenly over it."
    if tensor > v("model.vocab_size"):
        yield f"model.vocab_size {v('model.vocab_size')} leaves some of these ranks without a row."


def sequence_shards(v: Values) -> Iterator[str]:
    """Sequence parallelism divides a context rank's tokens over the tensor group."""
    length, context, tensor = v("data.sequence_length"), v("parallel.context"), v("parallel.tensor")
    # A length that cannot be cut over context ranks is reported by context_chunks.
    if tensor == 1 or not v("parallel.sequence") or length % context:
        return
    if length // context % tensor:
        of = f"sequence_length {length}" + (f" / context {context}" if context > 1 else "")
        yield f"sequence parallelism shards sequences over it, and {of} is not a multiple of it."


def context_chunks(v: Values) -> Iterator[str]:
    """Context parallelism cuts a sequence into 2 * context chunks."""
    length, context = v("data.sequence_length"), v("parallel.context")
    if context > 1 and length % (2 * context):
        yield f"each sequence is cut into 2 x {context} chunks, and sequence_length {length} is not a multiple of that."


def virtual_stages(v: Values) -> Iterator[str]:
    """Each schedule has its own number of stages per rank."""
    pipeline, schedule, count = v("parallel.pipeline"), v("parallel.schedule"), v("parallel.virtual_stages")
    if count is None:
        return
    if pipeline == 1:
        if count > 1:
            yield "there is no pipeline whose ranks could have several stages (parallel.pipeline is 1)."
    elif schedule in INTERLEAVED:
        if count < 2:
            yield f"the schedule {schedule} interleaves at least 2 stages per rank."
    elif count != default_virtual_stages(schedule):
        yield f"the schedule {schedule} has exactly {default_virtual_stages(schedule)} per rank."


def pipeline_layers(v: Values) -> Iterator[str]:
    """A stage has at least one layer."""
    pipeline, each, layers = v("parallel.pipeline"), stages_per_rank(v), v("model.layers")
    if pipeline * each > layers:
        stages = f"{pipeline} ranks x {each} stages are more than" if each > 1 else "there are only"
        yield f"each stage needs a layer, and {stages} the model's {layers}."


def split(v: Values) -> Iterator[str]:
    """A split by hand names every stage and uses every layer."""
    counts, pipeline, layers = v("parallel.split"), v("parallel.pipeline"), v("model.layers")
    if counts is None:
        return
    if pipeline == 1:
        yield "there is no pipeline to cut the model for (parallel.pipeline is 1)."
        return
    stages = pipeline * stages_per_rank(v)
    if len(counts) != stages:
        yield f"it names {plural(len(counts), 'stage')}, the layout has {stages}."
    if sum(counts) != layers:
        yield f"it adds up to {plural(sum(counts), 'layer')}, the model has {layers}."


def zero_stage(v: Values) -> Iterator[str]:
    """ZeRO stages that a pipeline cannot have."""
    zero, schedule = v("parallel.zero"), v("parallel.schedule")
    if v("parallel.pipeline") == 1:
        return
    if zero == 2:
        yield "a pipeline keeps gradients whole until its last micro-batch, so that 2 would need the memory of 1."
    if zero == 3 and schedule in ZERO_BUBBLE:
        yield f"{schedule} cuts backward in two, and weights would be gathered once more between the halves."


def replicas_of_something(v: Values) -> Iterator[str]:
    """Hybrid sharding replicates shards."""
    if v("parallel.replicas") > 1 and v("parallel.zero") == 0:
        yield "at parallel.zero 0 nothing is sharded, and every data-parallel rank is a replica already."


def world_of_models(v: Values) -> Iterator[str]:
    """Every data-parallel rank is a whole model."""
    world, ranks = v("world"), model_ranks(v)
    degrees = " x ".join(f"{name} {v(f'parallel.{name}')}" for name in ("pipeline", "context", "tensor"))
    if world < ranks:
        yield f"one model alone takes {degrees} = {plural(ranks, 'process')}."
    elif world % ranks:
        yield f"each model takes {degrees} = {ranks} processes, and the number is not a multiple of that."


def replicas_of_data(v: Values) -> Iterator[str]:
    """Replicas have the same number of data-parallel ranks, and are sharded over more than one rank."""
    degree, replicas = data_degree(v), v("parallel.replicas")
    if degree % replicas:
        yield f"the data-parallel degree is {degree}, not a multiple of it."
    elif replicas > 1 and degree // replicas * v("parallel.context") == 1:
        yield "each replica would be a single rank, so that nothing is sharded: that is parallel.zero 0."


def micro_batches(v: Values) -> Iterator[str]:
    """A batch is whole micro-batches."""
    whole, micro = v("batch.global_batch"), v("batch.micro_batch")
    if whole % micro:
        yield f"global_batch {whole} is not a multiple of it."


def data_parallel_batch(v: Values) -> Iterator[str]:
    """Every data-parallel rank has the same number of micro-batches."""
    whole, micro, degree = v("batch.global_batch"), v("batch.micro_batch"), data_degree(v)
    if whole % (micro * degree):
        yield (
            f"{plural(degree, 'data-parallel rank')} (world {v('world')} / {model_ranks(v)}) with micro-batches of "
            f"{micro} {'needs' if degree == 1 else 'need'} a multiple of {micro * degree} as global_batch, and it is "
            f"{whole}."
        )


def full_pipeline(v: Values) -> Iterator[str]:
    """Every schedule but gpipe fills the pipeline: with fewer micro-batches than ranks some would never have work."""
    # Without a world, a single data-parallel rank has most micro-batches.
    pipeline, schedule, most = v("parallel.pipeline"), v("parallel.schedule"), max(micro_batch_counts(v))
    if pipeline > most and schedule != "gpipe":
        degree = f" / data-parallel degree {data_degree(v)}" if "world" in v else ""
        yield (
            f"the schedule {schedule} needs at least so many micro-batches, and a step has {most} "
            f"(global_batch {v('batch.global_batch')} / micro_batch {v('batch.micro_batch')}{degree})."
        )


def fits_rounds(count: int, pipeline: int) -> bool:
    """True if torch's interleaved schedules can cut the micro-batches into equal rounds of about ``pipeline``."""
    # The condition of the interleaved schedules of torch.distributed.pipelining.
    return count % max(1, count // pipeline) == 0


def whole_rounds(v: Values) -> Iterator[str]:
    """The interleaved schedules go in rounds."""
    pipeline, schedule = v("parallel.pipeline"), v("parallel.schedule")
    counts = [count for count in micro_batch_counts(v) if count >= pipeline]
    if pipeline == 1 or schedule not in INTERLEAVED or not counts or any(fits_rounds(n, pipeline) for n in counts):
        return
    most = max(counts)
    rounds = most // pipeline
    yield f"it takes the {most} micro-batches of a step in {rounds} rounds (one per {pipeline}), and they are unequal."


STAGE_CHECKS: dict[Check, str] = {
    micro_batches: "batch.micro_batch",
    data_parallel_batch: "batch.micro_batch",
    full_pipeline: "parallel.pipeline",
    whole_rounds: "parallel.schedule",
}
"""Checks that the batch of every stage of ``batch.ramp`` has to pass too, and the field of their reasons."""


def stage_reasons(check: Check, at_stage: Values) -> list[str]:
    """Return the reasons why a stage's batch fails a check, with the field that they are about."""
    path = STAGE_CHECKS[check]
    return [f"{path} = {at_stage(path)}: {reason}" for reason in check(at_stage)]


def ramp_stages(v: Values) -> Iterator[str]:
    """Each stage's batch fits the layout, as the final batch does."""
    for number, stage in enumerate(v("batch.ramp")):
        at_stage = v.having("batch.global_batch", stage.global_batch)
        for check in STAGE_CHECKS:
            # If the final batch fails too, its own problem says so.
            if holds(check, v) and not holds(check, at_stage):
                yield from (f"batch.ramp.{number}: {reason}" for reason in stage_reasons(check, at_stage))


CHECKS: tuple[Check, ...] = (
    tensor_degree,
    sequence_shards,
    context_chunks,
    virtual_stages,
    pipeline_layers,
    split,
    zero_stage,
    replicas_of_something,
    world_of_models,
    replicas_of_data,
    micro_batches,
    data_parallel_batch,
    full_pipeline,
    whole_rounds,
    ramp_stages,
)
