"""Faults of devices that logs, kernel messages and monitors report, and what to do about each.

text of a log or of the kernel --find_fault--> DeviceFault: meaning, advice, and if another worker is to blame

To teach hlat the faults of an accelerator, write a module with a ``FaultTable`` and add it to ``FAULT_TABLES``. This
module does not import torch, because supervisors and host checks use it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

FAULT_TABLES = ("hlat.runtime.backend.faults.nvidia_faults", "hlat.runtime.backend.faults.neuron_faults")
"""Modules whose ``FAULTS`` is a table."""


@dataclass(frozen=True)
class DeviceFault:
    """A fault that a device or its runtime reports.

    Attributes:
        name: name in the runtime's documentation.
        meaning: what happened, without a full stop.
        advice: what to do, without a full stop.
        is_consequence: True if the fault is probably that of another worker, for which this one waited in vain.
        is_hardware: False if a program may cause it on a sound machine; a check of the machine then ignores it.
        recurs: True if the same program on the same devices would fail again.
    """

    name: str
    meaning: str
    advice: str
    is_consequence: bool = False
    is_hardware: bool = True
    recurs: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.meaning}. {self.advice}."


@dataclass(frozen=True)
class FaultTable:
    """Faults of one kind of accelerator, as its software reports them.

    Attributes:
        faults: faults by every text that stands for one: a name, or a number that ``pattern`` finds; worst first.
        pattern: finds such texts in a log; its groups are the texts.
        kernel_pattern: likewise for the kernel's messages.
        monitor: command that prints the state of all devices of a machine.
        read_monitor: finds faults in what it prints; ignores what it does not know.
        monitor_ends: False if it never ends: it is ended after its first line.
    """

    faults: Mapping[str, DeviceFault]
    pattern: re.Pattern[str]
    kernel_pattern: re.Pattern[str]
    monitor: Sequence[str]
    read_monitor: Callable[[str], list[str]]
    monitor_ends: bool = False

    def find(self, text: str, pattern: re.Pattern[str]) -> DeviceFault | None:
        """Return the worst fault that a text names; None if it names none."""
        found = {word for match in pattern.finditer(text) for word in match.groups() if word}
        return next((fault for word, fault in self.faults.items() if word in found), None)


@cache
def fault_tables() -> tuple[FaultTable, ...]:
    """Return the tables of all accelerators."""
    return tuple(import_module(name).FAULTS for name in FAULT_TABLES)


def find_fault(log: str) -> DeviceFault | None:
    """Return the worst fault of a device that a log names; None if it names none.

    Args:
        log: an exception's text, or the end of a process's log.
    """
    found = (table.find(log, table.pattern) for table in fault_tables())
    return next((fault for fault in found if fault is not None), None)


def find_kernel_faults(messages: str) -> list[str]:
    """Return the lines of the kernel's messages that report a broken device, each with meaning and advice."""
    faults = []
    for line in messages.splitlines():
        for table in fault_tables():
            fault = table.find(line, table.kernel_pattern)
            if fault is not None and fault.is_hardware:
                faults.append(f"the kernel reports {line.strip()[-300:]} ({fault.meaning}; {fault.advice})")
    return faults
