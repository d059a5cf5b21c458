"""A plan in words: why this layout, what the next ones lose, and where its traffic goes.

TrainingPlan -> sentences
"""

from hlat.planner.cost import exchanged_bytes
from hlat.planner.problem import PlanRequest
from hlat.planner.search import TIE_TOLERANCE, LayoutPrediction, TrainingPlan, fits, format_number

_GIB = 1 << 30
_WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise operations",
    "gaps": "gaps between kernels",
    "recomputed": "recomputation",
    "host": "waiting for the host",
    "tensor": "tensor-parallel traffic",
    "context": "context-parallel traffic",
    "head": "the head on the last stage",
    "bubble": "the pipeline's bubble",
    "messages": "messages between stages",
    "data": "data-parallel traffic",
    "optimizer": "the optimizer's step",
    "stragglers": "waiting for the slowest device",
}
_WORTH_SAYING = 0.005  # of a step


def explain(plan: TrainingPlan) -> list[str]:
    """Sentences, the most important first."""
    request, chosen = plan.request, plan.chosen
    lines = [f"Chosen: {chosen.candidate}.", _spent(chosen), *_placed(request, chosen)]
    if plan.ranked and plan.ranked[0] is not chosen:
        fastest = plan.ranked[0]
        behind = chosen.step_seconds / fastest.step_seconds - 1
        lines.append(
            f"The fastest predicted, {fastest.candidate}, is ahead by {behind:.1%}, less than the {TIE_TOLERANCE:.0%} that "
            f"predictions can tell apart; the chosen one recomputes less, or is cut into fewer parts."
        )
    lines += [f"Runner-up: {compare(chosen, one)}" for one in plan.alternatives[:3] if one is not plan.ranked[0]]
    return lines


def compare(chosen: LayoutPrediction, other: LayoutPrediction) -> str:
    """What another layout loses and gains against the chosen one."""
    slower = other.step_seconds / chosen.step_seconds - 1
    whole = chosen.step_seconds
    changes = sorted(
        ((other.parts[name] - chosen.parts[name]) / whole, name)
        for name in chosen.parts
        if abs(other.parts[name] - chosen.parts[name]) > _WORTH_SAYING * whole
    )
    lost = [f"{_WORDS[name]} +{share:.1%}" for share, name in reversed(changes) if share > 0]
    won = [f"{_WORDS[name]} {share:.1%}" for share, name in changes if share < 0]
    speed = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster"
    memory = f"{other.peak_memory / _GIB:.1f} GiB against {chosen.peak_memory / _GIB:.1f}"
    why = "; ".join(filter(None, [", ".join(lost[:3]), ", ".join(won[:3])])) or "nothing stands out"
    return f"{other.candidate}: {speed} ({why}), {memory}."


def comparison_with(plan: TrainingPlan, other: LayoutPrediction) -> str:
    """The chosen layout beside one that was named."""
    ahead = other.step_seconds / plan.chosen.step_seconds - 1
    fit = "" if fits(plan.request, other) else f" It does not fit: {other.peak_memory / _GIB:.1f} GiB."
    verdict = (
        f"The chosen layout is predicted {ahead:.1%} faster" if ahead >= 0 else f"It is predicted {-ahead:.1%} faster"
    )
    return f"Against {compare(plan.chosen, other)} {verdict}.{fit}"


def _spent(one: LayoutPrediction) -> str:
    shares = sorted(((seconds / one.step_seconds, name) for name, seconds in one.parts.items()), reverse=True)
    words = ", ".join(f"{_WORDS[name]} {share:.0%}" for share, name in shares if share > 0.01)
    return f"A step takes {format_number(one.step_seconds)} s: {words}."


def _placed(request: PlanRequest, one: LayoutPrediction) -> list[str]:
    """Where each kind of traffic goes."""
    cluster, layout = request.cluster, one.candidate
    fast, slow = cluster.link_rate / 1e9, cluster.network_rate / cluster.devices_per_instance / 1e9
    sent = {axis: f"{size / _GIB:,.1f} GiB per step" for axis, size in exchanged_bytes(request, layout, 0).items()}
    said = []
    if layout.tensor > 1:
        inside = layout.tensor <= cluster.domain
        where = (
            f"on the fast links ({fast:.0f} GB/s per device)" if inside else "beyond the fast links, over the network"
        )
        said.append(
            f"Tensor parallelism, which talks four times per layer, stays {where}: {sent['tensor']} and device."
        )
    if layout.pipeline > 1:
        lie = "lie across instances" if cluster.devices > cluster.devices_per_instance else "share an instance"
        speed = f" ({slow:.1f} GB/s per device)" if cluster.devices > cluster.devices_per_instance else ""
        said.append(
            f"The {layout.pipeline} pipeline stages talk least, a message per pass, and {lie}{speed}: "
            f"{sent['pipeline']} and device."
        )
    if layout.data > 1:
        crosses = layout.data * layout.tensor * layout.context > cluster.domain
        where = f"over the network ({slow:.1f} GB/s per device), beside passes" if crosses else "on the fast links"
        each = layout.zero == 3 or (layout.zero == 2 and layout.pipeline == 1)
        often = "for each micro-batch" if each else "once a step"
        said.append(f"Data parallelism over {layout.data} replicas talks {often}, {where}: {sent['data']} and device.")
    return said
