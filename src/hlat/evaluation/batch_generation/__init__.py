"""Generation of many texts: common prefixes computed once, several texts in one forward pass."""

from hlat.evaluation.batch_generation.generator import BatchGenerator
from hlat.evaluation.batch_generation.requests import (
    GenerationBatch,
    GenerationLimits,
    GenerationRequest,
    plan_generation,
)

__all__ = ["BatchGenerator", "GenerationBatch", "GenerationLimits", "GenerationRequest", "plan_generation"]
