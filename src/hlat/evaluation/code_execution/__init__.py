"""Execution of programs that a model wrote, in processes with limits, and pass@k."""

from hlat.evaluation.code_execution.pass_at_k import estimate_pass, pass_at_k
from hlat.evaluation.code_execution.sandbox import Limits, run_program

__all__ = ["Limits", "estimate_pass", "pass_at_k", "run_program"]
