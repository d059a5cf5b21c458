"""Checks of the preflight: one file per group, listed in ``table.py``."""
