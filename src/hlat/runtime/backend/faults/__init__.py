"""Faults that devices report, in logs and to the monitors of a host, and hangs; nothing here imports torch."""
