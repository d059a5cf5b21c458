"""Layout of a published run: degrees, batches, pipeline, sharding, recomputation.

RowColumns, chip, framework, shape -> degrees, devices -> RunLayout
"""

from dataclasses import replace

from hlat.planner.problem.workload import ModelShape
from published_runs.program import RunLayout
from published_runs.reader import (
    Framework,
    Reading,
    Recomputation,
    RunChip,
    UnreadableError,
    is_unstated,
    lower,
    parse_number,
    read_accumulation,
    read_global_batch,
    read_micro_batch,
    read_recompute,
    read_sequence,
    read_zero,
)
from published_runs.row.columns import RowColumns
from published_runs.row.shape import block_weights


def read_degrees(columns: RowColumns, chips: int, chip: RunChip) -> tuple[tuple[int, int, int, int], float]:
    """Read tensor, pipeline, context and data degrees, and the catalog's devices per device of the row.

    Raises:
        UnreadableError: the degrees do not divide the devices.
    """
    tensor, pipeline = columns.positive("tp"), columns.positive("pp")
    context = columns.optional("cp") or 1
    stated = columns.optional("dp")
    ours = chip.chip.devices
    model = tensor * pipeline * context
    per_chip = columns.optional("devices_per_chip") or ours
    if stated and stated * model == chips * ours:
        return (tensor, pipeline, context, stated), 1.0
    devices = chips * per_chip
    if devices % model:
        raise UnreadableError(f"{tensor} x {pipeline} x {context} ranks do not divide {devices} devices")
    data = devices // model
    if stated and stated != data:
        reason = f"{data} data-parallel ranks follow from {devices} devices; the row says {stated}"
        columns.keep(Reading("dp", columns.row["dp"], data, "assumed", reason, 0.05))
    return (tensor, pipeline, context, data), ours / per_chip


def read_layout(
    columns: RowColumns, degrees: tuple[int, int, int, int], chips: int, framework: Framework, shape: ModelShape
) -> RunLayout:
    """Read the layout of a step.

    Args:
        columns: the row.
        degrees: tensor, pipeline, context and data degrees.
        chips: chips of the run.
        framework: its framework.
        shape: dimensions of the model.

    Raises:
        UnreadableError: a column is not understood, or contradicts another.
    """
    row, (tensor, pipeline, context, data) = columns.row, degrees
    sequence = columns.keep(read_sequence(row.get("seq_len")))
    accumulation = read_accumulation(row.get("notes") or "")
    micro_text = row.get("micro_batch")
    stated = 0.0 if is_unstated(micro_text) else parse_number(micro_text or "")
    devices = chips * (columns.optional("devices_per_chip") or 1)
    batch = columns.keep(
        read_global_batch(row.get("global_batch"), sequence, stated, data, accumulation, framework, devices)
    )
    # XLA programs split a sequence over devices; others need a sequence for every data-parallel rank.
    if batch < data and not framework.xla:
        raise UnreadableError("more data-parallel ranks than sequences")
    micro = columns.keep(read_micro_batch(micro_text, framework, pipeline, batch / data, accumulation))
    virtual = _virtual(columns, pipeline, framework)
    sequence_parallel = columns.flag("sp")
    if sequence_parallel is None:
        sequence_parallel = tensor > 1 and framework.shards_sequence
        if tensor > 1 and not framework.xla:
            reason = f"{'' if sequence_parallel else 'no '}sequence parallelism"
            columns.keep(Reading("sp", "", sequence_parallel, "assumed", reason, 0.03))
    again = columns.keep(read_recompute(row.get("activation_ckpt"), framework.selective))
    zero = columns.keep(read_zero(row.get("zero_stage"), row.get("framework") or "", framework.shards))
    layout = RunLayout(
        tensor, pipeline, context, data, virtual, zero, micro, batch, sequence, sequence_parallel, again.policy
    )
    return replace(
        layout,
        replicas=_replicas(columns, zero, data * context),
        recomputed_layers=again.layers,
        recomputed_products=_repeated_products(again, shape),
        recomputed_attention=float(again.kept != "alternate"),
    )


def _repeated_products(again: Recomputation, shape: ModelShape) -> float:
    """Share of a layer's products, by their weights, that recomputation repeats."""
    up = shape.hidden * shape.intermediate
    # In the order of the program: q (kept), k, v (kept), output, gate (kept), up, down (kept).
    attention = shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    repeated = {
        "": block_weights(shape),
        "projections": (1 + shape.gated) * up,
        "alternate": attention + shape.gated * up,
    }
    return repeated[again.kept] / block_weights(shape)


def _replicas(columns: RowColumns, zero: int, ranks: int) -> int:
    """Copies of the sharded state; 1 where nothing is sharded.

    Raises:
        UnreadableError: they do not divide the data-parallel ranks.
    """
    stated = columns.optional("replicas") or 1
    if ranks % stated:
        raise UnreadableError(f"{stated} replicas do not divide {ranks} data-parallel ranks")
    return columns.keep(Reading("replicas", columns.row.get("replicas") or "", stated if zero else 1))


def _virtual(columns: RowColumns, pipeline: int, framework: Framework) -> int:
    stated = columns.optional("vpp")
    if stated or pipeline == 1:
        return stated or 1
    interleaves = framework.interleaves or "interleaved" in lower(columns.row.get("framework"))
    layers = columns.number("layers")
    virtual = _interleaving(layers, pipeline) if interleaves else 1
    reason = f"{virtual} stages per pipeline rank"
    return columns.keep(Reading("vpp", "", virtual, "assumed", reason, 0.05))


def _interleaving(layers: int, pipeline: int) -> int:
    """Stages per rank: the largest divisor of its layers up to six."""
    if pipeline == 1 or layers % pipeline:
        return 1
    return max(count for count in range(1, 7) if layers // pipeline % count == 0)
