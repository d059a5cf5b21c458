"""Faults of devices are recognised in logs, kernel messages and reports of monitors, with what to do about each."""

import json

import pytest

from hlat.runtime.backend import faults, nvidia_faults
from hlat.runtime.backend.device import device_error, recurring_fault_error
from hlat.runtime.backend.faults import device_reports, find_fault, find_kernel_faults
from hlat.runtime.backend.neuron_faults import read_monitor
from hlat.runtime.errors import LaunchError
from hlat.runtime.storage.run_folder import EARLIER_ATTEMPT_ENV

# A line of the driver's log, as AWS's page on troubleshooting has it.
LINE = (
    "[ 1234.5] NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0592464924bd45322 hostname=ip-172-31-61-252 "
    "nd-id=0 nc-id=0 serial-num=19fcda00f5ff6eb9 action=TERMINATE_INSTANCE"
)


@pytest.mark.parametrize(
    ("status", "advice", "is_consequence"),
    [
        (5, "other workers first", True),
        (1003, "numbers are wrong", False),
        (1004, "Replace the instance", False),
        (1200, "other workers first", True),
        (1201, "Replace the instance", False),
        (1202, "Replace the instance", False),
        (1203, "Replace the instance", False),
        (1204, "Restart the run", False),
        (1205, "reboot", False),
        (1206, "EFA", False),
    ],
)
def test_a_status_is_recognised_by_its_number(status: int, advice: str, is_consequence: bool) -> None:
    for text in (f"nrt_execute failed: status={status}", f"Neuron runtime error, status_code={status} on nc 3"):
        fault = find_fault(f"Traceback\n  step 7\nRuntimeError: {text}\nbye")
        assert fault is not None and advice in str(fault) and fault.is_consequence is is_consequence


@pytest.mark.parametrize(
    ("text", "name", "recurs"),
    [
        ("Failed to allocate Neuron tensor of size 9 bytes (out of memory). Status: 4", "NRT_RESOURCE", True),
        ("Command failed (neuronx-cc compilation) with exit code 70: [NCC_ILLC059] no", "neuronx-cc", True),
        ("RuntimeError: neuronx-cc failed with 70", "neuronx-cc", True),
        ("(neuronx-cc compilation) with exit code 70: [NCC_EOOM001] too much", "NCC_EOOM", True),
        ("Failed to copy tensor data. Status: 1202", "NRT_EXEC_HW_ERR_NC_UE", False),
    ],
)
def test_what_the_program_would_meet_again_is_told_from_broken_hardware(text: str, name: str, recurs: bool) -> None:
    fault = find_fault(text)
    assert fault is not None and (fault.name, fault.recurs) == (name, recurs)


