"""Questions that several tests ask."""

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.problem import PlanRequest
from hlat.planner.problem.request import resolve_request


def question(model: str = "llama-2-7b", cluster: str = "trn1.32xlarge:64", **more: object) -> PlanRequest:
    """HLAT's batch and length unless said otherwise."""
    found = parse_cluster(cluster, load_catalog())
    return resolve_request(model, found, **{"sequence": 4096, "global_batch": 1024, **more})  # type: ignore[arg-type]
