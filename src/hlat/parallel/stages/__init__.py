"""Pipeline stages: split of layers into stages, order of passes, and memory of a rank."""
