"""Faults of NVIDIA GPUs: Xid messages of the driver, errors of CUDA and NCCL, and nvidia-smi. Not seen on a device.

Sources, read in November 2026: NVIDIA, "Xid Catalog" (docs.nvidia.com/deploy/xid-errors, immediate actions for A100 to
GB200) in the copy of October 2025 that gpud has; it gives no action for Xids 167 to 172, and ours is a guess. Texts of
cudaGetErrorString in libcudart 13.0, of ncclResult_t in NCCL 2.28, of torch's ProcessGroupNCCL 2.11. Lines of SXids
and of nvidia-smi as public reports have them.
"""

import re

from hlat.runtime.backend.faults import DeviceFault, FaultTable

_REPLACE = "Replace the machine, or reboot it; the GPU is broken if that does not help"
_RESET = (
    "Reset the GPU (nvidia-smi --gpu-reset, without a process on it) and clear the kernel's messages (dmesg --clear), "
    "or reboot the machine; replace it if it recurs"
)
_RESTART = "Restart the run; replace the machine if the same GPU reports it again"
_PROGRAM = (
    "Restart the run. If it recurs at the same step on any machine, it is the program (CUDA_LAUNCH_BLOCKING=1 names "
    "the operation); if it follows one GPU, replace that machine"
)
_OTHERS = "Look at the other ranks first: one of them has failed or hangs, or its network has. Then restart the run"

_MACHINE, _PROCESS, _OTHER_RANK = "machine", "process", "other rank"

_XIDS = (
    # Xids, meaning, advice, what is broken; worst first
    ((79,), "the GPU has fallen off the bus", _REPLACE, _MACHINE),
    ((167,), "PCIe does not answer", _REPLACE, _MACHINE),
    ((48, 140, 171, 172), "memory of the GPU has an error that ECC cannot correct", _RESET, _MACHINE),
    ((95,), "memory had an error that may have spread to other processes", _RESET, _MACHINE),
    ((64, 157), "broken memory could not be taken out of use", _REPLACE, _MACHINE),
    ((156,), "memory or a unit is taken out of use at the next reset", _RESET, _MACHINE),
    ((119, 120, 62, 169), "the GPU's system processor (GSP, PMU or SEC2) has stopped", _RESET, _MACHINE),
    ((74, 136, 144, 145, 146, 147, 148, 149, 150, 155), "a link of NVLink has failed", _RESET, _MACHINE),
    ((46, 109, 110, 143, 158), "the GPU does not work any more", _RESET, _MACHINE),
    ((94,), "memory had an error, which only the process that used it has to answer for", _RESTART, _PROCESS),
    ((13, 31, 32, 39, 40, 41, 43, 69), "a process did what the GPU does not allow", _PROGRAM, _PROCESS),
    ((45,), "the driver ended the work of a process after another error", _OTHERS, _OTHER_RANK),
)
_ACTIONS = {
    # what the driver says is necessary, in Xid 154
    "Node Reboot Required": "Reboot the machine",
    "Drain and Reset": "Reset the GPU when no process uses it (nvidia-smi --gpu-reset)",
    "GPU Reset Required": "Reset the GPU (nvidia-smi --gpu-reset)",
}
_CUDA = (
    # text of an error, meaning, advice
    ("uncorrectable ECC error encountered", "memory of the GPU has an error that ECC cannot correct", _RESET),
    ("uncorrectable NVLink error detected during the execution", "a link of NVLink has failed", _RESET),
    ("Invalid access of peer GPU memory over nvlink or a hardware error", "a link or another GPU has failed", _RESET),
    ("hardware stack error", "the GPU found an error of its own", _RESET),
    ("system not yet initialized", "NVLink switches are not set up", "Start nvidia-fabricmanager on the machine"),
    ("CUDA-capable device(s) is/are busy or unavailable", "the GPU is taken or broken", "End other programs on it"),
    ("no CUDA-capable device is detected", "the driver finds no GPU", _REPLACE),
    ("an illegal memory access was encountered", "a kernel used memory that it does not have", _PROGRAM),
    ("an illegal instruction was encountered", "a kernel has an instruction that the GPU does not know", _PROGRAM),
    ("misaligned address", "a kernel used an address that is no multiple of the element's size", _PROGRAM),
    ("invalid program counter", "a kernel jumped to an address without code", _PROGRAM),
    ("operation not supported on global/shared address space", "a kernel used the wrong kind of memory", _PROGRAM),
    ("device-side assert triggered", "a kernel checked its input and refused it", _PROGRAM),
    ("the launch timed out and was terminated", "a kernel ran too long", _PROGRAM),
    ("unspecified launch failure", "a kernel failed", _PROGRAM),
    ("unknown error", "the driver does not say what failed", _RESTART),
)
_TIMEOUT = "Watchdog caught collective operation timeout"
_LATER = "Some NCCL operations have failed or timed out"
_NCCL = (
    # text of NCCL or of torch, meaning, advice, consequence of another rank's fault
    ("ncclUnhandledCudaError", "a call of CUDA failed inside NCCL, which the rank's log names", _RESTART, False),
    ("ncclInternalError", "NCCL found an error of its own, or damaged memory", _RESTART, False),
    ("ncclSystemError", "a call of the system failed inside NCCL, such as that of a socket", _OTHERS, True),
    ("ncclRemoteError", "another rank has ended, or the network has failed", _OTHERS, True),
    (_TIMEOUT, "a collective waited too long for other ranks", _OTHERS, True),
    (_LATER, "a collective failed or waited too long for other ranks", _OTHERS, True),
)
_SWITCH = "Fatal"


