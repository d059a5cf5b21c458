"""Responses of a model to requests: stored on disk, computed by replicas of the model in any number of processes."""

from hlat.evaluation.responses.kinds import Generation, Scoring
from hlat.evaluation.responses.replicas import Replicas
from hlat.evaluation.responses.responder import Progress, Responder
from hlat.evaluation.responses.response_cache import ResponseCache, response_key
from hlat.evaluation.responses.served_model import ServedModel, ServingOptions, serve_model

__all__ = [
    "Generation",
    "Progress",
    "Replicas",
    "Responder",
    "ResponseCache",
    "Scoring",
    "ServedModel",
    "ServingOptions",
    "response_key",
    "serve_model",
]
