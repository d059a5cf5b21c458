"""Reports of a host's devices about themselves: messages of the kernel, and the monitors of accelerators.

dmesg, nvidia-smi, neuron-monitor --device_reports--> faults, in words
"""

import selectors
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from hlat.runtime.backend.faults.device_faults import fault_tables, find_kernel_faults

_SECONDS = 8.0  # neuron-monitor prints a line every five


def device_reports() -> list[str]:
    """Return the faults that the devices of this host have reported; none where nothing can be read."""
    found = find_kernel_faults(_first_output(("dmesg",), whole=True))
    for table in fault_tables():
        found += table.read_monitor(_first_output(table.monitor, whole=table.monitor_ends))
    return list(dict.fromkeys(found))


def _first_output(command: Sequence[str], whole: bool) -> str:
    """Return the first line that a program prints, or all lines; nothing if it is missing, not allowed or slow."""
    if shutil.which(command[0]) is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        if whole:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
            )
            return done.stdout
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
            assert program.stdout is not None, "it is a pipe"
            try:
                with selectors.DefaultSelector() as selector:
                    selector.register(program.stdout, selectors.EVENT_READ)
                    return program.stdout.readline().decode(errors="replace") if selector.select(_SECONDS) else ""
            finally:
                program.kill()
    return ""
