"""Steps of many micro-batches, rehearsed with a few: without a pipeline, those in the middle are all alike.

recipe --shortened--> a step of 4 micro-batches --rehearsed--> RankReport --extended--> that of the complete step

What is left out are repetitions of the third micro-batch: its messages, FLOPs and events are added once for each, and
the memory of its tokens, which are on the device for the complete step. The report equals that of the complete step in
every number, which a test compares. With a pipeline every micro-batch is rehearsed: buffers and order depend on their
number.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hlat.config import Recipe
from hlat.parallel import Layout
from hlat.rehearsal.message_counter import Message
from hlat.rehearsal.rank import RankReport
from hlat.rehearsal.trace import TraceEvent

_KEPT = 4  # the first two and the last differ: gathered parameters, gradients to add to, reductions
_REPEATED = 2  # index of the micro-batch that stands for those left out
_TOKEN = 8  # bytes of a token, of its label, and of its position


def shortened(recipe: Recipe, world: int) -> tuple[Recipe, int]:
    """Return a recipe with fewer micro-batches, and the number of those that are left out.

    Args:
        recipe: the recipe.
        world: number of processes.
    """
    count, layout = recipe.micro_batches(world), Layout.of(recipe.parallel, world)
    if layout.pipeline > 1 or count <= _KEPT:
        return recipe, 0
    batch = recipe.batch.model_copy(update={"global_batch": recipe.batch.global_batch // count * _KEPT})
    return recipe.model_copy(update={"batch": batch}), count - _KEPT


def extended(report: RankReport, left_out: int, recipe: Recipe) -> RankReport:
    """Return the report of the complete step.

    Args:
        report: report of the shortened step.
        left_out: number of micro-batches that were left out.
        recipe: the recipe.
    """
    if not left_out:
        return report
    middle = [event for event in report.trace if event.of_pass is not None and event.of_pass.micro_batch == _REPEATED]
    messages = Counter(report.messages)
    for event in middle:
        if event.is_message:
            messages[Message(event.axis, event.kind, event.size)] += left_out
    added = _token_bytes(recipe, left_out)
    return replace(
        report,
        peak_bytes=report.peak_bytes + sum(added.values()),
        peak={name: size + added.get(name, 0) for name, size in report.peak.items()},
        messages=dict(messages),
        flops=report.flops + left_out * sum(event.flops for event in middle),
        trace=_repeated(report.trace, middle, left_out),
    )


def _token_bytes(recipe: Recipe, count: int) -> dict[str, int]:
    """Bytes of the tokens of some micro-batches, by category: of complete sequences, and of this rank's positions."""
    complete = count * recipe.batch.micro_batch * recipe.data.sequence_length * _TOKEN
    context = recipe.parallel.context
    selected = (2 if context > 1 else 0) + recipe.data.isolate
    return {"other": 2 * complete, "activations": selected * complete // context}


def _repeated(trace: tuple[TraceEvent, ...], middle: Sequence[TraceEvent], left_out: int) -> tuple[TraceEvent, ...]:
    """Repeat the events of the middle micro-batch, and count the last one on."""
    place = max(index for index, event in enumerate(trace) if event is middle[-1]) + 1
    copies = [event for number in range(left_out) for event in _moved(middle, number + 1)]
    return (*trace[:place], *copies, *_moved(trace[place:], left_out))


def _moved(events: Sequence[TraceEvent], by: int) -> list[TraceEvent]:
    """Count the micro-batch of events on."""
    return [
        event
        if event.of_pass is None
        else replace(event, of_pass=event.of_pass._replace(micro_batch=event.of_pass.micro_batch + by))
        for event in events
    ]
