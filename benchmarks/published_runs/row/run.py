"""A row of published runs put together: readings of its columns -> workload of the cost model.

    row -> chip, framework, date -> shape, degrees, batches, software, network -> RunReading(workload, readings)

A column that is not understood ends the row with the reason, except for the interconnect: a run on an unknown network
can still be predicted with the catalog's, less certainly. Every value that a row does not state is a reading as well.
"""

from dataclasses import dataclass, replace

import numpy as np

from hlat.hardware import Catalog
from hlat.planner.problem.workload import CHIP_FAMILIES, WorkloadColumns, borrowed_constants
from published_runs.counted_memory import OTHER_GIB, counted_bytes
from published_runs.program import RunWorkload
from published_runs.reader import (
    OTHER,
    Framework,
    Reading,
    RunChip,
    UnreadableError,
    find_framework,
    is_unstated,
    lower,
    micro_batches_assumed,
    read_chip,
    read_schedule,
)
from published_runs.row.columns import CsvRow, RowColumns
from published_runs.row.device import read_device
from published_runs.row.layout import read_degrees, read_layout
from published_runs.row.shape import read_shape
from published_runs.row.software import read_software


@dataclass(frozen=True)
class RunReading:
    """A row as a workload, and the readings that led to it."""

    workload: RunWorkload
    chips: int
    chip: RunChip
    framework: Framework
    readings: tuple[Reading[object], ...]


def read_run(row: CsvRow, catalog: Catalog) -> RunReading:
    """Read a row.

    Args:
        row: texts by column.
        catalog: chips and machines, the user's included.

    Raises:
        UnreadableError: a column is missing or not understood; says which and why.
    """
    columns = RowColumns(row)
    _refuse_other_models(row)
    chips, chips_per_node = columns.positive("n_chips"), columns.optional("chips_per_node")
    chip = columns.keep(
        read_chip(row.get("chip"), catalog, chips_per_node, row.get("form_factor"), row.get("chip_memory"))
    )
    family = CHIP_FAMILIES.get(chip.chip.family or "", CHIP_FAMILIES["measured"])
    if family.like:
        reason = borrowed_constants(family.name)
        columns.keep(Reading("family", family.name, family.like, "assumed", reason, family.spread))
    framework = _framework(columns)
    degrees, scale = read_degrees(columns, chips, chip)
    schedule = columns.keep(read_schedule(row.get("pipeline_schedule")))
    shape = read_shape(columns, framework)
    layout = replace(read_layout(columns, degrees, chips, framework, shape), split_backward=schedule.splits_backward)
    software = read_software(columns, framework, chip, schedule, gated=shape.gated)
    device = read_device(columns, chip, chips, chips_per_node, scale)
    if software.eight_bit and not device.peak_eight_bit:
        raise UnreadableError(f"{chip.chip.name} has no 8-bit products, precision {row.get('precision')}")
    workload = _fitting(columns, RunWorkload(shape, layout, software, device))
    workload = _recomputing(columns, workload, framework)
    return RunReading(workload, chips, chip, framework, tuple(columns.readings))


def _framework(columns: RowColumns) -> Framework:
    name = columns.text("framework")
    framework = find_framework(name)
    if framework is not OTHER:
        columns.keep(Reading("framework", name, framework.name))
        return framework
    reason = "a framework without known conventions: eager torch"
    columns.keep(Reading("framework", name, framework.name, "assumed", reason, 0.05))
    return framework


def _fitting(columns: RowColumns, workload: RunWorkload) -> RunWorkload:
    """The workload; with a smaller micro-batch, if one was assumed that does not fit into the memory."""
    layout = workload.layout
    position = [one.column for one in columns.readings].index("micro_batch")
    assumed = columns.readings[position]
    if assumed.sure != "assumed":
        return workload
    likely = micro_batches_assumed(layout.pipeline, layout.global_batch / layout.data)
    workloads = [replace(workload, layout=replace(layout, micro_batch=float(count))) for count in likely]
    gradients = np.full(len(likely), float(max(2, workload.software.gradient_bytes)))
    needed = counted_bytes(WorkloadColumns(workloads), gradients) + OTHER_GIB * 2**30
    fits = np.flatnonzero(needed <= workload.device.memory_bytes)
    chosen = int(fits[0]) if len(fits) else len(likely) - 1
    if chosen:
        reason = f"micro-batch {likely[chosen]}, the largest that fits into the memory"
        value = float(likely[chosen])
        columns.readings[position] = replace(assumed, value=value, reason=reason)
    return workloads[chosen]


def _recomputing(columns: RowColumns, workload: RunWorkload, framework: Framework) -> RunWorkload:
    """The workload; with full recomputation, if none was assumed and the tensors of a step do not fit without it.

    Not for Megatron-LM's relatives: what their interleaved pipelines keep, in part in fp8 or on the host, is counted
    too roughly for that, and their published recipes recompute parts at most.
    """
    position = [one.column for one in columns.readings].index("activation_ckpt")
    assumed = columns.readings[position]
    if assumed.sure != "assumed" or framework.selective == "granularity":
        return workload
    gradients = np.array([float(max(2, workload.software.gradient_bytes))])
    # With sharded moments, which a row often does not state either.
    lightest = replace(workload, layout=replace(workload.layout, zero=max(1, workload.layout.zero)))
    needed = counted_bytes(WorkloadColumns([lightest]), gradients)
    if needed[0] <= workload.device.memory_bytes:
        return workload
    reason = "full recomputation: without it a step does not fit into the memory"
    columns.readings[position] = replace(assumed, reason=reason)
    return replace(workload, layout=replace(workload.layout, recompute="full"))


def _refuse_other_models(row: CsvRow) -> None:
    family = lower(row.get("family") or "dense")
    if family != "dense":
        raise UnreadableError(f"not a dense decoder: {family}")
    if lower(row.get("model")).startswith("gemma") or "sliding window" in lower(row.get("notes")):
        raise UnreadableError("sliding-window attention not modelled")
    required = ("chip", "n_chips", "layers", "hidden", "heads", "seq_len", "tp", "pp")
    missing = [name for name in required if is_unstated(row.get(name)) or row[name] == "0"]
    if missing:
        raise UnreadableError(f"not stated: {', '.join(missing)}")
