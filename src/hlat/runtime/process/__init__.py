"""This process: phase, clock, exit codes, log, output; and the status of other processes of the machine."""
