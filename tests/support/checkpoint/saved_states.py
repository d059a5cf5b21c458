"""Small states whose bits all depend on the step, so that a mixture of two steps is detected."""

from collections.abc import Iterable
from pathlib import Path

import torch

from hlat.checkpoint.format.tensor_files import TensorChunk, replicated_chunks
from hlat.checkpoint.protocol.reader import Checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, shapes (empty and scalar too) and layouts (a view of a larger storage)."""
    generator = torch.Generator().manual_seed(step)
    wide = torch.randn(6, 10, generator=generator)
    return {
        "model.weight": torch.randn(5, 7, generator=generator),
        "model.view": wide[1:4, ::2],
        "model.half": torch.randn(9, generator=generator).bfloat16(),
        "model.large": torch.randn(20_000, generator=generator),  # more than a file's write buffer
        "model.none": torch.empty(0, 3),
        "optimizer.exp_avg.weight": torch.randn(5, 7, generator=generator, dtype=torch.float64),
        "optimizer.step": torch.tensor(step),
        "rng.torch": torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8),
    }


def save(store: CheckpointStore, step: int, files: dict[str, Path] | None = None) -> Path:
    return store.save(step, replicated_chunks(state(step)), {"step": step, "text": f"é{step}"}, files)


def assemble(*processes: Iterable[TensorChunk]) -> dict[str, torch.Tensor]:
    """Assemble tensors from the chunks of some processes, and check that they cover each element exactly once."""
    tensors: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for rank, chunks in enumerate(processes):
        for chunk in chunks:
            if chunk.replicated and rank > 0:
                continue
            tensor = tensors.setdefault(chunk.name, torch.empty(chunk.shape, dtype=chunk.dtype))
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[region] = chunk.tensor()
            times.setdefault(chunk.name, torch.zeros(chunk.shape, dtype=torch.int8))[region] += 1
    for name, count in times.items():
        assert count.eq(1).all(), f"{name}: elements saved {count.unique().tolist()} times"
    return tensors


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Check that names, dtypes, shapes and bits are equal, including NaN payloads and signed zeros."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert _bytes(tensor) == _bytes(right[name]), name


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_is_step(checkpoint: Checkpoint | None, step: int) -> None:
    """Check that the checkpoint has exactly the state of that step."""
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.meta == {"step": step, "text": f"é{step}"}
    assert_equal(checkpoint.load(""), state(step))
