"""The state of a run as named tensors, independent of parallel layout and of fused parameters.

    local parameters, optimizer --collect--> chunks of model.<name>, optimizer.<state>.<name>, optimizer.step,
                                             rng.<source>
    ExtraState ----------------------------> chunks of <its name>.<name>, such as ema.<name>
    checkpoint --restore--> local parameters, optimizer and extra states, updated in place, in any layout, fused or not

``<state>`` is exp_avg and exp_avg_sq for AdamW, and compensation in bf16-kahan: the optimizer names the states that a
parameter has. Every tensor is saved in its own dtype.

``<name>`` is the canonical (Hugging Face) name of a parameter. A process saves the chunks that it owns, and reads the
chunks that it stores. Learning rate, betas and weight decay are not saved: they follow from the recipe and the step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hlat.checkpoint.format.tensor_files import Region, TensorChunk, replicated_chunks
from hlat.checkpoint.protocol.reader import Checkpoint
from hlat.config import ModelConfig
from hlat.model import LocalParameter, RowBlock, canonical_shapes
from hlat.optim import Optimizer
from hlat.runtime.randomness import rng_state, set_rng_state

MODEL = "model."
OPTIMIZER = "optimizer."
RNG = "rng."
_OWN_NAMES = ("model", "optimizer", "rng", "data")

_READ_BYTES = 1 << 30  # held in memory while they are copied


@dataclass(frozen=True)
class ExtraState:
    """State of a run besides weights, optimizer and RNG, such as an average of the weights."""

    name: str  # first part of the tensors' names in the checkpoint
    # For each local parameter, in order, a tensor of the shape of its local rows, in any dtype; stored as
    # ``<name>.<canonical name>`` and loaded in any layout. Empty if there are none.
    by_parameter: Sequence[torch.Tensor] = ()
    # Tensors that are the same on every rank; stored as ``<name>.<name of the tensor>``.
    replicated: Mapping[str, torch.Tensor] = field(default_factory=dict)


def collect(
    config: ModelConfig,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer | None = None,
    extra: Sequence[ExtraState] = (),
) -> list[TensorChunk]:
    """Collect the state that this process saves: weights, optimizer state, RNG states and extra states.

    Returns the chunks that this process owns, and the replicated ones; counting these once, those of all processes
    cover every tensor exactly once. They are views of the live tensors and must be used before the next step.
    ``optimizer`` None collects the weights only; ``extra`` is saved only with an optimizer.
    """
    shapes = canonical_shapes(config)
    local_tensors = _local_tensors(parameters, optimizer, extra)
    chunks = [
        TensorChunk(
            local.prefix + row_block.name,
            shapes[row_block.name],
            _offsets(local.parameter, row_block),
            tuple(local.rows(row_block)),
        )
        for local in local_tensors
        if local.parameter.owned
        for row_block in local.parameter.row_blocks()
        if row_block.owned
    ]
    if optimizer is None:
        return chunks
    numbers = {OPTIMIZER + name: number for name, number in optimizer.numbers().items()}
    replicated = numbers | {RNG + name: tensor for name, tensor in rng_state().items()}
    for state in extra:
        replicated |= {f"{state.name}.{name}": tensor for name, tensor in state.replicated.items()}
    return chunks + replicated_chunks(replicated)


def restore(
    checkpoint: Checkpoint,
    config: ModelConfig,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer | None = None,
    extra: Sequence[ExtraState] = (),
) -> None:
    """Load a saved state in place, bit for bit; the inverse of ``collect``.

    Only the rows stored on this rank are read, a few parameters at a time, in about 2 GiB of additional memory. All of
    ``extra`` has to be in the checkpoint (see ``extra_names``).

    Raises:
        CheckpointError: tensors are missing, or differ in shape or dtype; lists them. Nothing has been changed.
    """
    local_tensors = _local_tensors(parameters, optimizer, extra)
    expected = _full_tensors(config, local_tensors)
    if optimizer is not None:
        expected |= {OPTIMIZER + name: number.to("meta") for name, number in optimizer.numbers().items()}
    replicated = {f"{state.name}.{name}": tensor for state in extra for name, tensor in state.replicated.items()}
    expected |= replicated
    # Before the first change, so that a checkpoint that does not fit changes nothing.
    checkpoint.check(expected)
    _read(checkpoint, local_tensors)
    if optimizer is not None:
        numbers = checkpoint.read([OPTIMIZER + name for name in optimizer.numbers()])
        optimizer.load_numbers({name.removeprefix(OPTIMIZER): number for name, number in numbers.items()})
        set_rng_state(checkpoint.load(RNG))
    for name, saved in checkpoint.read(replicated).items():
        replicated[name].copy_(saved)


def extra_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the extra states that a checkpoint has."""
    return {name.partition(".")[0] for name in checkpoint.tensors} - set(_OWN_NAMES)


