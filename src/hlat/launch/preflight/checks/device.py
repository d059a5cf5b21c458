"""The device of each process: it exists, has the memory that the recipe needs, and nobody else uses it."""

from collections.abc import Iterator

from hlat.launch.preflight.checks.base import Evidence, HealthCheck, Symptom, gibibytes

_IN_USE = 0.1
"""Share of a device's memory that other processes may use before this one has allocated anything.

A driver keeps up to about 1 GiB for itself and contexts of monitoring tools; a rank of a run takes most of it."""


def _summary_of_devices(evidence: Evidence) -> str:
    kinds = dict.fromkeys(case.facts["device"] for case in evidence.cases)
    return ", ".join(kinds)


def _judge_memory(evidence: Evidence) -> Iterator[Symptom]:
    needed = evidence.plan.get("rank_bytes", 0.0)
    for case in evidence.cases:
        free = case.facts.get("free")
        if free is not None and free < needed:
            text = f"{gibibytes(free)} of the device's memory are free, and the recipe needs {gibibytes(needed)}"
            yield Symptom(case.node, text, case.rank)


def _judge_use(evidence: Evidence) -> Iterator[Symptom]:
    for case in evidence.cases:
        if "free" not in case.facts or case.facts.get("joined"):
            continue  # what the runtime of a process that has joined holds counts as used
        free, total = float(case.facts["free"]), float(case.facts["total"])
        if total - free > _IN_USE * total:
            text = f"{gibibytes(total - free)} of the device's {gibibytes(total)} are used by other processes"
            yield Symptom(case.node, text, case.rank)


CHECKS = (
    HealthCheck(
        "HD03",
        "device-visible",
        "rank",
        "Look at the driver and its tool (nvidia-smi, neuron-ls), the devices that the scheduler gave to the job, and "
        "the build of torch.",
        module="device",
        summary=_summary_of_devices,
        is_quick=True,
    ),
    HealthCheck(
        "HD28",
        "device-in-use",
        "rank",
        "End the processes that use the device (nvidia-smi and neuron-top list them), or use another host.",
        module="memory",
        judge=_judge_use,
        after=("device-visible",),
        is_quick=True,
    ),
    HealthCheck(
        "HD08",
        "device-memory",
        "rank",
        "Use more devices or more parallelism, activation checkpointing, or a smaller micro-batch: hlat rehearse shows "
        "the bytes.",
        module="memory",
        judge=_judge_memory,
        after=("device-visible", "device-in-use"),
        is_quick=True,
    ),
)
