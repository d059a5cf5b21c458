"""A plan in sentences: what it is, what it assumes, what to expect, and why it is this layout.

TrainingPlan --plan_facts--> (subject, sentence): "price", "220.16 USD per hour, on-demand"
             --plan_words--> lines of a terminal: the facts and, if asked for, the reasons
|-- explain          reasons of the layout, drawbacks of the next best, links that each axis uses
|       '-- message_times: seconds of one message by axis, by the cost model: "0.41 ms (162 GB/s)"
|-- comparison_with  another layout
|-- expectation      median and range of days and cost, and the evidence for it
|-- recipe_sentence  settings of the recipe that the plan would change
|-- network_sentence the choice at a half and a quarter of a network that nobody stated
|-- cost_sentence    cost_parts: USD of steps, idle time, storage and egress, and their total
|-- price_sentence   "220.16 USD per hour, on-demand: aws us-east-1, quoted 2026-11-20"
|-- energy_sentence  "35.6 GWh, 25 to 52 GWh at most: ..."
'-- storage_sentence "80 GB at 64 GB/s: a save is durable after ...; a restart takes ..."
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from hlat.config import CheckpointConfig
from hlat.hardware import GIVEN, HOST_SHARE
from hlat.planner.cost.calibration import load_constants, sources_of_chip
from hlat.planner.cost.comm_time import comm_times
from hlat.planner.cost.goodput import DETECTION_SECONDS, STORE_RATE_LIMIT, STORE_RATE_PER_INSTANCE, storage_rate
from hlat.planner.cost.step_counts import exchanged_bytes
from hlat.planner.expected import energy_words, outlook, two_digits
from hlat.planner.plan import DeterminismCost, TrainingPlan, fits, format_number
from hlat.planner.problem.layouts import Candidate, layout_text
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import rank_weights
from hlat.planner.search import TIE_TOLERANCE, LayoutPrediction, workload_columns
from hlat.precision import MODES
from hlat.runtime.quantities import amount_text, rounded_text
from hlat.runtime.terminal import plural

_GIB, _GB = 1 << 30, 1e9
_DAYS_OF_MONTH = 365.25 / 12


def plan_words(plan: TrainingPlan, explained: bool, other: LayoutPrediction | None) -> Iterator[tuple[str, int]]:
    """Yield the sentences about a plan, each with the indentation of its further lines.

    With ``explained``, they have the reasons of its layout; ``other`` is a layout to compare with.
    """
    request = plan.request
    cluster, steps = request.cluster, plural(request.steps, "step")
    machines = f"{cluster.count:,} instances of {plural(cluster.instance.chips, 'chip')}, " if cluster.count > 1 else ""
    devices = f"{cluster.devices:,} device{'s' if cluster.devices > 1 else ''}"
    yield f"{request.name} on {cluster.name}: {machines}{devices}, {steps}, precision {request.mode}", 2
    for subject, sentence in plan_facts(plan):
        yield f"  {subject:<10} {sentence}", 13
    for line in explain(plan) if explained and not plan.stages else []:
        yield f"  {line}", 4
    if other is not None:
        yield f"  {comparison_with(plan, other)}", 4


def plan_facts(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield what is known and assumed of a plan: subject, sentence."""
    request, chosen, said = plan.request, plan.chosen, plan.assumptions()
    yield "expect", expectation(request, chosen)
    if request.loss:
        yield from request.loss.facts(chosen.cost_usd)
    yield from (("assumed", one) for one in request.assumed)
    if recipe := recipe_sentence(plan):
        yield "recipe", recipe
    if network := network_sentence(plan):
        yield "network", network
    if plan.determinism is not None:
        yield "attention", _determinism_sentence(plan.determinism)
    yield "price", price_sentence(request)
    if cost := cost_sentence(request, chosen):
        yield "cost", cost
    yield "energy", energy_sentence(request, chosen)
    every = "" if plan.stages else f"save every {said['checkpoint_every_steps']:,} steps; "
    yield (
        "failures",
        f"one in {said['mean_hours_between_failures']:.1f} hours; {every}goodput {chosen.goodput:.1%} "
        f"by Daly's formula, {plan.goodput_simulated[0]:.1%} simulated, {plan.goodput_simulated[1]:.1%} in the worst "
        "tenth of runs",
    )
    yield "saves", storage_sentence(request, chosen)
    if not fits(request, chosen):
        need = chosen.peak_memory / _GIB
        yield "memory", f"DOES NOT FIT: {need:.1f} GiB of {said['memory_gib_per_device']} GiB"


