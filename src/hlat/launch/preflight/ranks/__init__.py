"""Processes of the preflight, one per rank: they import torch, measure, join each other and measure together.

this process --questions, a line of JSON each--> ``rank_main`` --facts, a line of JSON each--> this process
"""
