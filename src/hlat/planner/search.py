"""Search for the best layouts of a request.

    candidates -> memory of the fullest ranks -> fits? -> step_times of those that do, as columns
               -> finalists -> pipeline simulated, memory counted exactly -> LayoutPrediction -> ranked
    ranked -> break_tie -> plainest: the rule of the choice, which published sweeps are judged by too
    rank_again: the layouts of a search on another network, which changes times but not what fits
    best_layout: the winner alone, for many clusters of one question; fastest first, until enough of them fit

Formulas (planner/cost/step_time.py) rank all candidates. For the few best, the pipeline is simulated event by event and
memory is counted from the shape of every parameter. These results decide.

Of the layouts within 2 % of the fastest the plainest is taken: what it saves is not in the model (schedules in Python,
messages that wait for each other). In 104 published sweeps that chooses as well as the fastest, a wider tie worse
(docs/notebook/planner.md).
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf

import numpy as np

from hlat.model import count_parameters, effective_window, flops_per_token, hidden_share
from hlat.optim import optimizer_spec
from hlat.parallel import matrix_shapes, stage_layers
from hlat.planner.cost.calibration import RatioInterval, shipped_interval
from hlat.planner.cost.goodput import Reliability, predict_reliability
from hlat.planner.cost.program import hlat_profile
from hlat.planner.cost.step_time import STEP_COMPONENTS, StageTimes, StepTimes, Timeline, simulate_pipeline, step_times
from hlat.planner.memory import Estimates, ExactChecks, RankMemory, estimated_ranks, rank_memory, ranks_of_interest
from hlat.planner.problem.devices import request_device
from hlat.planner.problem.layouts import Candidate, candidates
from hlat.planner.problem.request import PlanRequest
from hlat.planner.problem.workload import (
    RECOMPUTE_POLICIES,
    ModelShape,
    OptimizerCost,
    StepLayout,
    Workload,
    WorkloadColumns,
)
from hlat.precision import MODES

USABLE_MEMORY_SHARE = 0.96  # of a device; the rest is reserved for allocations that a plan does not model
_FINALISTS = 12  # layouts that are simulated and counted exactly
_PER_DEGREES = 3  # finalists with the same degrees
_MEMORY_FINALISTS = 6  # more finalists, each needing less memory than every faster layout
_DAY = 86400.0
_PASS_COMPONENTS = ("products", "attention", "pointwise", "gaps", "recomputed", "host", "tensor", "context", "head")
StepAndPasses = tuple[dict[str, float], StageTimes]  # seconds of a step by component, and of its passes by stage
_MAX_SIMULATED_PASSES = 40_000  # longer steps keep the result of the formula


@dataclass(frozen=True)
class LayoutPrediction:
    """Prediction of one layout: step, memory, failures, cost."""

    candidate: Candidate
    step_seconds: float
    components: dict[str, float]  # seconds of a step; they add up to step_seconds
    memory: dict[int, RankMemory]  # of the reported ranks, by pipeline rank
    tokens_per_second: float  # of the whole cluster, without saves and failures
    mfu: float  # model FLOPs utilization: share of the cluster's peak, with causal attention
    reliability: Reliability
    days: float  # with saves and failures
    cost_usd: float | None  # with saves and failures; None if no price is known
    stage_times: StageTimes
    interval: RatioInterval  # 80 % interval of the measured over the predicted step time
    kwh: float | None  # upper estimate; None if no power limit of the chips is published

    @property
    def peak_memory(self) -> float:
        """Bytes on the rank that needs most."""
        return max(rank.total for rank in self.memory.values())

    @property
    def goodput(self) -> float:
        return self.reliability.goodput

    def lasting(self, factor: float) -> "LayoutPrediction":
        """The run with so many times its days, cost and energy."""
        cost, kwh = (None if value is None else factor * value for value in (self.cost_usd, self.kwh))
        return replace(self, days=factor * self.days, cost_usd=cost, kwh=kwh)


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, and statistics of the search."""

    ranked: list[LayoutPrediction]  # the best layouts, fastest first
    tried: int
    fitting: int  # candidates that fit into memory, of those tried
    least_memory: tuple[Candidate, float] | None  # with its bytes; None without candidates
    seconds: float  # duration of the search
    layouts: Sequence[Candidate]  # that fit, all but the doubtful ones that nobody had to count