def _faults() -> dict[str, DeviceFault]:
    by_text = {}
    for action, advice in _ACTIONS.items():
        by_text[action] = DeviceFault("Xid 154", f"the driver asks for an action ({action})", advice)
    by_text[_SWITCH] = DeviceFault(
        "SXid", "a switch of NVLink has failed", "Reboot the machine; replace it if it recurs"
    )
    for numbers, meaning, advice, broken in _XIDS:
        for number in numbers:
            by_text[str(number)] = DeviceFault(
                f"Xid {number}", meaning, advice, broken == _OTHER_RANK, is_hardware=broken == _MACHINE
            )
    for text, meaning, advice in _CUDA:
        by_text[text] = DeviceFault(f"CUDA error ({text})", meaning, advice, is_hardware=advice != _PROGRAM)
    for text, meaning, advice, is_consequence in _NCCL:
        by_text[text] = DeviceFault(text, meaning, advice, is_consequence, is_hardware=False)
    return by_text


# Of links of Blackwell (144 to 150) only fatal events count, of Xid 154 only those that ask for something.
_XID = (
    r"Xid \(PCI:[^)]*\): (?:(14[4-9]|150), \S+\s+Fatal\b"
    rf"|154, .* to \S+ \(({'|'.join(_ACTIONS)})\)|(?!14[4-9]|150|154)(\d+)\b)|SXid \(PCI:[^)]*\): \d+, (Fatal)\b"
)
_CUDA_ERROR = rf"(?:CUDA error: |Cuda failure (?:\d+ )?')({'|'.join(re.escape(text) for text, *_ in _CUDA)})"


def read_monitor(report: str) -> list[str]:
    """Find GPUs with uncorrectable errors, and lost ones, in nvidia-smi's lines of index, address and errors."""
    found = []
    for line in report.splitlines():
        index, address, errors = (
            [word.strip() for word in line.split(",")][:3] if line.count(",") == 2 else ("", "", "")
        )
        if errors.isdecimal() and int(errors) > 0:
            found.append(f"GPU {index} ({address}) has {errors} uncorrected errors of its memory; {_RESET}")
        if "GPU is lost" in line or "Unable to determine the device handle" in line:
            found.append(f"nvidia-smi says: {line.strip()}; {_REPLACE}")
    return found


FAULTS = FaultTable(
    faults=_faults(),
    pattern=re.compile(rf"{_XID}|{_CUDA_ERROR}|\b({'|'.join(text for text, *_ in _NCCL)})\b"),
    kernel_pattern=re.compile(_XID),
    monitor=(
        "nvidia-smi",
        "--query-gpu=index,pci.bus_id,ecc.errors.uncorrected.volatile.total",
        "--format=csv,noheader,nounits",
    ),
    read_monitor=read_monitor,
    monitor_ends=True,
)
"""What NVIDIA's driver, CUDA, NCCL and nvidia-smi report."""
