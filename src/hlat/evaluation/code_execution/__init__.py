"""Execution of programs that a model wrote, confined, and pass@k."""

from hlat.evaluation.code_execution.pass_at_k import estimate_pass, pass_at_k
from hlat.evaluation.code_execution.sandbox import (
    CodePermission,
    Limits,
    find_confinement,
    run_program,
    unconfined_execution,
)

__all__ = [
    "CodePermission",
    "Limits",
    "estimate_pass",
    "find_confinement",
    "pass_at_k",
    "run_program",
    "unconfined_execution",
]
