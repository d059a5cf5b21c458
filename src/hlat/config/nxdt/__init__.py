"""Recipes from the YAML configurations of NxDT (NeuronX Distributed Training)."""

from hlat.config.nxdt.translate import recipe_from_nxdt

__all__ = ["recipe_from_nxdt"]
