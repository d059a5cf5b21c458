"""Preflight: hosts, devices, network and disk are examined before a run, and the bad host is named.

make_request (options, environment, recipe) --> run_preflight, on each host --> PreflightReport
hosts by name --examine_by_ssh: the same command on each--> PreflightReport
after an incident --check_before_restart, on one host--> findings
"""
