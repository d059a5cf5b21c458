"""What a run will take before it is started: memory, time, money, and the layout that takes least of them.

    request, layouts (problem) -> bytes (memory), seconds (cost) of each -> the best (search) -> tables, pages (report)

The doors are those of the wings; ``calibration`` holds the cost model against published runs.
"""
