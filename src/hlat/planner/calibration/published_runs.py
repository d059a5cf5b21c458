"""Published training runs as workloads: rows of a CSV file, and the reasons why some cannot be predicted.

    row of a CSV file -> Workload, measured tokens per second and chip, group | reason for skipping it

The columns are those of a table of measured runs: model dimensions, layout, chip, framework, interconnect, and the
throughput ``tok_s_chip_norm``. Fields that a row leaves open are filled in by the rules below, never from a measured
value, and no rule names a source. Throughput is read only to compare it with the prediction.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hlat.hardware import Catalog, load_catalog
from hlat.planner.problem import (
    FLASH_ATTENTION_1,
    FLASH_ATTENTION_2,
    FLASH_ATTENTION_3,
    MATERIALIZED_SCORES,
    DeviceSpec,
    ModelShape,
    RecomputePolicy,
    SoftwareProfile,
    StepLayout,
    Workload,
    instance_device,
)
from hlat.runtime import PlanError

Row = Mapping[str, str]

REQUIRED = ("chip", "n_chips", "layers", "hidden", "heads", "seq_len", "global_batch", "tp", "pp")

_CHIPS = {
    "A100-SXM-40GB": "a100-40gb",
    "A100-SXM-80GB": "a100-80gb",
    "A800-SXM-80GB": "a100-80gb",
    "H100-SXM-80GB": "h100",
    "H200-SXM-141GB": "h200",
    "B200-180GB": "b200",
    "B300-288GB": "b300",
    "GB200-186GB": "gb200",
    "GB300-288GB": "gb300",
    "Trainium1": "trn1.32xlarge",
    "Trainium2": "trn2.48xlarge",
    "TPU v4": "tpu-v4",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v6e": "tpu-v6e",
    "TPU7x (Ironwood)": "tpu-7x",
}

# Words in `framework` that identify the software. Transformer Engine or similar, with overlapped collectives:
_MODERN = (
    "Megatron-Core", "Megatron-Bridge", "NeMo 24", "NeMo 25", "NeMo 26", "TransformerEngine", "MLPerf", "MegaScale",
)  # fmt: skip
# Attention that writes its scores to memory:
_BEFORE_FLASH = ("Megatron-DeepSpeed", "DeepSpeed+Megatron", "Megatron-LM v2", "NeMo Megatron 22", "no FlashAttention")
# The Triton kernel of FlashAttention 1:
_FLASH_1 = ("Composer",)
# XLA programs, compiled completely; and programs whose blocks torch compiles, which otherwise run eagerly:
_XLA = ("MaxText", "JAX", "T5X", "Levanter")
_TORCH_COMPILED = ("torch.compile", "+compile", "+ compile", "compiled")
_MAX_MICRO_BATCH = 8  # sequences, if the row states none
_ASYNC_TENSOR = ("async TP", "AsyncTP", "async-TP")
_SIXTEEN_BIT_REDUCTION = ("DeepSpeed",)


@dataclass(frozen=True)
class PublishedRun:
    """A measured run.

    Attributes:
        name: id of the row.
        group: source of the row.
        workload: input of the cost model.
        chips: number of chips, as the source counts them.
        tokens_per_second: measured throughput per chip; None if not published.
        memory_gib: measured memory per device; None if not published.
        memory_kind: method of the memory measurement, in the source's words.
        assumed: fields that the rules filled in, one phrase each.
        row: the row as read.
    """

    name: str
    group: str
    workload: Workload
    chips: int
    tokens_per_second: float | None
    memory_gib: float | None
    memory_kind: str
    assumed: tuple[str, ...]
    row: Row


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be predicted, and the reason."""

    name: str
    group: str
    reason: str


