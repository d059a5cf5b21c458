"""The best layouts of a request: all of them predicted at once, those that do not fit left out, the rest ranked.

    candidates -> memory of the ranks with most -> fits? -> times of all that do, in columns -> ranked, simulated, exact

The formulas of step.py rank; of the few best the pipeline is simulated event by event and memory is counted from the
shapes of every parameter, and only then is one chosen.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hlat.model.derived import count_parameters, flops_per_token
from hlat.parallel.stages import stage_layers
from hlat.planner.cost import (
    STEP_COMPONENTS,
    Reliability,
    StageTimes,
    StepTimes,
    Timeline,
    hlat_profile,
    predict_reliability,
    simulate_pipeline,
    step_times,
)
from hlat.planner.memory import RankMemory, estimate_rank_memory, rank_memory, ranks_of_interest
from hlat.planner.problem import (
    Candidate,
    ModelShape,
    PlanRequest,
    Workload,
    WorkloadColumns,
    candidates,
    request_device,
)
from hlat.precision import MODES

USABLE = 0.96  # of a device's memory: the rest is for what a plan cannot see
_FINALISTS = 12
_OF_EACH = 3  # finalists of the same degrees
_SAVERS = 6  # finalists besides, that need less memory than all faster ones
_DAY = 86400.0
_OF_PASSES = ("products", "attention", "pointwise", "gaps", "recomputed", "host", "tensor", "context", "head")
_EVENTS = 40_000  # passes of a simulation that are worth their time; above, the formula stands


@dataclass(frozen=True)
class LayoutPrediction:
    """A layout and what is predicted of it.

    Attributes:
        candidate: the layout.
        step_seconds: of a step.
        parts: seconds of a step by what they are spent on; they add up to ``step_seconds``.
        memory: of the ranks that have most, by pipeline rank.
        tokens_per_second: of the whole cluster, steps alone.
        mfu: share of the peak that the model's FLOPs are, attention counted causal.
        reliability: failures, saves, restarts.
        days, cost_usd: of the run, with what failures and saves cost; the latter None where no price is known.
        passes: seconds of each kind of pass by stage, and of a message.
    """

    candidate: Candidate
    step_seconds: float
    parts: dict[str, float]
    memory: dict[int, RankMemory]
    tokens_per_second: float
    mfu: float
    reliability: Reliability
    days: float
    cost_usd: float | None
    passes: StageTimes

    @property
    def peak_memory(self) -> float:
        """Bytes of the rank that needs most."""
        return max(one.total for one in self.memory.values())

    @property
    def goodput(self) -> float:
        """Share of the time that is spent on steps that count."""
        return self.reliability.goodput


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        ranked: the best layouts, best first.
        tried, fitting: how many layouts were looked at, and how many fit into memory.
        least_memory: of the layout that needs least.
        seconds: that it took.
    """

    ranked: list[LayoutPrediction]
    tried: int
    fitting: int
    least_memory: tuple[Candidate, float] | None
    seconds: float


def search(request: PlanRequest, *, clock: Callable[[], float] = time.perf_counter) -> SearchResult:
    """Try every layout of a request's cluster."""
    begin = clock()
    tried = list(candidates(request))
    limit = USABLE * request.cluster.memory_bytes
    peaks = [_peak(request, one) for one in tried]
    least = min(zip(peaks, range(len(tried)), strict=True), default=None)
    fitting = [(one, peak) for one, peak in zip(tried, peaks, strict=True) if peak <= limit]
    ranked = _best(request, fitting, limit)
    smallest = None if least is None else (tried[least[1]], least[0])
    return SearchResult(ranked, len(tried), len(fitting), smallest, clock() - begin)


def predict_layout(request: PlanRequest, one: Candidate) -> LayoutPrediction:
    """What is predicted of a layout, whether it fits or not."""
    times = step_times(_columns(request, [one]))
    return _finish(request, one, times, 0)


def _peak(request: PlanRequest, one: Candidate) -> float:
    return max(estimate_rank_memory(request, one, rank).total for rank in ranks_with_most(one))


def ranks_with_most(one: Candidate) -> list[int]:
    """The pipeline ranks of which one needs most memory: the ends of the model, and the first between them.

    It has a buffer for messages from both sides, and of the ranks that have that the most passes in flight.
    """
    return sorted({0, min(1, one.pipeline - 1), one.pipeline - 1})


