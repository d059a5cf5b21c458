"""Pipeline stages: the layers of each one, and the memory of its ranks."""