def fill(
    checkpoint: Checkpoint, config: ModelConfig, parameters: Sequence[LocalParameter], prefix: str = MODEL
) -> None:
    """Load weights (tensors with ``prefix``) into local parameters, in place, converted to their dtype.

    Raises:
        CheckpointError: they do not fit the model.
    """
    local_tensors, saved = _weights(parameters, prefix), checkpoint.tensors
    checkpoint.check(
        {
            # Any dtype fits: it is converted while it is copied.
            name: torch.empty_like(tensor, dtype=saved[name].dtype) if name in saved else tensor
            for name, tensor in _full_tensors(config, local_tensors).items()
        }
    )
    _read(checkpoint, local_tensors)


@dataclass(frozen=True)
class _LocalTensor:
    """Local rows of a weight, or of a state of its shape, which are saved under a prefix."""

    prefix: str
    parameter: LocalParameter
    tensor: torch.Tensor

    def rows(self, row_block: RowBlock) -> list[torch.Tensor]:
        return self.parameter.row_views(row_block, self.tensor)


def _local_tensors(
    parameters: Sequence[LocalParameter], optimizer: Optimizer | None, extra: Sequence[ExtraState]
) -> list[_LocalTensor]:
    if optimizer is None:
        return _weights(parameters)
    kept = [
        _LocalTensor(f"{state.name}.", parameter, tensor)
        for state in extra
        if state.by_parameter
        for parameter, tensor in zip(parameters, state.by_parameter, strict=True)
    ]
    return [*_weights(parameters), *_states(parameters, optimizer), *kept]


def _weights(parameters: Sequence[LocalParameter], prefix: str = MODEL) -> list[_LocalTensor]:
    return [_LocalTensor(prefix, parameter, parameter.tensor) for parameter in parameters]


def _states(parameters: Sequence[LocalParameter], optimizer: Optimizer) -> list[_LocalTensor]:
    """Optimizer states of the parameters; missing ones are created, as the optimizer's first step would."""
    return [
        _LocalTensor(f"{OPTIMIZER}{name}.", parameter, tensor)
        for name, tensors in optimizer.state_tensors(parameters).items()
        for parameter, tensor in zip(parameters, tensors, strict=True)
        if tensor is not None
    ]


def _offsets(parameter: LocalParameter, row_block: RowBlock) -> tuple[int, ...]:
    return (
        (row_block.canonical_start, parameter.layout.first_column)
        if parameter.layout.columns
        else (row_block.canonical_start,)
    )


def _full_tensors(config: ModelConfig, local_tensors: Sequence[_LocalTensor]) -> dict[str, torch.Tensor]:
    """Full tensors in the checkpoint that the local tensors belong to, by name, on the meta device."""
    shapes = canonical_shapes(config)
    return {
        local.prefix + name: torch.empty(shapes[name], dtype=local.tensor.dtype, device="meta")
        for local in local_tensors
        for name in local.parameter.layout.canonical_shapes
    }


def _read(checkpoint: Checkpoint, local_tensors: Sequence[_LocalTensor]) -> None:
    for group in _groups(local_tensors):
        regions = [
            Region(
                local.prefix + row_block.name,
                _offsets(local.parameter, row_block),
                (row_block.rows, *local.parameter.layout.columns),
            )
            for local, row_block in group
        ]
        for (local, row_block), saved in zip(group, checkpoint.read_regions(regions), strict=True):
            copy_rows(local.rows(row_block), saved)


def copy_rows(views: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """Copy consecutive rows into the views that store them."""
    for target, rows in zip(views, source.split([view.shape[0] for view in views]), strict=True):
        target.copy_(rows)


def _groups(local_tensors: Sequence[_LocalTensor]) -> Iterator[list[tuple[_LocalTensor, RowBlock]]]:
    """Groups of row blocks to be read together, about ``_READ_BYTES`` each; a larger tensor is split."""
    group: list[tuple[_LocalTensor, RowBlock]] = []
    size = 0
    for local in local_tensors:
        row = math.prod(local.parameter.layout.columns) * local.tensor.element_size()
        step, first = max(1, _READ_BYTES // row), local.parameter.first_row
        for start in range(first, first + local.tensor.shape[0], step):
            stop = min(start + step, first + local.tensor.shape[0])
            if group and size + (stop - start) * row > _READ_BYTES:
                yield group
                group, size = [], 0
            group += [(local, row_block) for row_block in local.parameter.layout.row_blocks(start, stop)]
            size += (stop - start) * row
    if group:
        yield group
