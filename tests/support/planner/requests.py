"""Plan requests that several tests use."""

from typing import Any

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.problem.question import PlanQuestion
from hlat.planner.problem.request import PlanRequest, resolve_request


def request_for(model: str = "llama-2-7b", cluster: str = "trn1.32xlarge:64", **more: Any) -> PlanRequest:
    """A request, by default with HLAT's sequence length and global batch."""
    question = PlanQuestion(model, **{"sequence": 4096, "global_batch": 1024, **more})
    return resolve_request(question, parse_cluster(cluster, load_catalog()), question.price_kind())