def read_published_runs(path: Path) -> tuple[list[PublishedRun], list[SkippedRow]]:
    """Read every row of a file, as a run or as a skipped row.

    Raises:
        PlanError: the file cannot be read or lacks required columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise PlanError(f"{path} has no rows below its header")
    missing = [name for name in REQUIRED if name not in rows[0]]
    if missing:
        needed = ", ".join(REQUIRED)
        raise PlanError(f"{path}: a table of runs needs the columns {needed}; missing: {', '.join(missing)}")
    runs: list[PublishedRun] = []
    skipped: list[SkippedRow] = []
    for number, row in enumerate(rows):
        name, group = row.get("id") or f"row {number + 1}", row.get("source") or "unnamed source"
        reason = next(_skip_reasons(row), None)
        if reason is not None:
            skipped.append(SkippedRow(name, group, reason))
        else:
            runs.append(_run(name, group, row))
    return runs, skipped


def _skip_reasons(row: Row) -> Iterator[str]:
    """Reasons why a row cannot be predicted."""
    family = row.get("family") or "dense"
    if family != "dense":
        yield f"not a dense decoder: {family}"
    if row["chip"] not in _CHIPS:
        yield f"chip not in the catalog: {row['chip']}"
    if row.get("precision") in ("nvfp4", "int8"):
        yield f"precision not modelled: {row['precision']}"
    if row.get("model", "").startswith("gemma"):
        yield "sliding-window attention not modelled"
    missing = [name for name in REQUIRED if _number(row[name]) <= 0 and name != "chip"]
    if missing:
        yield f"not stated: {', '.join(missing)}"
    elif _number(row["global_batch"]) < _degrees(row)[3]:
        yield "more data-parallel ranks than sequences"


def _run(name: str, group: str, row: Row) -> PublishedRun:
    device, software = _device(row), _software(row)
    layout, assumed = _step_layout(row)
    throughput, memory = _number(row.get("tok_s_chip_norm")), _number(row.get("memory_per_chip_gib"))
    return PublishedRun(
        name=name,
        group=group,
        workload=Workload(_shape(row), layout, software, device),
        chips=int(_number(row["n_chips"])),
        tokens_per_second=throughput or None,
        memory_gib=memory or None,
        memory_kind=row.get("mem_kind") or "",
        assumed=assumed,
        row=row,
    )


@cache
def _catalog() -> Catalog:
    return load_catalog()


def _number(text: str | None, default: float = 0.0) -> float:
    try:
        return float(text or default)
    except ValueError:
        return default


@cache
def _shared_shape(gated: bool, *numbers: int) -> ModelShape:
    layers, hidden, heads, kv_heads, head_dim, inner, vocab = numbers
    return ModelShape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, gated)


def _shape(row: Row) -> ModelShape:
    hidden, heads = int(_number(row["hidden"])), int(_number(row["heads"]))
    return _shared_shape(
        row.get("gated_mlp") == "1",
        int(_number(row["layers"])),
        hidden,
        heads,
        int(_number(row.get("kv_heads"), heads)) or heads,
        int(_number(row.get("head_dim"))) or hidden // heads,
        int(_number(row.get("ffn"))) or 4 * hidden,
        int(_number(row.get("vocab"))) or 50304,
    )


def _degrees(row: Row) -> tuple[int, int, int, int]:
    """Tensor, pipeline, context and data degrees; if not stated, data follows from the number of devices."""
    tensor, pipeline, context = (int(_number(row.get(axis)) or 1) for axis in ("tp", "pp", "cp"))
    devices = int(_number(row["n_chips"]) * (_number(row.get("devices_per_chip")) or 1))
    data = int(_number(row.get("dp"))) or max(1, devices // (tensor * pipeline * context))
    return tensor, pipeline, context, data


def _step_layout(row: Row) -> tuple[StepLayout, tuple[str, ...]]:
    tensor, pipeline, context, data = _degrees(row)
    layers, batch = int(_number(row["layers"])), int(_number(row["global_batch"]))
    framework = row.get("framework") or ""
    assumed = []
    virtual = int(_number(row.get("vpp")))
    if not virtual:
        virtual = _interleaving(layers, pipeline) if "Core" in framework or "interleaved" in framework else 1
        if virtual > 1:
            assumed.append(f"{virtual} stages per pipeline rank")
    micro, stated = _micro_batch(row, pipeline, batch / data)
    if not stated:
        assumed.append(f"micro-batch {micro:g}")
    sequence_parallel = row.get("sp") == "1" or (not row.get("sp") and tensor > 1)
    policy = row.get("activation_ckpt") or ""
    if not policy:
        assumed.append("no activation checkpointing")
    # These policies keep, or offload, little more than the inputs of layers and recompute the rest.
    recompute: RecomputePolicy = "full" if policy.startswith(("full", "qkv_proj", "custom")) else "none"
    if policy.startswith("selective"):
        recompute = "selective"
    zero = int(_number(row.get("zero_stage")))
    sequence = int(_number(row["seq_len"]))
    layout = StepLayout(
        tensor, pipeline, context, data, virtual, zero, micro, batch, sequence, sequence_parallel, recompute
    )
    return layout, tuple(assumed)


def _micro_batch(row: Row, pipeline: int, sequences: float) -> tuple[float, bool]:
    """Sequences per micro-batch, given those of a data-parallel rank; and True if the row states the number."""
    framework = row.get("framework") or ""
    # XLA trainers process their batch per device in one pass, even if it is a fraction of a sequence.
    if any(word in framework for word in _XLA):
        return sequences, False
    if _number(row.get("micro_batch")):
        return _number(row["micro_batch"]), True
    if "torchtitan" in framework:
        return sequences, False
    if pipeline > 1:
        return 1.0, False
    # Pipelines need many micro-batches. Without one, only memory limits the micro-batch.
    complete = max(1, int(sequences))
    return float(max(count for count in range(1, _MAX_MICRO_BATCH + 1) if complete % count == 0)), False


def _interleaving(layers: int, pipeline: int) -> int:
    """Stages per rank: the largest divisor of its layers up to six."""
    if pipeline == 1 or layers % pipeline:
        return 1
    return max(count for count in range(1, 7) if layers // pipeline % count == 0)


@cache
def _shared_software(*choices: int) -> SoftwareProfile:
    attention, fused, eager, eight_bit, overlaps_tensor, overlaps_data, gradient_bytes = choices
    return SoftwareProfile(
        attention=attention,
        fused=bool(fused),
        eager=bool(eager),
        overlaps_tensor=bool(overlaps_tensor),
        overlaps_data=bool(overlaps_data),
        overlaps_context=True,
        eight_bit=bool(eight_bit),
        gradient_bytes=gradient_bytes,
    )


def _software(row: Row) -> SoftwareProfile:
    """Software profile by framework name, precision and chip."""
    framework, precision, chip = row.get("framework") or "", row.get("precision") or "", row["chip"]
    description = f"{framework} {row.get('notes') or ''}"
    modern = any(word in framework for word in _MODERN)
    # fp16 with loss scaling was given up before flash attention came into use.
    old = precision == "fp16" or any(word in description for word in _BEFORE_FLASH)
    xla_chip = chip.startswith(("TPU", "Train"))
    xla = xla_chip or any(word in framework for word in _XLA)
    blocks = any(word in framework for word in _TORCH_COMPILED)
    if old and not xla and not blocks:
        attention = MATERIALIZED_SCORES
    elif modern or xla:
        attention = FLASH_ATTENTION_3
    else:
        attention = FLASH_ATTENTION_1 if any(word in framework for word in _FLASH_1) else FLASH_ATTENTION_2
    sixteen = (
        any(word in framework for word in _SIXTEEN_BIT_REDUCTION)
        or attention == MATERIALIZED_SCORES
        or "PURE" in precision
    )
    overlaps_tensor = modern or chip.startswith("TPU") or any(word in framework for word in _ASYNC_TENSOR)
    # XLA programs for GPUs run collectives between their kernels, without overlap.
    overlaps_data = attention != MATERIALIZED_SCORES and (xla_chip or not xla)
    fused, eager = modern or xla or blocks, not (xla or blocks)
    return _shared_software(
        attention, fused, eager, "fp8" in precision, overlaps_tensor, overlaps_data, 2 if sixteen else 4
    )


# 10^9 bytes per second of a node, by words in `interconnect`. On four Omni-Path links of 100 Gb/s (50 GB/s), NCCL
# reached 55 Gb/s in all-reduces of 16 nodes, which send twice the message: 17 GB/s, before the share that good networks
# reach (bigscience-workshop/bigscience, experiments/bandwidth/README.md).
_NETWORKS = {"4x Omni-Path": 17.0, "8x HDR": 200.0, "HDR": 200.0, "1600 Gb": 200.0, "800 Gb": 100.0}


@cache
def _shared_device(instance_name: str, network: float, domain: int) -> DeviceSpec:
    instance = _catalog().instance(instance_name)
    assert instance is not None, "the table above names instances of the catalog"
    chip = _catalog().chip(instance.chip)
    assert chip is not None, "the catalog has been validated"
    device = instance_device(chip, instance)
    return replace(device, network_rate=network * 1e9 or device.network_rate, domain=domain or device.domain)


def _device(row: Row) -> DeviceSpec:
    interconnect = row.get("interconnect") or ""
    network = next((rate for words, rate in _NETWORKS.items() if words in interconnect), 0.0)
    domain = 0
    if row["chip"].startswith("TPU"):
        # A slice is one fast-link domain; slices communicate over the data centre's network.
        slices = _number(interconnect.split(" slice")[0]) if " slice" in interconnect else 1
        domain = max(1, int(_number(row["n_chips"]) * (_number(row.get("devices_per_chip")) or 1) / max(1, slices)))
    if row["chip"].startswith("Train") and "800 Gb" in interconnect:
        network = 100.0
    return _shared_device(_CHIPS[row["chip"]], network, domain)
