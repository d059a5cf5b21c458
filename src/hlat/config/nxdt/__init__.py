"""Recipes from the YAML configurations of NxDT (NeuronX Distributed Training)."""
