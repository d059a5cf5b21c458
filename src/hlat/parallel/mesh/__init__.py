"""The mesh: coordinates of ranks on the axes of a parallel layout, process groups, and collectives."""
