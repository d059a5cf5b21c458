"""A row of published runs put together: readings of its columns -> workload of the cost model.

    row -> chip, framework, date -> shape, degrees, batches, software, network -> RunReading(workload, readings)

A column that is not understood ends the row with the reason, except for the interconnect: a run on an unknown network
can still be predicted with the catalog's, less certainly. Every value that a row does not state is a reading as well.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hlat.hardware import Catalog
from hlat.planner.calibration.counted_memory import OTHER_GIB, counted_bytes
from hlat.planner.calibration.reader import (
    OTHER,
    Framework,
    Network,
    PipelineWords,
    Reading,
    RunChip,
    UnreadableError,
    find_date,
    find_framework,
    is_async_tensor,
    is_compiled,
    is_fused,
    is_unstated,
    keeps_projections,
    lower,
    micro_batches_assumed,
    parse_count,
    parse_number,
    read_accumulation,
    read_attention,
    read_chip,
    read_eight_bit,
    read_global_batch,
    read_micro_batch,
    read_network,
    read_recompute,
    read_schedule,
    read_sequence,
    read_zero,
)
from hlat.planner.problem import (
    CHIP_FAMILIES,
    MATERIALIZED_SCORES,
    DeviceSpec,
    ModelShape,
    SoftwareProfile,
    StepLayout,
    Workload,
    WorkloadColumns,
    borrowed_constants,
    instance_device,
)

_VOCABULARIES = (16_000, 400_000)
"""Vocabularies that a number of parameters may leave; others follow from rounding, or it counts something else."""
_SIXTEEN_BIT_SUMS = re.compile(r"pure|(?:main )?grad(?:ient)?s? (?:in )?(?:bf16|fp16)")

Row = Mapping[str, str]
Value = TypeVar("Value")

_UNKNOWN_NETWORK = 0.1
"""Spread of a step on several machines whose network is not known: halving the network costs ZeRO 3 about a tenth."""
_YES, _NO = (
    ("1", "1.0", "true", "yes", "on", "swiglu", "gated", "glu", "geglu"),
    ("0", "0.0", "false", "no", "off", "gelu"),
)


@dataclass(frozen=True)
class RunReading:
    """A row as a workload, and the readings that led to it."""

    workload: Workload
    chips: int
    chip: RunChip
    framework: Framework
    readings: tuple[Reading[object], ...]


def read_run(row: Row, catalog: Catalog) -> RunReading:
    """Read a row.

    Args:
        row: texts by column.
        catalog: chips and machines, the user's included.

    Raises:
        UnreadableError: a column is missing or not understood; says which and why.
    """
    return _RowReader(row, catalog).read()


class _RowReader:
    """Reads the columns of one row, and keeps the readings."""

    def __init__(self, row: Row, catalog: Catalog) -> None:
        self._row = row
        self._catalog = catalog
        self._readings: list[Reading[object]] = []

    def read(self) -> RunReading:
        row = self._row
        self._refuse_other_models()
        chips = self._positive("n_chips")
        chips_per_node = self._optional("chips_per_node")
        chip = self._keep(
            read_chip(row.get("chip"), self._catalog, chips_per_node, row.get("form_factor"), row.get("chip_memory"))
        )
        family = CHIP_FAMILIES.get(chip.chip.family or "", CHIP_FAMILIES["measured"])
        if family.like:
            reason = borrowed_constants(family.name)
            self._keep(Reading("family", family.name, family.like, "assumed", reason, family.spread))
        name = row.get("framework") or ""
        framework = find_framework(name)
        if framework is OTHER:
            reason = "a framework without known conventions: eager torch"
            self._keep(Reading("framework", name, framework.name, "assumed", reason, 0.05))
        else:
            self._keep(Reading("framework", name, framework.name))
        degrees, scale = self._degrees(chips, chip)
        schedule = self._keep(read_schedule(row.get("pipeline_schedule")))
        shape = self._shape()
        layout = self._layout(degrees, chips, framework, shape)
        layout = replace(layout, split_backward=schedule.splits_backward)
        software = self._software(framework, chip, schedule)
        composed = framework.composes and shape.gated and software.eager and not software.fused
        software = replace(software, composed=composed)
        device = self._device(chip, chips, chips_per_node, scale)
        if software.eight_bit and not device.peak_eight_bit:
            raise UnreadableError(f"{chip.chip.name} has no 8-bit products, precision {row.get('precision')}")
        workload = self._fitting(Workload(shape, layout, software, device))
        return RunReading(workload, chips, chip, framework, tuple(self._readings))

    def _fitting(self, workload: Workload) -> Workload:
        """The workload; with a smaller micro-batch, if one was assumed that does not fit into the memory."""
        layout = workload.layout
        position = [one.column for one in self._readings].index("micro_batch")
        assumed = self._readings[position]
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
            self._readings[position] = replace(assumed, value=value, reason=reason)
        return workloads[chosen]

    def _keep(self, reading: Reading[Value]) -> Value:
        self._readings.append(reading)
        return reading.value

    def _refuse_other_models(self) -> None:
        family = lower(self._row.get("family") or "dense")
        if family != "dense":
            raise UnreadableError(f"not a dense decoder: {family}")
        if lower(self._row.get("model")).startswith("gemma") or "sliding window" in lower(self._row.get("notes")):
            raise UnreadableError("sliding-window attention not modelled")
        required = ("chip", "n_chips", "layers", "hidden", "heads", "seq_len", "tp", "pp")
        missing = [name for name in required if is_unstated(self._row.get(name)) or self._row[name] == "0"]
        if missing:
            raise UnreadableError(f"not stated: {', '.join(missing)}")

    def _positive(self, column: str) -> int:
        value = self._number(column)
        if value < 1:
            raise UnreadableError(f"{column} must be positive: {self._row.get(column)}")
        return self._keep(Reading(column, self._row.get(column) or "", value))

    def _number(self, column: str) -> int:
        try:
            return parse_count(self._row.get(column) or "")
        except UnreadableError as error:
            raise UnreadableError(f"{column} {error}") from error

    def _optional(self, column: str) -> int:
        return 0 if is_unstated(self._row.get(column)) else self._number(column)

    def _flag(self, column: str) -> bool | None:
        text = lower(self._row.get(column))
        if is_unstated(text):
            return None
        if text not in (*_YES, *_NO):
            raise UnreadableError(f"{column} not understood: {text}")
        return text in _YES

    def _shape(self) -> ModelShape:
        layers, hidden, heads = (self._positive(column) for column in ("layers", "hidden", "heads"))
        inner, vocab, gated = self._optional("ffn"), self._optional("vocab"), self._flag("gated_mlp")
        if gated is None:
            gated = bool(inner) and inner != 4 * hidden
            reason = f"{'gated' if gated else 'plain'} feed-forward block, from its width"
            self._keep(Reading("gated_mlp", "", gated, "assumed", reason, 0.05))
        if not inner:
            inner = round(8 * hidden / 3) if gated else 4 * hidden
            self._keep(Reading("ffn", "", inner, "assumed", f"feed-forward width {inner}", 0.05))
        kv_heads = self._optional("kv_heads")
        if not kv_heads:
            kv_heads = self._keep(Reading("kv_heads", "", heads, "assumed", "as many kv heads as heads", 0.02))
        head_dim = self._optional("head_dim") or hidden // heads
        shape = ModelShape(layers, hidden, heads, kv_heads, head_dim, inner, vocab, gated)
        return shape if vocab else replace(shape, vocab=self._vocabulary(shape))

    def _vocabulary(self, shape: ModelShape) -> int:
        """A vocabulary that is not stated: what the stated number of parameters leaves, else a usual one."""
        parameters = self._optional("n_params")
        matrices = 1 if self._flag("tied_embeddings") else 2
        rest = (parameters - shape.layers * _block_weights(shape)) / (matrices * shape.hidden)
        if _VOCABULARIES[0] <= rest <= _VOCABULARIES[1]:
            reason = f"vocabulary of {rest:,.0f}, from the number of parameters"
            return self._keep(Reading("vocab", "", round(rest), "implied", reason, 0.03))
        return self._keep(Reading("vocab", "", 50304, "assumed", "vocabulary of 50,304", 0.02))

    def _degrees(self, chips: int, chip: RunChip) -> tuple[tuple[int, int, int, int], float]:
        """Tensor, pipeline, context and data degrees; and the catalog's devices per device of the row."""
        tensor, pipeline = self._positive("tp"), self._positive("pp")
        context = self._optional("cp") or 1
        stated = self._optional("dp")
        ours = chip.chip.devices
        model = tensor * pipeline * context
        per_chip = self._optional("devices_per_chip") or ours
        if stated and stated * model == chips * ours:
            return (tensor, pipeline, context, stated), 1.0
        devices = chips * per_chip
        if devices % model:
            raise UnreadableError(f"{tensor} x {pipeline} x {context} ranks do not divide {devices} devices")
        data = devices // model
        if stated and stated != data:
            reason = f"{data} data-parallel ranks follow from {devices} devices; the row says {stated}"
            self._keep(Reading("dp", self._row["dp"], data, "assumed", reason, 0.05))
        return (tensor, pipeline, context, data), ours / per_chip

    def _layout(
        self, degrees: tuple[int, int, int, int], chips: int, framework: Framework, shape: ModelShape
    ) -> StepLayout:
        row, (tensor, pipeline, context, data) = self._row, degrees
        sequence = self._keep(read_sequence(row.get("seq_len")))
        accumulation = read_accumulation(row.get("notes") or "")
        micro_text = row.get("micro_batch")
        stated = 0.0 if is_unstated(micro_text) else parse_number(micro_text or "")
        devices = chips * (self._optional("devices_per_chip") or 1)
        batch = self._keep(
            read_global_batch(row.get("global_batch"), sequence, stated, data, accumulation, framework, devices)
        )
        # XLA programs split a sequence over devices; others need a sequence for every data-parallel rank.
        if batch < data and not framework.xla:
            raise UnreadableError("more data-parallel ranks than sequences")
        micro = self._keep(read_micro_batch(micro_text, framework, pipeline, batch / data, accumulation))
        virtual = self._virtual(pipeline, framework)
        sequence_parallel = self._flag("sp")
        if sequence_parallel is None:
            sequence_parallel = tensor > 1
            if tensor > 1 and not framework.xla:
                self._keep(Reading("sp", "", True, "assumed", "sequence parallelism", 0.03))
        recompute = self._keep(read_recompute(row.get("activation_ckpt")))
        zero = self._keep(read_zero(row.get("zero_stage"), row.get("framework") or "", framework.shards))
        layout = StepLayout(
            tensor, pipeline, context, data, virtual, zero, micro, batch, sequence, sequence_parallel, recompute
        )
        up = (1 + shape.gated) * shape.hidden * shape.intermediate
        kept = recompute == "full" and keeps_projections(row.get("activation_ckpt"))
        share = up / _block_weights(shape) if kept else 1.0
        return replace(layout, replicas=self._replicas(zero, data * context), recomputed_share=share)

    def _replicas(self, zero: int, ranks: int) -> int:
        """Copies of the sharded state; 1 where nothing is sharded.

        Raises:
            UnreadableError: they do not divide the data-parallel ranks.
        """
        stated = self._optional("replicas") or 1
        if ranks % stated:
            raise UnreadableError(f"{stated} replicas do not divide {ranks} data-parallel ranks")
        return self._keep(Reading("replicas", self._row.get("replicas") or "", stated if zero else 1))

    def _virtual(self, pipeline: int, framework: Framework) -> int:
        stated = self._optional("vpp")
        if stated or pipeline == 1:
            return stated or 1
        interleaves = framework.interleaves or "interleaved" in lower(self._row.get("framework"))
        layers = self._number("layers")
        virtual = _interleaving(layers, pipeline) if interleaves else 1
        reason = f"{virtual} stages per pipeline rank"
        return self._keep(Reading("vpp", "", virtual, "assumed", reason, 0.05))

    def _software(self, framework: Framework, chip: RunChip, schedule: PipelineWords) -> SoftwareProfile:
        row, family = self._row, chip.chip.family or "measured"
        name, precision = row.get("framework") or "", row.get("precision") or ""
        xla_chip = CHIP_FAMILIES[family if family in CHIP_FAMILIES else "measured"].compiled
        xla = xla_chip or framework.xla
        known = replace(framework, xla=xla)
        version, kernel = row.get("framework_version") or "", lower(row.get("attention_kernel")).replace("_", " ")
        date = find_date(name, version, row.get("notes"), row.get("where"), row.get("published"))
        named = f"{name} {version} {kernel} {row.get('notes') or ''}"
        attention = self._keep(read_attention(known, named, precision, date, family))
        compiled = self._compiled(name)
        materialized = attention == MATERIALIZED_SCORES and not xla  # a sign of programs before 2022
        eight_bit = self._keep(read_eight_bit(precision))
        sixteen = framework.sixteen_bit_sums or materialized or _SIXTEEN_BIT_SUMS.search(lower(precision)) is not None
        return SoftwareProfile(
            attention=attention,
            fused=framework.fused or xla or compiled or is_fused(name),
            eager=not (xla or compiled),
            # A chip's compiler schedules collectives of TPUs beside their products; others need a framework that does.
            overlaps_tensor=framework.overlaps_tensor or family == "tpu" or is_async_tensor(name),
            # XLA programs for GPUs run collectives between their kernels, without overlap.
            overlaps_data=not materialized and (xla_chip or not xla),
            overlaps_context=True,
            eight_bit=eight_bit,
            gradient_bytes=2 if sixteen else 4,
            balances_stages=schedule.balances_stages,
            divides_head=schedule.divides_head,
        )

    def _compiled(self, framework: str) -> bool:
        """True if torch, or another compiler of whole programs, compiles the blocks."""
        text = lower(self._row.get("compiled"))
        if is_unstated(text):
            return is_compiled(framework)
        return text in _YES or re.fullmatch(r"xla|graph", text) is not None or (text not in _NO and is_compiled(text))

    def _device(self, chip: RunChip, chips: int, chips_per_node: int, scale: float) -> DeviceSpec:
        instance = chip.instance
        tpu = chip.chip.family == "tpu"
        if chips_per_node and chips_per_node != instance.chips and instance.domain <= instance.chips and not tpu:
            share = chips_per_node / instance.chips
            domain = min(instance.domain, chips_per_node) if share < 1 else chips_per_node
            changes = {"chips": chips_per_node, "domain": domain, "network": instance.network * share}
            instance = instance.model_copy(update=changes)
        device = instance_device(chip.chip, instance)
        network = self._network(chip, chips, instance.chips, device.network_rate)
        domain = device.domain
        if tpu:
            # A slice is one fast-link domain; slices communicate over the data centre's network.
            domain = max(1, chips * chip.chip.devices // max(1, network.slices))
        elif network.domain > 1:
            domain = network.domain * chip.chip.devices
        changed = replace(
            device,
            reached=device.reached * chip.speed,
            reached_eight_bit=device.reached_eight_bit * chip.speed,
            network_rate=network.rate or device.network_rate,
            domain=domain,
        )
        return changed if scale == 1 else _divided(changed, scale)

    def _network(self, chip: RunChip, chips: int, chips_per_node: int, usual: float) -> Network:
        text = self._row.get("interconnect")
        name = lower(chip.chip.name).split()[0]
        single = chips <= max(chips_per_node, chip.instance.domain)
        try:
            network = read_network(text, name, chips_per_node, usual)
        except UnreadableError as error:
            if single:
                return Network()
            reason = f"{error}: the catalog's network of {chip.instance.name}"
            spread = 0.0 if chip.chip.family == "tpu" else _UNKNOWN_NETWORK
            return self._keep(Reading("interconnect", text or "", Network(), "assumed", reason, spread))
        spread = 0.03 if network.sure != "stated" and not single else 0.0
        return self._keep(Reading("interconnect", text or "", network, network.sure, network.reason, spread))


def _block_weights(shape: ModelShape) -> int:
    """Elements of the weight matrices of one layer."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return attention + (2 + shape.gated) * shape.hidden * shape.intermediate


def _interleaving(layers: int, pipeline: int) -> int:
    """Stages per rank: the largest divisor of its layers up to six."""
    if pipeline == 1 or layers % pipeline:
        return 1
    return max(count for count in range(1, 7) if layers // pipeline % count == 0)


def _divided(device: DeviceSpec, scale: float) -> DeviceSpec:
    """The device for rows that count other devices per chip than the catalog, as NeuronCores one by one."""
    names = ("peak", "peak_eight_bit", "memory_bytes", "memory_rate", "link_rate")
    rates = {name: getattr(device, name) * scale for name in names}
    return replace(
        device,
        **rates,
        domain=round(device.domain / scale),
        per_instance=round(device.per_instance / scale),
        per_chip=round(device.per_chip / scale),
    )
