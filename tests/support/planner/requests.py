"""Plan requests that several tests use."""

from hlat.hardware import load_catalog, parse_cluster
from hlat.planner.problem.request import PlanRequest, resolve_request


def request_for(model: str = "llama-2-7b", cluster: str = "trn1.32xlarge:64", **more: object) -> PlanRequest:
    """A request, by default with HLAT's sequence length and global batch."""
    parsed = parse_cluster(cluster, load_catalog())
    return resolve_request(model, parsed, **{"sequence": 4096, "global_batch": 1024, **more})  # type: ignore[arg-type]
