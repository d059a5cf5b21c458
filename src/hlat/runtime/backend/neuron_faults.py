"""Faults of the Neuron runtime: status codes, messages of the driver and the compiler, and neuron-monitor.

Sources: AWS Neuron documentation (aws-neuron-sdk at 81ce03ae), nrt-developer-guide.rst (status codes),
nrt-troubleshoot.rst (hardware errors, NEURON_HW_ERR), neuron-monitor-user-guide.rst, error-codes of the compiler; the
public beta's source (how torch-neuronx reports neuronx-cc). Not seen on a device.
"""

import json
import re
from contextlib import suppress
from typing import Any

from hlat.runtime.backend.faults import DeviceFault, FaultTable

_REPLACE = "Replace the instance; EC2 announces its retirement within 15 minutes"
_LESS_MEMORY = (
    "Use a smaller batch.micro_batch, memory.activation_checkpointing=full, or more devices; hlat rehearse shows the "
    "bytes"
)
_STATUSES = (
    # status, name, meaning, advice, consequence of another worker's fault; worst first
    (1201, "NRT_EXEC_HW_ERR_HBM_UE", "device memory has an error that cannot be repaired", _REPLACE, False),
    (1202, "NRT_EXEC_HW_ERR_NC_UE", "memory of a core has a parity error", _REPLACE, False),
    (1203, "NRT_EXEC_HW_ERR_DMA_ABORT", "a DMA engine stopped with an error", _REPLACE, False),
    (1004, "NRT_EXEC_COMPLETED_WITH_ERR", "an execution ended with an error of the hardware", _REPLACE, False),
    (101, "NRT_EXEC_UNIT_UNRECOVERABLE", "a core cannot go on", "Reload the driver or reboot the instance", False),
    (
        1205,
        "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
        "device memory had an error, which can be repaired",
        "Reload the driver or reboot the instance",
        False,
    ),
    (
        1206,
        "NRT_NETWORK_PROXY_FAILURE",
        "the network between machines failed",
        "Check EFA and its security group",
        False,
    ),
    (
        1003,
        "NRT_EXEC_COMPLETED_WITH_NUM_ERR",
        "results are not finite",
        "The numbers are wrong, not the machine: look at loss and gradient norm before it",
        False,
    ),
    (1204, "NRT_EXEC_SW_NQ_OVERFLOW", "a queue of notifications was full", "Restart the run", False),
    (11, "NRT_FAIL_HOST_MEM_ALLOC", "the host has too little memory", "Use fewer processes per machine", False),
    (4, "NRT_RESOURCE", "a resource such as device memory is used up", _LESS_MEMORY, False),
    (9, "NRT_LOAD_NOT_ENOUGH_NC", "there are too few cores", "Use fewer processes, or end others that use them", False),
    (6, "NRT_HW_ERROR", "the hardware failed", "Look at the kernel's messages of that machine (NEURON_HW_ERR)", False),
    (
        1200,
        "NRT_EXEC_HW_ERR_COLLECTIVES",
        "a collective waits for another worker, which may be broken",
        "Look at the other workers first, then restart the run",
        True,
    ),
    (5, "NRT_TIMEOUT", "an execution takes too long", "Look at the other workers first, then restart the run", True),
)
_COMPILER = (
    # text, meaning, advice; worst first
    ("NCC_EOOM", "a compiled graph needs more memory than the device has", _LESS_MEMORY),
    (
        "neuronx-cc",
        "the compiler failed",
        "Look up its error code. run.compile=none compiles blocks operator by operator, TORCH_COMPILE_DISABLE=1 in the "
        "environment the update of bf16 weights too",
    ),
)
_HANG = "suspected hang in collectives operation"
_DRIVER = {
    # type in a line of the driver -> name of the status
    "SRAM_UNCORRECTABLE_ERROR": "NRT_EXEC_HW_ERR_NC_UE",
    "NC_UNCORRECTABLE_ERROR": "NRT_EXEC_HW_ERR_NC_UE",
    "HBM_UNCORRECTABLE_ERROR": "NRT_EXEC_HW_ERR_HBM_UE",
    "DMA_ERROR": "NRT_EXEC_HW_ERR_DMA_ABORT",
    "HANG_ON_COLLECTIVES": "NRT_EXEC_HW_ERR_COLLECTIVES",
}


def _faults() -> dict[str, DeviceFault]:
    by_name = {}
    for number, name, meaning, advice, is_consequence in _STATUSES:
        by_name[name] = by_name[str(number)] = DeviceFault(
            name, meaning, advice, is_consequence, recurs=advice == _LESS_MEMORY
        )
    for text, meaning, advice in _COMPILER:
        by_name[text] = DeviceFault(text, meaning, advice, recurs=True)
    by_name[_HANG] = by_name["NRT_EXEC_HW_ERR_COLLECTIVES"]
    return by_name | {kind: by_name[name] for kind, name in _DRIVER.items()}


def read_monitor(report: str) -> list[str]:
    """Find errors of the hardware in one line of JSON from neuron-monitor; anything else has none."""
    with suppress(ValueError, TypeError, AttributeError):
        content = json.loads(report)
        return [*_memory_errors(content), *_runtime_errors(content)]
    return []


def _memory_errors(content: dict[str, Any]) -> list[str]:
    counters = content.get("system_data", {}).get("neuron_hw_counters", {})
    return [
        f"device {device.get('neuron_device_index')} has {device[name]} uncorrected errors of {where}; {_REPLACE}"
        for device in counters.get("neuron_devices") or []
        for name, where in (("mem_ecc_uncorrected", "its memory"), ("sram_ecc_uncorrected", "its cores' memory"))
        if device.get(name, 0) > 0
    ]


def _runtime_errors(content: dict[str, Any]) -> list[str]:
    found = []
    for runtime in content.get("neuron_runtime_data") or []:
        summary = runtime.get("report", {}).get("execution_stats", {}).get("error_summary", {})
        if summary.get("hardware", 0) > 0:
            found.append(
                f"process {runtime.get('pid')} had {summary['hardware']} executions with errors of the hardware"
            )
    return found


FAULTS = FaultTable(
    faults=_faults(),
    pattern=re.compile(
        r"\b(NRT_[A-Z_]+)\b"
        r"|(?i:\bnrt\w*|neuron|copy tensor data|async tensor copy)[^\n]*?\b(?i:status)(?:_code)?[ =:]+(\d+)\b"
        rf"|({_HANG})|\b(NCC_EOOM)\d+|\b(neuronx-cc)(?: compilation\) with exit code| failed with) "
    ),
    kernel_pattern=re.compile(r"NEURON_HW_ERR=([A-Z_]+)"),
    monitor=("neuron-monitor",),
    read_monitor=read_monitor,
)
"""What the Neuron runtime, driver and monitor report."""
