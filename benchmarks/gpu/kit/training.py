"""Training steps through hlat's own functions, on random tokens: build, accumulate gradients, update.

recipe, device --Trainer--> step() -> loss, gradient norm, seconds
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hlat.config import Recipe
from hlat.data.samples.training_data import Batch
from hlat.optim import build_optimizer
from hlat.parallel import build_parallel
from hlat.resilience import APPLY
from hlat.runtime.backend.device import configure_numerics, synchronize
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import Runtime, join_run
from hlat.training import accumulate_gradients, update
from kit.shapes import documents

SEED = 1


@dataclass(frozen=True)
class StepTime:
    """Result of one step: seconds with all work of the device done, loss and gradient norm in full precision."""

    seconds: float
    loss: float
    norm: float


class Trainer:
    """A model and its optimizer, ready to train on random tokens: every step has the same batch.

    Args:
        recipe: the recipe.
        device: device to compute on; None for that of the recipe, joined as a run does.
        dtype: dtype of weights and activations; None for those of the precision mode.
    """

    def __init__(self, recipe: Recipe, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        self.recipe = recipe
        run = recipe.run
        if device is None:
            self.runtime = join_run(run.device, run.deterministic, None, run.compile_cache)
        else:
            configure_numerics(device, run.deterministic)
            self.runtime = Runtime(device)
        self.device = self.runtime.device
        self.model = build_parallel(recipe, self.runtime, SEED, dtype)
        self.optimizer = build_optimizer(
            self.model.local_parameters, recipe.optimizer, recipe.precision.mode, SEED, self.model.matrices
        )
        self._batch, self._steps = random_batch(recipe), 0

    def gradients(self) -> torch.Tensor:
        """Compute the gradients of a step; return the loss."""
        return accumulate_gradients(self.model, self._batch)

    def step(self) -> StepTime:
        """Do one step, as the loop does it: the host reads loss and norm before the update."""
        seen: list[float] = []

        def check(loss: float, norm: float) -> Any:
            seen.extend((loss, norm))
            return APPLY

        self._steps += 1
        synchronize(self.device)
        began = time.perf_counter()
        update(self.model, self.optimizer, self.recipe, self._steps, self.gradients(), check)
        synchronize(self.device)
        return StepTime(time.perf_counter() - began, *seen)

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """Return a copy of all gradients on the CPU, in float64, by the name of the parameter."""
        held = zip(self.names, self.model.local_parameters, strict=True)
        return {name: each.gradient.detach().cpu().double() for name, each in held if each.gradient is not None}

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in order; those of one layer differ from those of the next."""
        return [f"{number} {each.name}" for number, each in enumerate(self.model.local_parameters)]

    def digest(self) -> str:
        """Return a digest of the bits of all weights, the same on every device."""
        from hlat.resilience.replica_check import digest

        return "-".join(f"{int(digest(each.tensor.detach())) & 0xFFFF_FFFF_FFFF_FFFF:x}" for each in self._held())

    def _held(self) -> list[Any]:
        return list(self.model.local_parameters)


def random_batch(recipe: Recipe) -> Batch:
    """Return random tokens, the same for each recipe of these sizes; every label is the next token."""
    rows, length = recipe.batch.global_batch, recipe.data.sequence_length
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, recipe.model.vocab_size, (rows, length + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), np.arange(rows), documents(recipe, rows))


@contextmanager
def quick_compiler(device: str) -> Iterator[None]:
    """Let torch.compile stop before machine code on a CPU: graphs are traced as everywhere, C++ takes too long."""
    backend = backend_of(device)
    if not backend.is_everywhere:
        yield
        return
    with patch.object(type(backend), "compile_backend", "aot_eager"):
        yield


def memory(device: torch.device) -> dict[str, float]:
    """Return allocated and reserved memory at the peak, in GiB, and how often the allocator had to try again."""
    statistics = getattr(torch.get_device_module(device), "memory_stats", None)
    found = statistics(device) if statistics is not None and device.type != "cpu" else {}
    if not found:
        return {"peak_allocated_gib": backend_of(device).peak_memory_bytes(device) / 2**30}
    return {
        "peak_allocated_gib": found.get("allocated_bytes.all.peak", 0) / 2**30,
        "peak_reserved_gib": found.get("reserved_bytes.all.peak", 0) / 2**30,
        "allocator_retries": found.get("num_alloc_retries", 0),
        "allocator_ooms": found.get("num_ooms", 0),
    }


def forget_peaks(device: torch.device) -> None:
    """Begin to count the peak of memory again."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def device_of(name: str) -> torch.device:
    """Return the device of a type, the only one."""
    return torch.device(name)


def folder(work: Path, name: str) -> Path:
    """Make a folder for files of a step, empty."""
    import shutil

    path = work / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
