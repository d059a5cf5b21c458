"""Formats of other programs: Hugging Face folders, shards of NeuronX Distributed, DCP files of torchtitan."""
