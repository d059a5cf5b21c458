"""Fault injection: make a run fail where its recipe says, to test its recovery.

    faults of the recipe --phase observer--> kill, stop, hang, ... in that step, phase and rank, once in the run
                         --spike-----------> gradients of some samples times 1000, whenever these samples are read

A fault is recorded on disk before it happens, so a run that is restarted by the same command does not meet it again. A
spike belongs to samples, like a bad document, and recurs with them.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hlat.config import BatchSchedule, FaultConfig
from hlat.model import LocalParameter
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.storage.run_folder import OnceMarkers

# Faults of the disk that checkpoints are written to; ``hlat.training.faulty_disk`` injects them.
STORAGE_FAULTS = ("enospc", "eio", "torn_write", "corrupt", "slow_disk", "unavailable")

_SPIKE_FACTOR = 1000.0
_UNUSED_TAG = 4711  # tag of a message that is never sent
_TOO_MANY_BYTES = 1 << 50  # a PiB: no device has it


class InjectedFault(RuntimeError):
    """Exception that a fault of kind ``exception`` raises."""


class FaultInjector:
    """Injects the faults of one rank, a phase observer; ``folder`` records those that have happened."""

    def __init__(
        self,
        faults: Sequence[FaultConfig],
        ranks: HostGroup,
        folder: Path,
        batches: BatchSchedule,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        numbered = [(number, fault) for number, fault in enumerate(faults) if fault.kind not in STORAGE_FAULTS]
        self._spikes = [fault for _, fault in numbered if fault.kind == "spike"]
        self._own_faults = [(n, fault) for n, fault in numbered if fault.rank == ranks.rank and fault.kind != "spike"]
        self._ranks, self._once, self._batches, self._sleep = ranks, OnceMarkers(folder), batches, sleep
        self._held: Sequence[LocalParameter] = ()
        self._step, self._samples = 0, 0

    def set_parameters(self, held: Sequence[LocalParameter]) -> None:
        self._held = held

    def begin_step(self, step: int, samples: int) -> None:
        """Record that a step begins: its number, counted from 1, and the first global sample of its batch."""
        self._step, self._samples = step, samples

    def __call__(self, phase: str) -> None:
        for number, fault in self._own_faults:
            # A fault of kind nan needs gradients, which exist when they are reduced.
            if phase != ("reduce" if fault.kind == "nan" else fault.phase):
                continue
            if fault.kind == "slow":
                if fault.at_step <= self._step < fault.at_step + fault.steps:
                    self._sleep(fault.seconds)
            elif self._step == fault.at_step and self._once.claim(f"{number}-{fault.kind}"):
                self._inject(fault)
        # Their samples are those of this step's batch.
        if phase == "reduce" and any(self._samples in self._batches.batch(it.at_step - 1) for it in self._spikes):
            for held in self._held:
                if held.gradient is not None:
                    held.gradient.mul_(_SPIKE_FACTOR)

    def _inject(self, fault: FaultConfig) -> None:
        if fault.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.kind])
        elif fault.kind == "hang":
            self._sleep(fault.seconds)
        elif fault.kind == "deadlock":
            self._deadlock()
        elif fault.kind == "exception":
            raise InjectedFault(f"injected at step {fault.at_step} on rank {fault.rank}")
        elif fault.kind == "oom":
            torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8, device=self._held[0].tensor.device)
        elif fault.kind == "nan":
            next(held.gradient for held in self._held if held.gradient is not None).view(-1)[0] = float("nan")
        else:
            assert fault.kind == "bitflip", fault.kind
            _flip_bit(self._held[0].tensor)

    def _deadlock(self) -> None:
        assert self._ranks.group is not None, "the recipe's validation requires several ranks for a deadlock"
        # As if ranks disagreed on the next operation: a message that is never sent.
        dist.recv(torch.empty(1), group=self._ranks.group, group_src=1 - min(self._ranks.rank, 1), tag=_UNUSED_TAG)


_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "sigterm": signal.SIGTERM,
    "sigusr1": signal.SIGUSR1,
}


def _flip_bit(tensor: torch.Tensor) -> None:
    integers = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    # The highest bit of the mantissa: a change too small to be noticed, and always finite.
    bit = {torch.float32: 22, torch.bfloat16: 6}[tensor.dtype]
    integers.view(-1)[0] ^= 1 << bit
