"""Matrix products of each process: a known result, the same bits on equal devices, and their rate."""

from collections import Counter
from collections.abc import Iterator
from statistics import median_high

from hlat.launch.preflight.checks.base import Case, Evidence, HealthCheck, Symptom

_OF_OTHERS = 0.4
"""Share of the usual rate below which a device is slow: equal ones differ by a few percent (power, temperature)."""
_OF_OTHER_PROCESSES = 0.2
"""The same for processors: programs that share their cores take up to two thirds of a process's time for a moment."""
_OF_CATALOG = 0.5
"""Share of the published peak below which a known device is slow: large products reach 0.6 to 0.9 of it."""


def _judge_result(evidence: Evidence) -> Iterator[Symptom]:
    wrong = set()
    for case in evidence.cases:
        if (found := case.facts["wrong"]) is not None:
            wrong.add(case.rank)
            text = "element {row}, {column} of a product of integers is {value}, not {expected}".format(**found)
            yield Symptom(case.node, text, case.rank)
        elif len(set(case.facts["hashes"])) > 1:
            wrong.add(case.rank)
            yield Symptom(case.node, "the same product gave different bits when it was repeated", case.rank)
    kinds: dict[str, list[Case]] = {}
    for case in evidence.cases:
        if case.rank not in wrong:
            kinds.setdefault(case.facts["kind"], []).append(case)
    for cases in kinds.values():
        yield from _unusual(cases)


def _unusual(cases: list[Case]) -> Iterator[Symptom]:
    """Find the processes whose product has other bits than that of most equal devices."""
    counts = Counter(case.facts["hashes"][0] for case in cases)
    usual = max(counts, key=lambda text: counts[text])
    for case in cases:
        if case.facts["hashes"][0] != usual:
            text = f"a product has other bits than on {counts[usual]} of {len(cases)} equal devices"
            yield Symptom(case.node, text, case.rank)


def _judge_rate(evidence: Evidence) -> Iterator[Symptom]:
    kinds: dict[str, list[Case]] = {}
    for case in evidence.cases:
        kinds.setdefault(case.facts["kind"], []).append(case)
    for cases in kinds.values():
        usual = median_high(case.facts["flops"] for case in cases)
        for case in cases:
            flops, peak = case.facts["flops"], case.facts["peak"]
            least = _OF_OTHER_PROCESSES if case.facts["shared"] else _OF_OTHERS
            if flops < least * usual:
                yield Symptom(case.node, f"{_tera(flops)}, and {_tera(usual)} on equal devices", case.rank)
            elif peak is not None and flops < _OF_CATALOG * peak:
                text = f"{_tera(flops)}, {flops / peak:.0%} of the {_tera(peak)} in the catalog"
                yield Symptom(case.node, text, case.rank)


def _summary_of_rate(evidence: Evidence) -> str:
    rates = sorted(case.facts["flops"] for case in evidence.cases)
    if not rates:
        return ""
    names = ", ".join(dict.fromkeys(case.facts["dtype"] for case in evidence.cases))
    return f"products in {names} {_tera(rates[0])} to {_tera(rates[-1])} per process"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


CHECKS = (
    HealthCheck(
        "HD09",
        "matmul-result",
        "rank",
        "The device computes wrong results: take the host out of service and have it tested.",
        module="matmul",
        judge=_judge_result,
        after=("device-visible",),
        is_quick=True,
    ),
    HealthCheck(
        "HD10",
        "matmul-rate",
        "together",
        "Look for other programs on the host, for throttling (power cap, temperature, clock), and for a device in a "
        "lower power state.",
        module="matmul_rate",
        judge=_judge_rate,
        summary=_summary_of_rate,
        after=("device-visible", "matmul-result"),
    ),
)
