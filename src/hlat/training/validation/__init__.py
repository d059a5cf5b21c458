"""Evaluation of weights while training: loss on fixed sequences, and scores of tasks, in any parallel layout."""

from hlat.training.validation.attempts import EvaluationAttempts
from hlat.training.validation.evaluation import Evaluation, EvaluationResult, open_evaluation
from hlat.training.validation.losses import SingleProcessModel, ValidationResult, validate
from hlat.training.validation.requests import TaskRequest, TokenRow, encode_requests, read_requests, write_requests
from hlat.training.validation.tasks import score_requests, task_scores

__all__ = [
    "Evaluation",
    "EvaluationAttempts",
    "EvaluationResult",
    "SingleProcessModel",
    "TaskRequest",
    "TokenRow",
    "ValidationResult",
    "encode_requests",
    "open_evaluation",
    "read_requests",
    "score_requests",
    "task_scores",
    "validate",
    "write_requests",
]
