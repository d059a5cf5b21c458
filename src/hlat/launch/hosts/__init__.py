"""Supervisors on several hosts: one per host, of which one leads; they restart a run together."""
