"""Evaluation jobs: tasks to run on a model, in one process or in several that are started once."""

from hlat.launch.evaluation.job import EvaluationJob
from hlat.launch.evaluation.processes import run_processes

__all__ = ["EvaluationJob", "run_processes"]