def search(request: PlanRequest, *, clock: Callable[[], float] = time.perf_counter) -> SearchResult:
    """Predict every candidate layout of the request and rank the best."""
    begin = clock()
    listing = CandidateLayouts(request)
    tried = listing.layouts
    limit = USABLE_MEMORY_SHARE * request.cluster.memory_bytes
    checks = ExactChecks(request, limit, listing.estimates)
    fitting, doubtful = _by_memory(listing, limit, checks)
    order = [index for index in listing.order if index in fitting or index in doubtful]
    # Exact checks are few and cost time: they are spent in the order of step time, while finalists are wanted.
    fits = (one for one in order if one in fitting or checks.fits(tried[one], checks.estimates(tried[one])))
    fastest = finalists(tried, fits)
    sparing = _memory_finalists(listing, [(index, fitting[index]) for index in order if index in fitting], checks)
    ranked = _completed(listing, {**dict.fromkeys(fastest), **dict.fromkeys(sparing)})
    counted = {id(prediction.candidate) for prediction in ranked}
    sure = [one for index, one in enumerate(tried) if index in fitting or id(one) in counted]
    least = _least_memory(listing, checks)
    return SearchResult(ranked, len(tried), len(fitting) + checks.found, least, clock() - begin, sure)


def _by_memory(listing: "CandidateLayouts", limit: float, checks: ExactChecks) -> tuple[dict[int, float], set[int]]:
    """Positions of the layouts that fit by their estimates, with a lower bound of these, and of the doubtful ones."""
    fitting: dict[int, float] = {}
    doubtful: set[int] = set()
    for alike in listing.alike.values():
        least, most = listing.layouts[alike[-1]], listing.layouts[alike[0]]
        floor = checks.estimates(least)
        if checks.may_fit(least, floor):
            # The others are between these two.
            all_fit = max(checks.estimates(most)) <= limit
            for index in alike:
                if all_fit or max(checks.estimates(listing.layouts[index])) <= limit:
                    fitting[index] = max(floor)
                else:
                    doubtful.add(index)
    return fitting, doubtful


def _least_memory(listing: "CandidateLayouts", checks: ExactChecks) -> tuple[Candidate, float] | None:
    """The layout that needs least by its estimate, and its bytes; None without layouts."""
    if not listing.layouts:
        return None
    count = checks.estimates
    smallest = [listing.layouts[alike[-1]] for alike in listing.alike.values()]
    if min(max(count(one)) for one in smallest) > checks.furthest:  # it may be one whose estimates ended early
        count = partial(estimated_ranks, listing.request)
    least, alike = min((max(count(listing.layouts[alike[-1]])), alike) for alike in listing.alike.values())
    return next(one for one in map(listing.layouts.__getitem__, alike) if max(count(one)) == least), least


def rank_again(request: PlanRequest, found: SearchResult) -> list[LayoutPrediction]:
    """Rank the fastest layouts of a search, those that tie, for a request that differs in rates of links only."""
    listing = CandidateLayouts(request, found.layouts)
    known = {id(one.candidate): one.memory for one in found.ranked}  # links do not change it
    return _completed(listing, finalists(listing.layouts, listing.order), _TIED, known)


def predict_layout(request: PlanRequest, candidate: Candidate) -> LayoutPrediction:
    """Predict one layout, even if it does not fit."""
    times = step_times(workload_columns(request, [candidate]))
    return _complete(request, candidate, _step_and_passes(request, candidate, times.row(0)), {})


def _completed(
    listing: "CandidateLayouts",
    indices: Iterable[int],
    within: float = inf,
    known: Mapping[int, dict[int, RankMemory]] | None = None,
) -> list[LayoutPrediction]:
    """Complete predictions of those of some layouts that fit by the exact count, fastest first.

    Those slower than ``within`` times the fastest of them are left out; ``known`` is memory of some, by identity.
    """
    request, layouts = listing.request, listing.layouts
    steps = {index: _step_and_passes(request, layouts[index], listing.times.row(index)) for index in indices}
    limit = USABLE_MEMORY_SHARE * request.cluster.memory_bytes
    found: list[LayoutPrediction] = []
    for index in sorted(steps, key=lambda one: _seconds(steps[one])):
        if found and _seconds(steps[index]) > within * found[0].step_seconds:
            break
        prediction = _complete(request, layouts[index], steps[index], known or {})
        if prediction.peak_memory <= limit:
            found.append(prediction)
    return sorted(found, key=lambda one: (one.step_seconds, one.peak_memory))


