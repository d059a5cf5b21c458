"""Probes of a pod, over the metrics server of its supervisor.

    recipe --served_recipe--> the same with tracking.prometheus on the pod's address
    startupProbe ----> /healthz answers: the program has been loaded, and from now on livenessProbe counts
    livenessProbe ---> /healthz: alive and not hanging; preparing, compiling, saving and restarting are healthy
    readinessProbe --> /readyz: training

Hangs are judged with the limits of ``recovery.hang_seconds`` (docs/operators.md), so a probe is never stricter than
the run's own watchdog, which comes first.
"""

from typing import Any

from hlat.config import Recipe, TrackingConfig

_PORT_NAME = "metrics"
_EVERY = 20  # seconds between two questions
_TIMEOUT = 10  # seconds for an answer: cores may be busy with preparing text
_LOADING = 1800  # seconds for loading the program: an image or packages on a slow disk
_PATIENCE = 120  # seconds that a hang lasts, as /healthz sees it, before the pod is ended: the ranks find it themselves


def served_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with metrics and health on every address of the pod, unless it says where itself."""
    if recipe.tracking.prometheus is not None:
        return recipe
    tracking = TrackingConfig.model_validate({**recipe.tracking.model_dump(), "prometheus": {"address": "0.0.0.0"}})
    return recipe.model_copy(update={"tracking": tracking})


def probe_problems(recipe: Recipe) -> list[str]:
    """Reasons why Kubernetes, which asks from outside of the pod, would get no answer."""
    settings = recipe.tracking.prometheus
    remedy = "leave tracking.prometheus out, which serves the probes, or give --no-probes."
    found = []
    if settings is not None and settings.address.is_loopback:
        reason = "the probes of Kubernetes come from outside of the pod"
        found.append(f"tracking.prometheus.address = {settings.address}: {reason}; give 0.0.0.0, {remedy}")
    if settings is not None and settings.port == 0:
        found.append(f"tracking.prometheus.port = 0: the probes have to know the port; give one, {remedy}")
    return found


def probe_fields(recipe: Recipe, grace: int) -> dict[str, Any]:
    """Port and probes of the container.

    Args:
        recipe: recipe with ``tracking.prometheus``.
        grace: seconds that the pod has to save.
    """
    assert recipe.tracking.prometheus is not None, "served_recipe has set it"
    return {
        "ports": [{"name": _PORT_NAME, "containerPort": recipe.tracking.prometheus.port, "protocol": "TCP"}],
        "startupProbe": _probe("/healthz", _LOADING),
        "livenessProbe": _probe("/healthz", _PATIENCE + grace),
        "readinessProbe": _probe("/readyz", _EVERY),
    }


def _probe(path: str, seconds: int) -> dict[str, Any]:
    """Probe that fails when there has been no good answer for so many seconds."""
    return {
        "httpGet": {"path": path, "port": _PORT_NAME},
        "periodSeconds": _EVERY,
        "timeoutSeconds": _TIMEOUT,
        "failureThreshold": -(-seconds // _EVERY),
    }
