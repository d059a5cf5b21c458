"""Scoring: log-probabilities of continuations after contexts, with shared prefixes computed once."""

from hlat.evaluation.scoring.batches import BatchLimits, ScoringBatch, plan_batches
from hlat.evaluation.scoring.families import Member, find_families
from hlat.evaluation.scoring.requests import Score, ScoreRequest, Tokens
from hlat.evaluation.scoring.scorer import Scorer, score_all
from hlat.evaluation.scoring.stem_cache import StemCache

__all__ = [
    "BatchLimits",
    "Member",
    "Score",
    "ScoreRequest",
    "Scorer",
    "ScoringBatch",
    "StemCache",
    "Tokens",
    "find_families",
    "plan_batches",
    "score_all",
]