def finalists(
    layouts: Sequence[Candidate],
    order: Iterable[int],
    fitting: Callable[[Iterator[int]], Iterable[int]] = lambda wanted: wanted,
) -> list[int]:
    """Indices of the fastest candidates, at most three with the same degrees, so that alternatives differ.

    ``fitting`` yields those that fit of some, the next after it is taken.
    """
    chosen: list[int] = []
    chosen_by_degrees: Counter[tuple[int, ...]] = Counter()

    def degrees(index: int) -> tuple[int, ...]:
        return layouts[index].tensor, layouts[index].pipeline, layouts[index].context

    for index in fitting(one for one in order if chosen_by_degrees[degrees(one)] < _PER_DEGREES):
        chosen_by_degrees[degrees(index)] += 1
        chosen.append(index)
        if len(chosen) == _FINALISTS:
            break
    return chosen


def _memory_finalists(
    listing: "CandidateLayouts", order: Iterable[tuple[int, float]], checks: ExactChecks
) -> list[int]:
    """Indices of some candidates on the Pareto front of time and memory, with the one of least memory.

    ``order`` has a lower bound of the memory of each; where the bound says enough, nothing is estimated.
    """
    front: list[int] = []
    least = inf
    for index, floor in order:
        if floor < least and (peak := max(checks.estimates(listing.layouts[index]))) < least:
            front.append(index)
            least = peak
    stride = max(1, -(-len(front) // _MEMORY_FINALISTS))
    # From the end, so that the one with least memory is always taken.
    return front[::-1][::stride]


def workload_columns(request: PlanRequest, layouts: Sequence[Candidate]) -> WorkloadColumns:
    """Describe a step in each of some layouts, as input of the cost formulas."""
    model, device = request.model, request_device(request)
    shape = ModelShape(
        model.layers,
        model.hidden_size,
        model.heads,
        model.n_kv_heads,
        model.n_head_dim,
        model.intermediate_size,
        model.vocab_size,
        window=effective_window(model, request.sequence),
    )
    optimizer = _optimizer_cost(request)
    # Thousands of layouts share their section, and with it all but two fields.
    index_by_section: dict[tuple[int, int], int] = {}
    rows = [index_by_section.setdefault((id(one.parallel), one.data), len(index_by_section)) for one in layouts]
    firsts = dict(zip(reversed(rows), reversed(layouts), strict=True))
    shared = WorkloadColumns(
        [
            Workload(shape, one.step_layout(request), hlat_profile(request, one), device, optimizer)
            for one in map(firsts.__getitem__, sorted(firsts))
        ]
    )
    return shared.take(
        np.array(rows, dtype=np.intp),
        micro_batch=np.array([one.micro_batch for one in layouts], dtype=np.float64),
        recompute=np.array([RECOMPUTE_POLICIES.index(one.recompute) for one in layouts], dtype=np.float64),
    )


def _optimizer_cost(request: PlanRequest) -> OptimizerCost:
    spec = optimizer_spec(request.optimizer, request.mode)
    shapes = [shape for _, _, shape in matrix_shapes(request.model, 0)]
    item = 0 if spec.matrix_dtype is None else spec.matrix_dtype.itemsize
    # Whole matrices travel twice: to their owners and back.
    return OptimizerCost(
        spec.update_bytes,
        float(sum(spec.matrix_flops(*shape) for shape in shapes)),
        2.0 * item * sum(rows * columns for rows, columns in shapes),
    )


def _complete(
    request: PlanRequest, candidate: Candidate, passes: StepAndPasses, known: Mapping[int, dict[int, RankMemory]]
) -> LayoutPrediction:
    """Add memory, failures and cost to a step; ``known`` memory by identity of the layout."""
    components, stage_times = passes
    step = _seconds(passes)
    memory = known.get(id(candidate)) or {
        rank: rank_memory(request, candidate, rank) for rank in ranks_of_interest(request, candidate)
    }
    speed = request.tokens_per_step / step
    device = request_device(request)
    flops = flops_per_token(request.model, request.sequence, "causal")
    reliability = predict_reliability(request.cluster, _saved_bytes(request), request.site.storage)
    days = (request.tokens / speed + _ramp_delay(request, candidate, speed)) / reliability.goodput / _DAY
    price, watts = request.cluster.price(request.price), request.site.watts(request.cluster)
    return LayoutPrediction(
        candidate=candidate,
        step_seconds=step,
        components=components,
        memory=memory,
        tokens_per_second=speed,
        mfu=speed * flops / (device.peak * request.cluster.devices),
        reliability=reliability,
        days=days,
        cost_usd=None if price is None else days * 24 * price[1],
        kwh=None if watts is None else days * 24 * watts / 1000,
        stage_times=stage_times,
        interval=shipped_interval(device.family, eight_bit=request.mode == "fp8"),
    )


def _ramp_delay(request: PlanRequest, candidate: Candidate, speed: float) -> float:
    """Seconds that the ramp's small steps take longer than as many tokens at the final speed."""
    delay = 0.0
    for count, size in request.batches.in_steps(request.steps)[: len(request.ramp)]:
        at_stage = replace(request, global_batch=size, ramp=())
        delay += count * (step_seconds(at_stage, candidate) - at_stage.tokens_per_step / speed)
    return delay


def step_seconds(request: PlanRequest, candidate: Candidate) -> float:
    """Predict a step of one layout, without memory, failures and cost."""
    times = step_times(workload_columns(request, [candidate]))
    return _seconds(_step_and_passes(request, candidate, times.row(0)))


def _seconds(passes: StepAndPasses) -> float:
    return sum(passes[0].values())


def _step_and_passes(request: PlanRequest, candidate: Candidate, row: dict[str, float]) -> StepAndPasses:
    """Seconds of a step by component, its pipeline simulated, and of the passes of each stage."""
    stage_times = _stage_times(request, candidate, row)
    components = {name: row[name] for name in STEP_COMPONENTS}
    count = candidate.accumulation(request.global_batch)
    if candidate.pipeline > 1 and count * candidate.pipeline * candidate.virtual <= _MAX_SIMULATED_PASSES:
        simulated = timeline(candidate, count, stage_times)
        busy = max(map(simulated.busy, range(candidate.pipeline)))
        # The simulation gives bubble and messages as one number, and uses the actual split of layers over ranks.
        scale = busy / sum(components[name] for name in _PASS_COMPONENTS)
        components |= {name: scale * components[name] for name in _PASS_COMPONENTS}
        components |= {"messages": 0.0, "bubble": simulated.seconds - busy}
    return components, stage_times


def timeline(candidate: Candidate, micro_batches: int, stage_times: StageTimes) -> Timeline:
    """Simulate the pipeline of a layout."""
    return simulate_pipeline(candidate.schedule, candidate.pipeline, micro_batches, stage_times)


def _stage_times(request: PlanRequest, candidate: Candidate, row: dict[str, float]) -> StageTimes:
    """Seconds of a pass by stage, for the actual split of layers."""
    # A third each of the head's time is forward, the gradient of its input and that of its weights. The embedding's is
    # nearly all the gradient of its weights.
    layers = list(map(len, stage_layers(candidate.step_shape(request))))

    def by_stage(name: str, share: float) -> list[float]:
        seconds = [count * row[name] for count in layers]
        seconds[-1] += share * row["head_pass"]
        return seconds

    backward, weight = by_stage("backward", 2 / 3), by_stage("weight", 1 / 3)
    backward[0] += row["embedding_pass"]
    # The first stage sends no gradients: torch runs its backward pass unsplit, as the pass for gradients of weights.
    backward[0] -= layers[0] * row["twice"]
    weight[0] = backward[0]
    return StageTimes(by_stage("forward", 1 / 3), backward, weight, row["message"])


def _saved_bytes(request: PlanRequest) -> float:
    """Bytes of a checkpoint: weights, state of the optimizer and of training components."""
    spec, total = optimizer_spec(request.optimizer, request.mode), count_parameters(request.model).total
    hidden = request.model.layers * hidden_share(request.model, 1)
    state = hidden * spec.state_bytes(True) + (total - hidden) * spec.state_bytes(False)
    components = request.recipe.component_bytes if request.recipe is not None else 0
    return total * float(MODES[request.mode].weights.itemsize + components) + state


TIE_TOLERANCE = 0.02
"""Predicted times that differ by less than this share are a tie."""
_TIED = 1 + TIE_TOLERANCE


def plainest(steps: Sequence[float], peaks: Sequence[float], complexities: Sequence[tuple[float, ...]]) -> int:
    """Position of the layout to take, of some that fit: the least complex of those tied with the fastest.

    ``steps`` are seconds, ``peaks`` memory in any unit. One that another beats in both is not taken.
    """
    limit = _TIED * min(steps)
    tied = [index for index, step in enumerate(steps) if step <= limit]

    # Who beats a tied layout is faster, so tied as well.
    def is_beaten(index: int) -> bool:
        return any(steps[one] < steps[index] and peaks[one] < peaks[index] for one in tied)

    kept = (index for index in tied if not is_beaten(index))
    return min(kept, key=lambda index: (complexities[index], steps[index], peaks[index]))


def complexity(layout: StepLayout, domain: int) -> tuple[float, ...]:
    """Describe what a layout needs that a plainer one does without, the most important first.

    ``domain`` devices share fast links.
    """
    again = RECOMPUTE_POLICIES.index(layout.recompute), layout.gathers_again
    degrees = (layout.tensor, layout.pipeline, layout.context, layout.split_backward, layout.virtual)
    return (layout.tensor > domain, layout.pipeline > 1, *again, *degrees, layout.replicas)


def break_tie(request: PlanRequest, ranked: Sequence[LayoutPrediction]) -> LayoutPrediction:
    """Take the plainest of the layouts tied with the fastest."""
    domain = request.cluster.domain
    complexities = [complexity(one.candidate.step_layout(request), domain) for one in ranked]
    return ranked[plainest([one.step_seconds for one in ranked], [one.peak_memory for one in ranked], complexities)]


class CandidateLayouts:
    """The candidate layouts of a request, or some of them, and what several questions about them share."""

    def __init__(self, request: PlanRequest, layouts: Sequence[Candidate] | None = None) -> None:
        self.request = request
        self.layouts = list(candidates(request)) if layouts is None else layouts
        self.estimates: Estimates = {}  # of memory, as far as they were needed

    @cached_property
    def times(self) -> StepTimes:
        """Step times by the formulas."""
        return step_times(workload_columns(self.request, self.layouts))

    @cached_property
    def order(self) -> list[int]:
        """Positions of the layouts, fastest first."""
        return [int(index) for index in np.argsort(self.times.step, kind="stable")] if self.layouts else []

    @cached_property
    def alike(self) -> dict[Hashable, list[int]]:
        """Positions of the layouts that differ only in what they keep for backward, the one that keeps most first.

        The last one recomputes most and needs least memory: where it does not fit, none of them does.
        """
        found: dict[Hashable, list[int]] = {}
        for index, layout in enumerate(self.layouts):  # in the order of ``candidates``
            found.setdefault(_but_for_recomputation(layout), []).append(index)
        return found


def best_layout(request: PlanRequest, listing: CandidateLayouts | None = None) -> LayoutPrediction | None:
    """Predict the layout that a plan of the request takes; None if none fits."""
    ranked = fastest_layouts(request, listing, _TIED)
    # A plan may take another, equally fast one: it also looks at layouts that need less memory, which may be plainer.
    return break_tie(request, ranked) if ranked else None


def fastest_layouts(
    request: PlanRequest, listing: CandidateLayouts | None = None, within: float = inf
) -> list[LayoutPrediction]:
    """Predictions of the finalists that fit, up to ``within`` times the fastest step, fastest first."""
    listing = listing or CandidateLayouts(request)
    fastest = finalists(listing.layouts, listing.order, lambda wanted: fitting_positions(listing, wanted))
    return _completed(listing, fastest, within)


def fitting_positions(
    listing: CandidateLayouts, order: Iterable[int], share: float = USABLE_MEMORY_SHARE
) -> Iterator[int]:
    """Yield positions of the layouts that fit in ``share`` of the memory: by estimate, or counted if that is doubtful.

    The listing has every choice of what is kept for backward; ``order`` has positions, the most wanted first.
    """
    tried = listing.layouts
    impossible: set[Hashable] = set()
    limit = share * listing.request.cluster.memory_bytes
    checks = ExactChecks(listing.request, limit, listing.estimates)
    for index in order:
        key = _but_for_recomputation(tried[index])
        if key in impossible:
            continue
        estimates = checks.estimates(tried[index])
        least = tried[listing.alike[key][-1]]
        if max(estimates) > limit and not checks.may_fit(least, checks.estimates(least)):
            impossible.add(key)
        elif checks.fits(tried[index], estimates):
            yield index


def _but_for_recomputation(layout: Candidate) -> Hashable:
    """Key of layouts that differ only in what is kept for backward."""
    parallel = layout.parallel
    degrees = (parallel.tensor, parallel.pipeline, parallel.context, parallel.virtual_stages, parallel.schedule)
    return (*degrees, parallel.zero, parallel.replicas, layout.micro_batch)
