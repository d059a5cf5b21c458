"""Random numbers addressed by (seed, purpose, element), and the state of stateful generators."""
