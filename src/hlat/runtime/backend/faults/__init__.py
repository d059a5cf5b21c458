"""Faults that devices report, in logs and to the monitors of a host, and hangs; nothing here imports torch."""

from hlat.runtime.backend.faults.device_faults import DeviceFault, find_fault
from hlat.runtime.backend.faults.device_monitors import device_reports
from hlat.runtime.backend.faults.hang_limits import HangLimits, collect_dumps, request_dumps

__all__ = ["DeviceFault", "HangLimits", "collect_dumps", "device_reports", "find_fault", "request_dumps"]
