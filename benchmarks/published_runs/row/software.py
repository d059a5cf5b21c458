"""Software of a published run: its kernels, its overlap, and where it adds gradients.

RowColumns, framework, chip, schedule -> attention kernel, compiler, precision -> RunSoftware
"""

import re
from dataclasses import replace

from hlat.planner.problem.workload import CHIP_FAMILIES, FUSED_LOSS_BYTES, MATERIALIZED_SCORES
from published_runs.program import COMPOSED_LOSS_BYTES, RunSoftware
from published_runs.reader import (
    Framework,
    PipelineWords,
    RunChip,
    find_date,
    is_async_tensor,
    is_compiled,
    is_fused,
    is_overlapping,
    is_unstated,
    lower,
    read_attention,
    read_eight_bit,
)
from published_runs.row.columns import NO, YES, RowColumns

_XLA_OVERLAPS = 202401
"""Month from which programs set XLA's latency-hiding scheduler on GPUs: NVIDIA's images (JAX-Toolbox, Dockerfile.jax)
and launchers (AXLearn, cloud/gcp/job.py) have --xla_gpu_enable_latency_hiding_scheduler=true."""
_SIXTEEN_BIT_SUMS = re.compile(r"pure|(?:main )?grad(?:ient)?s? (?:in )?(?:bf16|fp16)")


def read_software(
    columns: RowColumns, framework: Framework, chip: RunChip, schedule: PipelineWords, *, gated: bool
) -> RunSoftware:
    """Read what step times depend on besides model, layout and hardware.

    Args:
        columns: the row.
        framework: its framework.
        chip: its chip.
        schedule: words for its pipeline.
        gated: True for feed-forward blocks of three matrices.

    Raises:
        UnreadableError: a column is not understood.
    """
    family = chip.chip.family or "measured"
    name, precision = columns.text("framework"), columns.text("precision")
    xla_chip = CHIP_FAMILIES[family if family in CHIP_FAMILIES else "measured"].compiled
    xla = xla_chip or framework.xla
    version, kernel = columns.text("framework_version"), lower(columns.text("attention_kernel")).replace("_", " ")
    date = find_date(name, version, *(columns.row.get(column) for column in ("notes", "where", "published")))
    named = f"{name} {version} {kernel} {columns.text('notes')}"
    attention = columns.keep(read_attention(replace(framework, xla=xla), named, precision, date, family))
    compiled = _compiled(columns, name)
    fused, eager = framework.fused or xla or compiled or is_fused(name), framework.interpreted and not (xla or compiled)
    materialized = attention == MATERIALIZED_SCORES and not xla  # a sign of programs before 2022
    eight_bit = columns.keep(read_eight_bit(precision))
    sixteen = framework.sixteen_bit_sums or materialized or _SIXTEEN_BIT_SUMS.search(lower(precision)) is not None
    return RunSoftware(
        attention=attention,
        composed=framework.composes and gated and eager and not fused,
        eager=eager,
        # A chip's compiler schedules collectives of TPUs beside their products; others need a framework that does.
        overlaps_tensor=framework.overlaps_tensor or family == "tpu" or is_async_tensor(name),
        # On GPUs, XLA overlapped nothing before. Gradients of scanned layers exist when their loop ends, so that what
        # is summed across replicas then is waited for.
        overlaps_data=not materialized and (xla_chip or not xla or not 0 < date < _XLA_OVERLAPS),
        overlaps_sums=xla_chip
        or (not xla and (framework.overlaps_sums or is_overlapping(f"{name} {columns.text('notes')}"))),
        overlaps_context=True,
        eight_bit=eight_bit,
        transformer_engine=eight_bit and not xla and framework.transformer_engine,
        gradient_bytes=2 if sixteen else 4,
        balances_stages=schedule.balances_stages,
        divides_head=schedule.divides_head,
        loss_bytes=FUSED_LOSS_BYTES if framework.fused_loss or not eager else COMPOSED_LOSS_BYTES,
        pads_rows=not eager,
        adds_apart=eager and framework.adds_apart(date),
        recomputes_sums=eager and framework.repeats_blocks,
    )


def _compiled(columns: RowColumns, framework: str) -> bool:
    """True if torch, or another compiler of whole programs, compiles the blocks."""
    text = lower(columns.row.get("compiled"))
    if is_unstated(text):
        return is_compiled(framework)
    return text in YES or re.fullmatch(r"xla|graph", text) is not None or (text not in NO and is_compiled(text))
