"""Report of a run of 200,000 logged steps: seconds, size and memory, and the height of a spike of one step.

    lines as `hlat train` writes them -> hlat report in a process of its own -> time, peak memory, bytes, spike
"""
