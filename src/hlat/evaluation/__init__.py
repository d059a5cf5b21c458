"""Evaluation of checkpoints: perplexity, bits per byte, and text generation."""

from hlat.evaluation.generation import generate, generate_text
from hlat.evaluation.perplexity import Perplexity, evaluate_checkpoint
from hlat.evaluation.sampling import Sampling

__all__ = ["Perplexity", "Sampling", "evaluate_checkpoint", "generate", "generate_text"]
