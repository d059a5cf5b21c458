"""Responses of a model to requests: stored on disk, computed by replicas of the model in any number of processes."""

from hlat.evaluation.responses.responder import Progress
from hlat.evaluation.responses.response_cache import ResponseCache
from hlat.evaluation.responses.served_model import ServedModel, ServingOptions, serve_model

__all__ = [
    "Progress",
    "ResponseCache",
    "ServedModel",
    "ServingOptions",
    "serve_model",
]