def _determinism_sentence(cost: DeterminismCost) -> str:
    planned, other = (
        f"{cost.kernels[value]}, {format_number(cost.seconds[value])} s per step with "
        f"run.deterministic={str(value).lower()}"
        for value in (cost.chosen, not cost.chosen)
    )
    return f"{planned}; {other}"


COMPONENT_NAMES = {
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
            f"{TIE_TOLERANCE:.0%} that decide; the chosen layout is plainer."
        )
    runners_up = [other for other in plan.alternatives[:3] if other is not plan.ranked[0]]
    lines += [f"Runner-up: {compare(chosen, other)}" for other in runners_up]
    return lines


def expectation(request: PlanRequest, chosen: LayoutPrediction) -> str:
    """Median and 80 % interval of the run's duration and cost, and the evidence that they rest on."""
    sources, family, chip = chosen.interval.sources, chosen.interval.family, request.cluster.chip.name
    evidence = "other chips only: no source of this kind is published"
    if sources:
        # The sources of a chip are counted in any precision, those of an interval in one.
        of_chip = min(sources, sources_of_chip(chip))
        known = "in fp8" if request.mode == "fp8" else f"{of_chip or 'none'} of them of {chip}"
        evidence = f"{plural(sources, 'published source')} of {family} chips, {known}"
    ratio = chosen.interval.median
    slower = (
        "" if abs(ratio - 1) < _SAME else f"; in the median, runs take {two_digits(ratio)} times the step of the model"
    )
    return f"{outlook(chosen)}; the ranges are of 4 of 5 runs, by {evidence}{slower}"


_SAME = 0.01  # share below which a median is the model's own step, and a layout as fast as another


def recipe_sentence(plan: TrainingPlan) -> str:
    """Settings of the recipe that the plan would change; empty without any."""
    listed = ", ".join(f"{name} {old} to {new}" for name, (old, new) in plan.changes.items())
    return f"would change in your recipe: {listed}" if listed else ""


def network_sentence(plan: TrainingPlan) -> str:
    """Say that nobody stated the network, and how the choice depends on it; empty where it was stated or is unused."""
    request = plan.request
    if not request.network_is_assumed:
        return ""
    rate = f"{amount_text(request.cluster.network_rate, 'B/s')} of an instance by the catalog (--network states yours)"
    words = []
    for one in plan.at_slower_networks:
        changed = f"{layout_text(one.layout)} is {one.faster:.0%} faster" if one.faster >= _SAME else "the same layout"
        words.append(f"at {'a half' if one.share == 0.5 else 'a quarter'} {changed}, {two_digits(one.days)} days")
    return "; ".join([rate, *words])


def cost_parts(request: PlanRequest, prediction: LayoutPrediction) -> dict[str, float | None] | None:
    """Divide the cost of a run in USD into its parts; None if it is not known, or a part of it is not.

    ``steps`` are instances while steps count, ``idle`` instances during saves, failures and restarts and for the rest
    of a capacity block, ``storage`` the tokens of the run and the kept checkpoints for its days, ``egress`` the last
    checkpoint out of the place. Plans are chosen by the instances alone: the rest is nearly the same for all layouts.
    """
    found, whole, days = request.cluster.price(request.price), prediction.cost_usd, prediction.days
    if found is None or whole is None:
        return None
    price, saved = request.cluster.instance.prices[found[0]], prediction.reliability.saved_bytes / _GB
    steps = prediction.goodput * whole
    paid = whole / days * _days_sold(days) if found[0] == "capacity-block" else whole
    stored = _token_gb(request) + _kept(request) * saved
    storage = None if price.storage is None else price.storage * stored * days / _DAYS_OF_MONTH
    egress = None if price.egress is None else price.egress * saved
    total = paid + (storage or 0.0) + (egress or 0.0)
    return {"steps": steps, "idle": paid - steps, "storage": storage, "egress": egress, "total": total}


