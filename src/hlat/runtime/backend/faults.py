"""Faults that devices report, and dumps of the library of collectives when a run hangs.

    text of a log or of the kernel --find_fault--> DeviceFault: meaning, advice, and if another worker is to blame
    dmesg, nvidia-smi, neuron-monitor --device_reports--> faults, in words

    detector: patience, prefixes of files --HangLimits--> library of a rank
        hang found --request_dumps--> pipe of each rank --> library --> dump files
        a collective waits longer than that ----------------> library -----^
    dump files --collect_dumps--> folder of the incident

To teach hlat the faults of an accelerator, write a module with a ``FaultTable`` and add it to ``FAULT_TABLES``
(``nvidia_faults.py`` and ``neuron_faults.py`` are there). Supervisors and host checks use these modules, which do not
import torch.
"""

import os
import re
import selectors
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path

FAULT_TABLES = ("hlat.runtime.backend.nvidia_faults", "hlat.runtime.backend.neuron_faults")
"""Modules whose ``FAULTS`` is a table."""


@dataclass(frozen=True)
class DeviceFault:
    """A fault that a device or its runtime reports."""

    name: str  # name in the runtime's documentation
    meaning: str  # what happened, without a full stop
    advice: str  # what to do, without a full stop
    # True if the fault is probably that of another worker, for which this one waited in vain
    is_consequence: bool = False
    # False if a program may cause it on a sound machine; a check of the machine then ignores it
    is_hardware: bool = True
    recurs: bool = False  # True if the same program on the same devices would fail again

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning}. {self.advice}."


@dataclass(frozen=True)
class FaultTable:
    """Faults of one kind of accelerator, as its software reports them."""

    # faults by every text that stands for one: a name, or a number that ``pattern`` finds; worst first
    faults: Mapping[str, DeviceFault]
    pattern: re.Pattern[str]  # finds such texts in a log; its groups are the texts
    kernel_pattern: re.Pattern[str]  # likewise for the kernel's messages
    monitor: Sequence[str]  # command that prints the state of all devices of a machine
    read_monitor: Callable[[str], list[str]]  # finds faults in what it prints; ignores what it does not know
    monitor_ends: bool = False  # False if it never ends: it is ended after its first line

    def find(self, text: str, pattern: re.Pattern[str]) -> DeviceFault | None:
        found = {word for match in pattern.finditer(text) for word in match.groups() if word}
        # The table has the worst fault first.
        return next((fault for word, fault in self.faults.items() if word in found), None)


@cache
def fault_tables() -> tuple[FaultTable, ...]:
    """Import and return ``FAULTS`` of each module."""
    return tuple(import_module(name).FAULTS for name in FAULT_TABLES)


def find_fault(log: str) -> DeviceFault | None:
    """Return the worst fault that an exception's text, or the end of a log, names; None if it names none."""
    found = (table.find(log, table.pattern) for table in fault_tables())
    return next((fault for fault in found if fault is not None), None)


def find_kernel_faults(messages: str) -> list[str]:
    """Return the lines of the kernel's messages that report a broken device, each with meaning and advice."""
    faults = []
    for line in messages.splitlines():
        for table in fault_tables():
            fault = table.find(line, table.kernel_pattern)
            # A program may cause the others on a sound machine.
            if fault is not None and fault.is_hardware:
                faults.append(f"the kernel reports {line.strip()[-300:]} ({fault.meaning}; {fault.advice})")
    return faults


_MONITOR_SECONDS = 8.0  # neuron-monitor prints a line every five


def device_reports() -> list[str]:
    """Return the faults that the devices of this host have reported; none where nothing can be read."""
    found = find_kernel_faults(_first_output(("dmesg",), whole=True))
    for table in fault_tables():
        found += table.read_monitor(_first_output(table.monitor, whole=table.monitor_ends))
    return list(dict.fromkeys(found))


def _first_output(command: Sequence[str], whole: bool) -> str:
    # A program that is missing, not allowed or slow has nothing to say: checks go on.
    if shutil.which(command[0]) is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        if whole:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_MONITOR_SECONDS, check=False
            )
            return done.stdout
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
            assert program.stdout is not None, "it is a pipe"
            try:
                with selectors.DefaultSelector() as selector:
                    selector.register(program.stdout, selectors.EVENT_READ)
                    return (
                        program.stdout.readline().decode(errors="replace") if selector.select(_MONITOR_SECONDS) else ""
                    )
            finally:
                program.kill()
    return ""


_DUMP, _PIPE = "collectives-rank-", "dump-"  # torch appends the rank, and ".pipe" to names of pipes


@dataclass(frozen=True)
class HangLimits:
    """Limits and files for the library that communicates between devices."""

    # longest time that a collective may wait for other ranks; longer than it takes to detect a hang, so that a hang
    # ends with the verdict of the detector, which knows the rank to blame. None for torch's default.
    patience: timedelta | None = None
    dumps: Path | None = None  # prefix of the files into which the library writes what each rank waits for
    requests: Path | None = None  # prefix of named pipes; who writes to one gets the dump of that rank

    @classmethod
    def of(cls, patience: timedelta | None, logs: Path, pipes: Path | None) -> "HangLimits":
        """Make the limits of a process whose dumps go to a folder of logs; no pipes where nobody asks."""
        return cls(patience, logs / _DUMP, None if pipes is None else pipes / _PIPE)


def request_dumps(pipes: Path) -> bool:
    """Ask all ranks of this machine for dumps, which they write within about a second; True if a library listens."""
    asked = False
    for pipe in pipes.glob(f"{_PIPE}*.pipe"):
        with suppress(OSError):  # its process has ended
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                asked = os.write(descriptor, b"1") > 0 or asked
            finally:
                os.close(descriptor)
    return asked


def collect_dumps(logs: Path) -> Path | None:
    """Move dumps to ``incident-NNNN``, where the next attempt keeps them; None if that moves nothing."""
    with suppress(OSError):
        dumps = sorted(logs.glob(f"{_DUMP}*"))
        if dumps:
            numbers = (path.name.removeprefix("incident-") for path in logs.glob("incident-*"))
            number = 1 + max(
                (int(text) for text in numbers if text.isdecimal()), default=0
            )  # not of archives made of one
            folder = logs / f"incident-{number:04d}"
            folder.mkdir()
            for dump in dumps:
                dump.rename(folder / dump.name)
            return folder
    return None
