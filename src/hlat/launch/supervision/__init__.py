"""Supervision of the processes of a run, wherever they are: waiting, hangs, root causes, restarts, events."""
