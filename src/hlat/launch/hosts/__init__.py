"""Hosts of a run, as they know each other: records in a folder that all of them share, and their network."""
