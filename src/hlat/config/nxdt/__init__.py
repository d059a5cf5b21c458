"""Configurations of NxDT, which ran HLAT, as recipes."""
