"""Control of the training process: signals, deadline, run lock, garbage collection, timing and profiling."""
