"""Faults on purpose: a run is made to fail where its recipe says, so that its recovery can be seen before it is needed.

    faults of the recipe --observer of phases--> kill, stop, hang, ... in that step, phase and rank, once in the run
                         --spoil---------------> gradients of some samples a thousandfold, whenever they are read

A fault that ends the process is marked on disk before it happens: the run that is restarted by the same command does
not meet it again. A spike belongs to samples, as a bad document does, and comes back with them.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hlat.config.sections import FaultConfig
from hlat.model import HeldParameter
from hlat.runtime.distributed import HostGroup
from hlat.runtime.storage import OnceMarkers

STORAGE_FAULTS = ("enospc", "eio", "torn_write", "corrupt", "slow_disk", "unavailable")
"""Faults of the disk that checkpoints are written to; training injects them there."""

_SPIKE = 1000.0
_NOBODY_SENDS = 4711  # the tag of a message that never comes
_IMPOSSIBLE_BYTES = 1 << 50


class InjectedFault(RuntimeError):
    """An exception that was asked for."""


class Faults:
    """The faults of one rank. An observer of phases.

    Args:
        faults: of the recipe.
        ranks: the processes of the run.
        folder: where it is kept which have happened.
        global_batch: sequences of a step.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        faults: Sequence[FaultConfig],
        ranks: HostGroup,
        folder: Path,
        global_batch: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        numbered = [(number, fault) for number, fault in enumerate(faults) if fault.kind not in STORAGE_FAULTS]
        self._spikes = [fault for _, fault in numbered if fault.kind == "spike"]
        self._mine = [(n, fault) for n, fault in numbered if fault.rank == ranks.rank and fault.kind != "spike"]
        self._ranks, self._once, self._global_batch, self._sleep = ranks, OnceMarkers(folder), global_batch, sleep
        self._held: Sequence[HeldParameter] = ()
        self._step, self._samples = 0, 0

    def attach(self, held: Sequence[HeldParameter]) -> None:
        """Say what this rank holds of the model."""
        self._held = held

    def begin_step(self, step: int, samples: int) -> None:
        """A step begins, counted from 1, that reads the global batch from this sample on."""
        self._step, self._samples = step, samples

    def __call__(self, phase: str) -> None:
        """A phase begins."""
        for number, fault in self._mine:
            if fault.kind == "slow":
                if phase == fault.phase and fault.at_step <= self._step < fault.at_step + fault.steps:
                    self._sleep(fault.seconds)
            elif self._step == fault.at_step and phase == _place(fault) and self._once.claim(f"{number}-{fault.kind}"):
                self._happen(fault)
        if phase == "reduce" and any(self._spoils(fault) for fault in self._spikes):
            self._scale_gradients()

    def _happen(self, fault: FaultConfig) -> None:
        if fault.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.kind])
        elif fault.kind == "hang":
            self._sleep(fault.seconds)
        elif fault.kind == "deadlock":
            self._wait_for_nobody()
        elif fault.kind == "exception":
            raise InjectedFault(f"injected at step {fault.at_step} on rank {fault.rank}")
        elif fault.kind == "oom":
            torch.empty(_IMPOSSIBLE_BYTES, dtype=torch.uint8, device=self._held[0].tensor.device)
        elif fault.kind == "nan":
            next(one.gradient for one in self._held if one.gradient is not None).view(-1)[0] = float("nan")
        else:
            assert fault.kind == "bitflip", fault.kind
            _flip(self._held[0].tensor)

    def _wait_for_nobody(self) -> None:
        """As where ranks disagree on what they do next: this one waits for a message, the others for this one."""
        assert self._ranks.group is not None, "the recipe's rules ask for several ranks"
        dist.recv(torch.empty(1), group=self._ranks.group, group_src=1 - min(self._ranks.rank, 1), tag=_NOBODY_SENDS)

    def _spoils(self, fault: FaultConfig) -> bool:
        first = (fault.at_step - 1) * self._global_batch
        return first <= self._samples < first + self._global_batch

    def _scale_gradients(self) -> None:
        for one in self._held:
            if one.gradient is not None:
                one.gradient.mul_(_SPIKE)


_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "sigterm": signal.SIGTERM,
    "sigusr1": signal.SIGUSR1,
}


def _place(fault: FaultConfig) -> str:
    """The phase in which a fault happens: gradients are there to be spoiled when they are about to be added up."""
    return "reduce" if fault.kind == "nan" else fault.phase


def _flip(tensor: torch.Tensor) -> None:
    """Turn over the largest bit of the first element's fraction: too small a change to be seen, and never infinite."""
    integers = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    bit = {torch.float32: 22, torch.bfloat16: 6}[tensor.dtype]
    integers.view(-1)[0] ^= 1 << bit