def _best(request: PlanRequest, fitting: list[tuple[Candidate, float]], limit: float) -> list[LayoutPrediction]:
    if not fitting:
        return []
    layouts, peaks = zip(*fitting, strict=True)
    columns = _columns(request, layouts)
    times = step_times(columns)
    order = [int(index) for index in np.argsort(times.step, kind="stable")]
    indices = {**dict.fromkeys(_finalists(layouts, order)), **dict.fromkeys(_savers(peaks, order))}
    finished = [_finish(request, layouts[index], times, index) for index in indices]
    kept = [one for one in finished if one.peak_memory <= limit]
    return sorted(kept, key=lambda one: one.step_seconds)


def _finalists(layouts: Sequence[Candidate], order: list[int]) -> list[int]:
    """The fastest, but only some of the same degrees: alternatives are to differ."""
    chosen: list[int] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for index in order:
        one = layouts[index]
        degrees = (one.tensor, one.pipeline, one.context)
        if seen[degrees] < _OF_EACH:
            seen[degrees] += 1
            chosen.append(index)
        if len(chosen) == _FINALISTS:
            break
    return chosen


def _savers(peaks: Sequence[float], order: list[int]) -> list[int]:
    """Some of the layouts that need less memory than all that are faster: for the front over time and memory."""
    front: list[int] = []
    for index in order:
        if not front or peaks[index] < peaks[front[-1]]:
            front.append(index)
    each = max(1, -(-len(front) // _SAVERS))
    return front[::-1][::each]  # the one that needs least is always among them


def _columns(request: PlanRequest, layouts: Sequence[Candidate]) -> WorkloadColumns:
    model, device = request.model, request_device(request)
    shape = ModelShape(
        model.layers,
        model.hidden_size,
        model.heads,
        model.n_kv_heads,
        model.n_head_dim,
        model.intermediate_size,
        model.vocab_size,
    )
    return WorkloadColumns([Workload(shape, one.split(request), hlat_profile(request, one), device) for one in layouts])


def _finish(request: PlanRequest, one: Candidate, times: StepTimes, index: int) -> LayoutPrediction:
    row = times.row(index)
    passes = _passes(request, one, row)
    parts = {name: row[name] for name in STEP_COMPONENTS}
    count = one.accumulation(request.global_batch)
    if one.pipeline > 1 and count * one.pipeline * one.virtual <= _EVENTS:
        line = timeline(one, count, passes)
        busy = max(map(line.busy, range(one.pipeline)))
        # What the formula calls bubble and messages is what the simulation shows of both. Its ranks have the layers
        # that they would really have.
        scale = busy / sum(parts[name] for name in _OF_PASSES)
        parts |= {name: scale * parts[name] for name in _OF_PASSES}
        parts |= {"messages": 0.0, "bubble": line.seconds - busy}
    step = sum(parts.values())
    memory = {rank: rank_memory(request, one, rank) for rank in ranks_of_interest(request, one)}
    speed = request.tokens_per_step / step
    device = request_device(request)
    flops = flops_per_token(request.model, request.sequence, "causal")
    expected = predict_reliability(request.cluster, _saved_bytes(request))
    days = request.tokens / speed / expected.goodput / _DAY
    price = request.cluster.price(request.price)
    return LayoutPrediction(
        candidate=one,
        step_seconds=step,
        parts=parts,
        memory=memory,
        tokens_per_second=speed,
        mfu=speed * flops / (device.peak * request.cluster.devices),
        reliability=expected,
        days=days,
        cost_usd=None if price is None else days * 24 * price[1],
        passes=passes,
    )


def timeline(one: Candidate, micro_batches: int, passes: StageTimes) -> Timeline:
    """The simulated pipeline of a layout."""
    return simulate_pipeline(one.schedule, one.pipeline, micro_batches, passes)


def _passes(request: PlanRequest, one: Candidate, row: dict[str, float]) -> StageTimes:
    """Seconds of a pass by stage, of the layers that the model is cut into; a third each of the head's is forward, by
    its input and by its weights.
    """
    layers = list(map(len, stage_layers(one.cut(request))))

    def by_stage(each: str, share: float) -> list[float]:
        found = [count * row[each] for count in layers]
        found[-1] += share * row["head_pass"]
        return found

    backward, weight = by_stage("backward", 2 / 3), by_stage("weight", 1 / 3)
    # The first stage has nobody to send gradients to: all of its backward pass is the weights' part (torch).
    backward[0] -= layers[0] * row["twice"]
    weight[0] = backward[0]
    return StageTimes(by_stage("forward", 1 / 3), backward, weight, row["message"])


def _saved_bytes(request: PlanRequest) -> float:
    mode = MODES[request.mode]
    per_parameter = mode.weights.itemsize + 2 * mode.moments.itemsize
    return count_parameters(request.model).total * float(per_parameter)
