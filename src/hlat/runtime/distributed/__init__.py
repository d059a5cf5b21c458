"""Distributed runtime: rendezvous of the processes of a run, process groups, and exchange of values on the CPU."""