def test_a_recurring_fault_is_retryable_only_after_an_attempt_that_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an ended attempt has not freed yet may be the reason then."""
    error = RuntimeError("first line\nneuronx-cc failed with 70\nlast line")
    monkeypatch.delenv(EARLIER_ATTEMPT_ENV, raising=False)
    found = recurring_fault_error(error)
    assert found is not None and not found.retryable and str(found).endswith("says: neuronx-cc failed with 70")
    monkeypatch.setenv(EARLIER_ATTEMPT_ENV, "3 0 run")
    found = recurring_fault_error(error)
    assert found is not None and found.retryable
    assert recurring_fault_error(RuntimeError("nrt_execute status=1202")) is None
    assert device_error(LaunchError("neuronx-cc failed with 70")) is None
    stage = RuntimeError("a stage of the pipeline failed")  # torch's pipelines raise such an error from the stage's
    stage.__cause__ = error
    assert str(device_error(stage)) == str(found)


def test_the_worst_fault_is_reported() -> None:
    fault = find_fault("NRT_EXEC_HW_ERR_COLLECTIVES\nNRT_EXEC_HW_ERR_HBM_UE\nNRT_TIMEOUT")
    assert fault is not None and fault.name == "NRT_EXEC_HW_ERR_HBM_UE"
    hang = find_fault("(FATAL-RT-UNDEFINED-STATE) [ND 0] suspected hang in collectives operation")
    assert hang is not None and hang.is_consequence


@pytest.mark.parametrize("text", ["", "exit status 5", "loss 1202", "HTTP status=1201", "NRT_SUCCESS", "nrt_init 1202"])
def test_other_texts_are_no_faults(text: str) -> None:
    assert find_fault(text) is None


def test_lines_of_the_kernel_are_recognised() -> None:
    (found,) = find_kernel_faults(f"usb 1-1: new device\n{LINE}\n")
    assert LINE in found and "Replace the instance" in found
    assert find_kernel_faults("NEURON_HW_ERR=SOMETHING_NEW nd-id=0") == []


def report(uncorrected: int, hardware: int) -> str:
    """A report of neuron-monitor, as its guide describes it."""
    counters = {"neuron_device_index": 3, "mem_ecc_corrected": 9, "mem_ecc_uncorrected": uncorrected}
    errors = {"generic": 1, "numerical": 2, "transient": 3, "model": 0, "runtime": 0, "hardware": hardware}
    return json.dumps(
        {
            "neuron_runtime_data": [{"pid": 77, "report": {"execution_stats": {"error_summary": errors}}}],
            "system_data": {"neuron_hw_counters": {"neuron_devices": [counters], "error": ""}},
        }
    )


def test_a_report_of_the_monitor_is_understood() -> None:
    assert read_monitor(report(0, 0)) == []
    first, second = read_monitor(report(2, 1))
    assert first.startswith("device 3 has 2 uncorrected errors of its memory; Replace the instance")
    assert second == "process 77 had 1 executions with errors of the hardware"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "neuron-monitor: no devices",
        "[]",
        "7",
        '{"system_data": null}',
        '{"system_data": {"neuron_hw_counters": 1}}',
    ],
)
def test_a_report_of_another_form_has_no_errors(text: str) -> None:
    assert read_monitor(text) == []


# Lines of drivers and libraries as public reports have them, each with the name, what to do, and what is to blame.
GPU_LINES = [
    (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "Replace",
        "machine",
    ),
    (
        "NVRM: Xid (PCI:0000:86:00): 48, pid=1, name=python, DBE (double bit error) ECC error",
        "Reset the GPU",
        "machine",
    ),
    ("NVRM: Xid (PCI:0000:90:00): 95, pid=7, Uncontained ECC error", "Reset the GPU", "machine"),
    (
        "NVRM: Xid (PCI:0000:18:00): 119, pid=7, Timeout after 6s of waiting for RPC response",
        "Reset the GPU",
        "machine",
    ),
    ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6)", "Reset the GPU", "machine"),
    (
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        "Reboot the machine",
        "machine",
    ),
    ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "Reboot", "machine"),
    ("NVRM: Xid (PCI:0000:90:00): 94, pid=7, name=python, Contained: SM (0x1). RST: No", "Restart", "process"),
    ("NVRM: Xid (PCI:0000:90:00): 31, pid=7, name=python, Ch 8, MMU Fault: ENGINE GRAPHICS", "the program", "process"),
    ("NVRM: Xid (PCI:0000:90:00): 45, pid=7, name=python, Ch 00000008", "other ranks first", "another rank"),
    ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "Reset the GPU", "rank"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel", "CUDA_LAUNCH_BLOCKING", "rank"),
    ("enqueue.cc:1556 NCCL WARN Cuda failure 719 'unspecified launch failure'", "CUDA_LAUNCH_BLOCKING", "rank"),
    ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n", "Restart", "rank"),
    ("ncclRemoteError: A call failed possibly due to a network error or a remote", "other ranks first", "another rank"),
    ("ncclSystemError: System call (e.g. socket, malloc) or external", "other ranks first", "another rank"),
    (
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, Timeout(ms)=600000)",
        "other ranks first",
        "another rank",
    ),
]


@pytest.mark.parametrize(("line", "advice", "broken"), GPU_LINES)
def test_lines_about_gpus_are_recognised(line: str, advice: str, broken: str) -> None:
    fault = find_fault(f"loss 2.1\n{line}\nbye")
    assert fault is not None and advice in fault.advice
    assert fault.is_consequence is (broken == "another rank")
    found = find_kernel_faults(line)
    assert len(found) == (broken == "machine"), "a sound machine is not refused for what its last program did"
    assert all(line in text for text in found), "with the address of the GPU"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:04:00): 144, SAW_MVB Nonfatal XC0 i0 Link 00 (0x00000001 0x00000001)",
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        "NVRM: Xid (PCI:0000:01:00): 63, Row remapping pending",
        "NVRM: Xid (PCI:0000:01:00): 790, pid=48, name=79",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "an unknown error; no CUDA error",
    ],
)
def test_other_lines_about_gpus_are_no_faults(line: str) -> None:
    assert find_fault(line) is None and find_kernel_faults(line) == []


def test_the_device_of_a_kernel_line_outranks_its_consequences() -> None:
    log = "Xid (PCI:0000:90:00): 45, pid=7, name=python\nXid (PCI:0000:90:00): 79, GPU has fallen off the bus\n"
    fault = find_fault(f"{log}Watchdog caught collective operation timeout")
    assert fault is not None and fault.name == "Xid 79"


def test_a_report_of_nvidia_smi_is_understood() -> None:
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error"
    found = nvidia_faults.read_monitor(f"0, 00000000:18:00.0, 0\n1, 00000000:2A:00.0, 4\n2, x, [N/A]\n{lost}\n")
    assert len(found) == 2 and lost in found[1]
    assert found[0].startswith("GPU 1 (00000000:2A:00.0) has 4 uncorrected errors of its memory; Reset the GPU")
    assert nvidia_faults.read_monitor("NVIDIA-SMI has failed, because it couldn't, 1, 2\n\n7") == []


def test_reports_are_read_from_the_programs_of_a_host(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor that never ends is ended after its first line."""
    for name, script in (
        ("dmesg", f"echo '{LINE}'"),
        ("neuron-monitor", f"echo '{report(1, 0)}'; exec sleep 100000"),
        ("nvidia-smi", "echo '0, 0000:18:00.0, 0'; echo '1, 0000:2A:00.0, 4'"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(faults, "_MONITOR_SECONDS", 600.0)  # a busy machine is no program without an answer
    kernel, gpu, memory = device_reports()
    assert "SRAM_UNCORRECTABLE_ERROR" in kernel and "device 3 has 1 uncorrected" in memory
    assert gpu.startswith("GPU 1 (0000:2A:00.0)")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert device_reports() == []
