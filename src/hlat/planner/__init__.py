"""Predict a run before it starts: memory, time, cost, and the layout that takes least.

    request, layouts (problem) -> bytes (memory), seconds (cost) of each -> the best (search) -> tables, pages (report)

Each folder is a wing with a door of its own. benchmarks/published_runs compares the cost model with published runs.
"""
