"""The cost model: time of compute, communication, pipeline and step, and the goodput of a run."""
