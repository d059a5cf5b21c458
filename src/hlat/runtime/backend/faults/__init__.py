"""Faults that devices report, in logs and to the monitors of a host; nothing here imports torch."""

from hlat.runtime.backend.faults.device_faults import DeviceFault, find_fault
from hlat.runtime.backend.faults.device_monitors import device_reports

__all__ = ["DeviceFault", "device_reports", "find_fault"]
