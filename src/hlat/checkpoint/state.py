"""The state of a run as named tensors that know no layout and no coalescing.

    held parameters, AdamW --collect--> blocks of model.<name>, optimizer.exp_avg.<name>, optimizer.exp_avg_sq.<name>,
                                        optimizer.step, rng.<source>
    checkpoint --restore--> held parameters and AdamW, in any layout, coalesced or not, in place

With bf16-kahan there is optimizer.compensation.<name> too. Every tensor is saved in the dtype that it has.

``<name>`` is the canonical, Hugging Face name of a parameter. A process saves the blocks of it that it holds and owns,
and reads the blocks that it holds. Learning rate, betas and weight decay are not state: they follow from the recipe and
the step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hlat.checkpoint.format import Region, TensorChunk, replicated_chunks
from hlat.checkpoint.protocol import Checkpoint, open_on_all_ranks, resolve
from hlat.config.sections import ModelConfig
from hlat.model import HeldParameter
from hlat.model.derived import Piece
from hlat.model.hf import canonical_shapes
from hlat.optim import state_tensors
from hlat.runtime.distributed import HostGroup
from hlat.runtime.randomness import rng_state, set_rng_state

MODEL = "model."
OPTIMIZER = "optimizer."
STEP = OPTIMIZER + "step"
RNG = "rng."

_READ_BYTES = 1 << 30


def collect(
    config: ModelConfig, held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer | None = None
) -> list[TensorChunk]:
    """What this process has to save of everything that defines a run; of the weights alone without an optimizer.

    Blocks are views of the live tensors: use them before the next step.

    Args:
        config: the whole model.
        held: what this process holds of it.
        optimizer: over the parameters of ``held``.

    Returns:
        The blocks that this process owns, and those that every process has. The blocks of all processes together
        are every tensor, each element once.
    """
    shapes = canonical_shapes(config)
    parts = _weights(held) if optimizer is None else [*_weights(held), *_states(held, optimizer)]
    chunks = [
        TensorChunk(part.prefix + piece.name, shapes[piece.name], _offsets(part.held, piece), tuple(part.rows(piece)))
        for part in parts
        if part.held.owned
        for piece in part.held.pieces()
        if piece.owned
    ]
    if optimizer is None:
        return chunks
    step = torch.tensor(int(_step(held, optimizer)), dtype=torch.int64)
    return chunks + replicated_chunks({STEP: step} | {RNG + name: tensor for name, tensor in rng_state().items()})


def restore(
    checkpoint: Checkpoint,
    config: ModelConfig,
    held: Sequence[HeldParameter],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Put a saved state back, bit for bit; the inverse of ``collect``. Without an optimizer, the weights alone.

    Only what is held is read, a few parameters at a time: besides the state itself about 2 GiB are in memory.

    Raises:
        CheckpointError: lists every tensor that is missing, or differs in shape or dtype; nothing was changed then.
    """
    parts = _weights(held) if optimizer is None else [*_weights(held), *_states(held, optimizer)]
    forms = _forms(config, parts)
    if optimizer is not None:
        forms[STEP] = torch.empty((), dtype=torch.int64, device="meta")
    checkpoint.check(forms)
    _read(checkpoint, parts)
    if optimizer is not None:
        step = checkpoint.read([STEP])[STEP]
        for entry in optimizer.state.values():
            entry["step"].fill_(step.item())
        set_rng_state(checkpoint.load(RNG))


def load_weights(
    path: Path, config: ModelConfig, held: Sequence[HeldParameter], ranks: HostGroup | None = None
) -> None:
    """Fill parameters with the weights of a checkpoint, whatever run or import they come from. Collective.

    Weights are converted to the dtype of the parameters; bf16 to fp32 is exact.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder; rank 0 finds and verifies it.
        config: the whole model.
        held: what this process holds of it; filled in place.
        ranks: the processes that load together; None for this one alone.

    Raises:
        CheckpointError: nothing whole there, or the weights do not fit the model.
    """
    ranks = ranks or HostGroup()
    checkpoint = open_on_all_ranks(ranks.run_on_rank0(lambda: resolve(path)), ranks)
    ranks.run_on_all(lambda: fill(checkpoint, config, held))


def fill(checkpoint: Checkpoint, config: ModelConfig, held: Sequence[HeldParameter]) -> None:
    """``load_weights`` of this process from a checkpoint that was opened already."""
    parts, saved = _weights(held), checkpoint.tensors
    checkpoint.check(
        {
            name: torch.empty_like(form, dtype=saved[name].dtype) if name in saved else form
            for name, form in _forms(config, parts).items()
        }
    )
    _read(checkpoint, parts)


@dataclass(frozen=True)
class _Part:
    """Local rows, of the weight or of a state of the optimizer, that are saved under a prefix."""

    prefix: str
    held: HeldParameter
    tensor: torch.Tensor

    def rows(self, piece: Piece) -> list[torch.Tensor]:
        return self.held.rows_of(piece, self.tensor)


def _weights(held: Sequence[HeldParameter]) -> list[_Part]:
    return [_Part(MODEL, one, one.tensor) for one in held]


def _states(held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer) -> list[_Part]:
    """What the optimizer keeps of each parameter, created as its first step would where it does not exist."""
    return [
        _Part(f"{OPTIMIZER}{name}.", one, tensor)
        for name, tensors in state_tensors(optimizer, held).items()
        for one, tensor in zip(held, tensors, strict=True)
    ]


def _step(held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer) -> float:
    steps = {float(optimizer.state[one.parameter]["step"]) for one in held}
    assert len(steps) == 1, "every parameter takes part in every step"
    return steps.pop()


def _offsets(held: HeldParameter, piece: Piece) -> tuple[int, ...]:
    """Where a piece begins in its canonical tensor."""
    return (piece.canonical_start, held.layout.first_column) if held.layout.columns else (piece.canonical_start,)


def _forms(config: ModelConfig, parts: Sequence[_Part]) -> dict[str, torch.Tensor]:
    """The saved tensors that parts belong to, whole, on the meta device."""
    shapes = canonical_shapes(config)
    return {
        part.prefix + name: torch.empty(shapes[name], dtype=part.tensor.dtype, device="meta")
        for part in parts
        for name in part.held.layout.canonical_shapes
    }


def _read(checkpoint: Checkpoint, parts: Sequence[_Part]) -> None:
    for group in _groups(parts):
        regions = [
            Region(part.prefix + piece.name, _offsets(part.held, piece), (piece.rows, *part.held.layout.columns))
            for part, piece in group
        ]
        for (part, piece), saved in zip(group, checkpoint.read_regions(regions), strict=True):
            rows = part.rows(piece)
            for ours, theirs in zip(rows, saved.split([row.shape[0] for row in rows]), strict=True):
                ours.copy_(theirs)


def _groups(parts: Sequence[_Part]) -> Iterator[list[tuple[_Part, Piece]]]:
    """The pieces to be read, about ``_READ_BYTES`` at a time; a larger tensor comes in several."""
    group: list[tuple[_Part, Piece]] = []
    size = 0
    for part in parts:
        row = math.prod(part.held.layout.columns) * part.tensor.element_size()
        step, first = max(1, _READ_BYTES // row), part.held.first_row
        for start in range(first, first + part.tensor.shape[0], step):
            stop = min(start + step, first + part.tensor.shape[0])
            if group and size + (stop - start) * row > _READ_BYTES:
                yield group
                group, size = [], 0
            group += [(part, piece) for piece in part.held.layout.pieces(start, stop)]
            size += (stop - start) * row
    if group:
        yield group