def _days_sold(days: float) -> int:
    # Capacity blocks are sold by the day up to 14 days, beyond by the week
    # (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-purchase.html).
    return ceil(days) if days <= 14 else 7 * ceil(days / 7)


def _token_gb(request: PlanRequest) -> float:
    # As hlat data prepare stores them.
    return request.tokens * (2 if request.model.vocab_size <= 1 << 16 else 4) / _GB


def _kept(request: PlanRequest) -> int:
    """Return the number of checkpoints that are kept at the same time."""
    recipe = request.recipe
    return (CheckpointConfig() if recipe is None else recipe.checkpoint).keep_last


def cost_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Say what the cost consists of; empty if it is not known."""
    parts, price = cost_parts(request, prediction), request.cluster.price(request.price)
    if parts is None or price is None:
        return ""
    block = f", rest of {_days_sold(prediction.days)} days" if price[0] == "capacity-block" else ""
    saved = f"{rounded_text(prediction.reliability.saved_bytes / _GB)} GB"
    notes = {
        "steps": "",
        "idle": f" (saves, failures, restarts{block})",
        "storage": f" ({rounded_text(_token_gb(request))} GB of tokens, {_kept(request)} checkpoints of {saved})",
        "egress": " (a checkpoint)",
    }
    usd = {name: value for name, value in parts.items() if value is not None}
    words = [f"{format_number(usd[name], 0)} {name}{note}" for name, note in notes.items() if name in usd]
    lacking = " and ".join(name for name in notes if name not in usd)
    rest = f"; {lacking} not counted: no price is known (--quotes)" if lacking else ""
    return f"{format_number(usd['total'], 0)} USD = {' + '.join(words)}{rest}"


def price_origin(request: PlanRequest) -> str:
    """Seller, place, day and source of a quoted price; empty for the catalog's."""
    price = request.cluster.price(request.price)
    return "" if price is None else request.cluster.instance.prices[price[0]].origin


def price_sentence(request: PlanRequest) -> str:
    """USD per hour of the cluster, the kind of the price, and its origin if it is a quote."""
    price = request.cluster.price(request.price)
    if price is None:
        return "not known"
    says = ": ".join(filter(None, (f"{price[1]:,.2f} USD per hour, {price[0]}", price_origin(request))))
    # Sellers take spot instances away far more often than machines fail.
    if price[0] == "spot" and request.cluster.instance.failures.source != GIVEN:
        says += "; taken away no more often than machines fail, unless --interruptions says how often"
    return says


def compare(chosen: LayoutPrediction, other: LayoutPrediction) -> str:
    """Losses and gains of another layout against the chosen one, in one sentence."""
    slower = other.step_seconds / chosen.step_seconds - 1
    total = chosen.step_seconds
    changes = sorted(
        ((other.components[name] - chosen.components[name]) / total, name)
        for name in chosen.components
        if abs(other.components[name] - chosen.components[name]) > _MIN_REPORTED_SHARE * total
    )
    lost = [f"{COMPONENT_NAMES[name]} +{share:.1%}" for share, name in reversed(changes) if share > 0]
    gained = [f"{COMPONENT_NAMES[name]} {share:.1%}" for share, name in changes if share < 0]
    speed = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster"
    memory = f"{other.peak_memory / _GIB:.1f} GiB against {chosen.peak_memory / _GIB:.1f}"
    why = "; ".join(filter(None, [", ".join(lost[:3]), ", ".join(gained[:3])])) or "no component stands out"
    return f"{other.candidate}: {speed} ({why}), {memory}."


