"""Quantities derived from the model section: row layout of parameters, parameter and FLOP counts, activation bytes."""
