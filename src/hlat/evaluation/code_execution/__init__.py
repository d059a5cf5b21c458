"""Execution of programs that a model wrote, in processes with limits, and pass@k."""

from hlat.evaluation.code_execution.pass_at_k import complete_programs, estimate_pass, pass_at_k
from hlat.evaluation.code_execution.sandbox import Limits, run_program, run_programs

__all__ = ["Limits", "complete_programs", "estimate_pass", "pass_at_k", "run_program", "run_programs"]
