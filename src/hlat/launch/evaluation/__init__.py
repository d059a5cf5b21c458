"""Evaluation jobs: tasks to run on a model, in one process or in several that are started once."""