def comparison_with(plan: TrainingPlan, other: LayoutPrediction) -> str:
    """Sentences for another layout: losses, gains, which is faster, and if it fits."""
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
    words = ", ".join(f"{COMPONENT_NAMES[name]} {share:.0%}" for share, name in shares if share > 0.01)
    return f"A step takes {format_number(prediction.step_seconds)} s: {words}."


def _communication_sentences(request: PlanRequest, prediction: LayoutPrediction) -> list[str]:
    """Volume and links of each parallel axis, one sentence each."""
    cluster, layout = request.cluster, prediction.candidate
    # Seconds before anything hides a message, latencies and passages through memory included; rates follow from them
    # and the bytes of the message.
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


@dataclass(frozen=True)
class MessageTime:
    """Duration and bytes of one message of a parallel axis."""

    seconds: float  # of the cost model, before anything hides them
    bytes: float  # of the complete message, of each half of an all-reduce; 0 if not known here

    def __str__(self) -> str:
        time = f"{self.seconds:.2f} s" if self.seconds >= 1 else f"{rounded_text(1000 * self.seconds)} ms"
        # The rate: all of the message over all of its time.
        return f"{time} ({amount_text(self.bytes / self.seconds, 'B/s')})" if self.bytes else time


def message_times(request: PlanRequest, layout: Candidate) -> dict[str, MessageTime]:
    """One message of each kind: tensor, context, stage, gather, reduce, across (fields of ``CommTimes``)."""
    columns = workload_columns(request, [layout])
    times = comm_times(columns, load_constants())
    hidden, weights = float(2 * (columns.tokens * columns.hidden)[0]), float(rank_weights(columns)[0])
    gradients = float(columns.gradient_bytes[0])
    if (
        MODES[request.mode].compute.itemsize != 2
    ):  # the formulas count 16 bits and halve the rates: no bytes to be shown
        hidden = weights = 0.0
    sizes = {
        "tensor": hidden,
        "context": 0.0,
        "stage": hidden / layout.tensor,
        "gather": 2 * weights,
        "reduce": gradients * weights,
        "across": gradients * weights / layout.shards,
    }
    return {name: MessageTime(float(getattr(times, name)[0]), size) for name, size in sizes.items()}


def energy_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Energy of the run, and what it assumes."""
    chip, site = request.cluster.chip, request.site
    if prediction.kwh is None or chip.power is None:
        return f"not known: no power limit of {chip.name} is published"
    building = f"PUE {site.pue:g}" + ("" if site.pue_given else ", Amazon's mean of 2025 (--pue)")
    return (
        f"at most about {energy_words(prediction)}: every chip at its limit of {chip.power.watts:,.0f} W all the time, "
        f"{HOST_SHARE:.0%} more for hosts and network, {building}"
    )


def storage_sentence(request: PlanRequest, prediction: LayoutPrediction) -> str:
    """Duration of a save and of a restart, and what they lose."""
    one, storage = prediction.reliability, request.site.storage
    rate = amount_text(storage_rate(request.cluster, storage), "B/s")
    by_default = (
        f"assumed: {amount_text(STORE_RATE_PER_INSTANCE, 'B/s')} for each instance, at most "
        f"{amount_text(STORE_RATE_LIMIT, 'B/s')} in all (--storage)"
    )
    origin = by_default if storage is None else f"by --storage {storage}"
    return (
        f"{amount_text(one.saved_bytes, 'B')} at {rate}, {origin}: a save is durable after "
        f"{_seconds(one.writing)} and stalls {_seconds(one.stall)}; a restart takes {_seconds(one.restart)} "
        f"({_seconds(DETECTION_SECONDS)} to be noticed, {_seconds(one.start_up)} to start, {_seconds(one.writing)} to "
        f"load); goodput {prediction.goodput:.1%}"
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{rounded_text(value, 2)} s"
