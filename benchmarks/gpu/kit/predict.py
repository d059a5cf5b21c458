"""Predictions of all cases, before they run: the rehearsal's memory and the plan's time, for the chip that is here.

name of the GPU --catalog--> cluster of one such chip; case --hlat.rehearse--> numbers under the names of the measured
"""

from typing import Any

import hlat
from hlat.config import Recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.model.counts import count_parameters, flops_per_token
from hlat.rehearsal.plan import plan_step
from kit.child import Context
from kit.shapes import case_recipe, recipe

_OTHERWISE = "1xh100:1"  # of a CPU, and of a chip that the catalog does not have


def run(context: Context, chip: str, *cases: str) -> None:
    """Predict cases, in their order.

    Args:
        context: settings and result.
        chip: name that torch gives to the chip.
        cases: cases of ``kit.shapes.CASES``, or "generation".
    """
    cluster = cluster_of(chip)
    for case in cases:
        with context.part(case):
            context.found({case: {"cluster": cluster, **predict(context, case, cluster)}})
    for case in set(cases) - context.numbers.keys():
        context.found({case: f"no prediction: {context.errors.get(case, '')[-300:]}"})


def cluster_of(chip: str) -> str:
    """Return a cluster with one chip of this name."""
    catalog = load_catalog()
    found = catalog.chip_by_torch_name(chip) if chip else None
    names = [each.name for each in catalog.instances if found is not None and each.chip == found.name]
    return f"1x{min(names, key=len)}:1" if names else _OTHERWISE


def predict(context: Context, case: str, cluster: str) -> dict[str, Any]:
    """Predict one case: numbers by the names that the measurement uses."""
    if case == "generation":
        return _generation(context, cluster)
    asked = case_recipe(case, context.tiny, "auto", context.work)
    try:
        found = hlat.rehearse(asked, cluster=cluster).to_dict()
    except Exception as error:  # of a version of torch that it does not know, say: the plan needs no torch
        return {"not_rehearsed": f"{type(error).__name__}: {error}"[:300], **_planned(asked, cluster)}
    verdict, time = found["memory_verdict"], found["time"] or {}
    tokens = asked.tokens_per_step
    numbers = {
        "peak_allocated_gib": verdict["tensor_bytes"] / 2**30,
        "used_gib": verdict["needed_bytes"] / 2**30,
        "attention": _decision(found, "attention"),
        "not_predicted": found["time_not_predicted"],
    }
    if seconds := time.get("step_seconds"):
        numbers |= {
            "step_seconds": seconds,
            "step_seconds_80_percent": time["interval_seconds"],
            "tokens_per_second": tokens / seconds,
            "parts_seconds": time["parts_seconds"],
            "mfu_causal": _mfu(asked, cluster, tokens / seconds),
        }
    return numbers


def _planned(asked: Recipe, cluster: str) -> dict[str, Any]:
    """Predict by the plan alone, whose memory is less exact than the rehearsal's."""
    planned = plan_step(asked, parse_cluster(cluster, load_catalog()), 1).prediction
    rate = asked.tokens_per_step / planned.step_seconds
    numbers = {
        "step_seconds": planned.step_seconds,
        "tokens_per_second": rate,
        "mfu_causal": _mfu(asked, cluster, rate),
    }
    return numbers | {"used_gib": planned.peak_memory / 2**30}


def _decision(found: dict[str, Any], name: str) -> str:
    return next((each["choice"] for each in found["device"]["decisions"] if each["name"] == name), "unknown")


def _mfu(asked: Recipe, cluster: str, tokens_per_second: float) -> float | None:
    peak = parse_cluster(cluster, load_catalog()).chip.flops("bfloat16")
    flops = flops_per_token(asked.model, asked.data.sequence_length, "causal")
    return None if peak is None else flops * tokens_per_second / peak


def _generation(context: Context, cluster: str) -> dict[str, Any]:
    """Predict the ceiling of generation: every new token reads all weights once, in bf16, at the memory's rate."""
    model = recipe("1b", context.tiny, "auto", context.work).model
    rate = parse_cluster(cluster, load_catalog()).memory_rate
    steps = rate / (2 * count_parameters(model).total)
    return {f"tokens_per_second_{rows}_rows": rows * steps for rows in (1, 8, 32)}
