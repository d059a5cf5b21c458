"""What a model is worth and what it says: perplexity, bits per byte, generation."""

from hlat.evaluation.generation import Sampling, generate, generate_text
from hlat.evaluation.perplexity import Perplexity, evaluate_checkpoint

__all__ = ["Perplexity", "Sampling", "evaluate_checkpoint", "generate", "generate_text"]
