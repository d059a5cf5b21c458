"""Explanation of a plan: reasons for its layout, drawbacks of the next best, links that each axis uses.

TrainingPlan -> sentences
"""

from hlat.planner.cost.comm_bytes import exchanged_bytes
from hlat.planner.problem.request import PlanRequest
from hlat.planner.report.message_times import message_times
from hlat.planner.search.plan import TrainingPlan, fits, format_number
from hlat.planner.search.search import LayoutPrediction
from hlat.planner.search.tie_break import TIE_TOLERANCE
from hlat.runtime.quantities.formatting import rounded_text
from hlat.runtime.terminal_text import plural

_GIB = 1 << 30
_COMPONENT_NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise operations",
    "gaps": "gaps between kernels",
    "recomputed": "recomputation",
    "host": "waiting for the host",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "head": "the LM head on the last stage",
    "bubble": "the pipeline bubble",
    "messages": "messages between stages",
    "data": "data-parallel communication",
    "optimizer": "the optimizer's step",
    "stragglers": "waiting for the slowest device",
}
_MIN_REPORTED_SHARE = 0.005  # of a step


def explain(plan: TrainingPlan) -> list[str]:
    """Explain a plan in sentences, the most important first."""
    request, chosen = plan.request, plan.chosen
    lines = [f"Chosen: {chosen.candidate}.", _step_sentence(chosen), *_communication_sentences(request, chosen)]
    if plan.ranked and plan.ranked[0] is not chosen:
        fastest = plan.ranked[0]
        behind = chosen.step_seconds / fastest.step_seconds - 1
        lines.append(
            f"The fastest predicted layout, {fastest.candidate}, is {behind:.1%} faster, less than the "
            f"{TIE_TOLERANCE:.0%} that decide; the chosen layout recomputes less, or splits the "
            f"model over fewer ranks."
        )
    runners_up = [other for other in plan.alternatives[:3] if other is not plan.ranked[0]]
    lines += [f"Runner-up: {compare(chosen, other)}" for other in runners_up]
    return lines


def expectation(chosen: LayoutPrediction) -> str:
    """The 80 % interval of the run's duration and cost, and the evidence that it rests on."""
    low, high = map(_two_digits, chosen.interval.of(chosen.days))
    money = ""
    if chosen.cost_usd is not None:
        money = " and {} to {} USD".format(*map(_two_digits, chosen.interval.of(chosen.cost_usd)))
    sources, family = chosen.interval.sources, chosen.interval.family
    evidence = f"{plural(sources, 'published source')} of {family} chips" if sources else "other chips only"
    return f"{low} to {high} days{money} in 4 of 5 runs, by {evidence}"


def interval_text(planned: LayoutPrediction, value: float) -> str:
    """The 80 % interval of a predicted duration or cost."""
    return "-".join(map(_two_digits, planned.interval.of(value)))


def _two_digits(value: float) -> str:
    """A number rounded to two significant digits, as 64,000."""
    return f"{value:#.2g}" if 0.1 <= value < 9.95 else rounded_text(value, 2)  # 3.0 rather than 3


def compare(chosen: LayoutPrediction, other: LayoutPrediction) -> str:
    """Losses and gains of another layout against the chosen one, in one sentence."""
    slower = other.step_seconds / chosen.step_seconds - 1
    total = chosen.step_seconds
    changes = sorted(
        ((other.components[name] - chosen.components[name]) / total, name)
        for name in chosen.components
        if abs(other.components[name] - chosen.components[name]) > _MIN_REPORTED_SHARE * total
    )
    lost = [f"{_COMPONENT_NAMES[name]} +{share:.1%}" for share, name in reversed(changes) if share > 0]
    gained = [f"{_COMPONENT_NAMES[name]} {share:.1%}" for share, name in changes if share < 0]
    speed = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster"
    memory = f"{other.peak_memory / _GIB:.1f} GiB against {chosen.peak_memory / _GIB:.1f}"
    why = "; ".join(filter(None, [", ".join(lost[:3]), ", ".join(gained[:3])])) or "no component stands out"
    return f"{other.candidate}: {speed} ({why}), {memory}."


def comparison_with(plan: TrainingPlan, other: LayoutPrediction) -> str:
    """Sentences that compare the chosen layout with another one."""
    ahead = other.step_seconds / plan.chosen.step_seconds - 1
    fit = "" if fits(plan.request, other) else f" It does not fit: {other.peak_memory / _GIB:.1f} GiB."
    conclusion = (
        f"The chosen layout is predicted {ahead:.1%} faster" if ahead >= 0 else f"It is predicted {-ahead:.1%} faster"
    )
    return f"Against {compare(plan.chosen, other)} {conclusion}.{fit}"


def _step_sentence(prediction: LayoutPrediction) -> str:
    """The step time and its components, largest first."""
    shares = sorted(
        ((seconds / prediction.step_seconds, name) for name, seconds in prediction.components.items()), reverse=True
    )
    words = ", ".join(f"{_COMPONENT_NAMES[name]} {share:.0%}" for share, name in shares if share > 0.01)
    return f"A step takes {format_number(prediction.step_seconds)} s: {words}."


def _communication_sentences(request: PlanRequest, prediction: LayoutPrediction) -> list[str]:
    """Volume and links of each parallel axis, one sentence each.

    Seconds are those that the cost model has for a message before anything hides it, latencies and passages through
    memory included; rates follow from them and the bytes of the message.
    """
    cluster, layout = request.cluster, prediction.candidate
    times = message_times(request, layout)
    sent = {axis: f"{size / _GIB:,.1f} GiB per step" for axis, size in exchanged_bytes(request, layout, 0).items()}
    sentences = []
    if layout.tensor > 1:
        inside = layout.tensor <= cluster.domain
        where = "on the fast links" if inside else "over the network, beyond the fast links"
        sentences.append(
            f"Tensor parallelism communicates four times per layer, {where}: {sent['tensor']} and device, "
            f"{times['tensor']} per all-reduce."
        )
    if layout.context > 1:
        sentences.append(
            f"Context parallelism exchanges keys and values in every layer: {sent['context']} and device, "
            f"{times['context']} per exchange forward."
        )
    if layout.pipeline > 1:
        location = "span several instances" if cluster.devices > cluster.devices_per_instance else "share an instance"
        sentences.append(
            f"The {layout.pipeline} pipeline ranks communicate least, one message per pass, and {location}: "
            f"{sent['pipeline']} and device, {times['stage']} per message."
        )
    if layout.data > 1:
        crosses = layout.shards * layout.tensor > cluster.domain
        where = "over the network, overlapped with passes" if crosses else "on the fast links"
        per_micro_batch = layout.zero == 3 or (layout.zero == 2 and layout.pipeline == 1)
        often = "for each micro-batch" if per_micro_batch else "once per step"
        sentences.append(
            f"Data parallelism over {layout.data} replicas communicates {often}, {where}: {sent['data']} and device, "
            f"{times['gather']} for all weights of a device, {times['reduce']} for their gradients."
        )
    if layout.replicas > 1:
        sentences.append(
            f"Weights are sharded over {layout.shards} devices, in {layout.replicas} replicas: only sums of gradients "
            f"go from replica to replica, once per step, {times['across']}."
        )
    return sentences
