"""Use of trained models: evaluation, generation, and loading as a plain module."""

from pathlib import Path
from typing import TYPE_CHECKING

from hlat.api.settings import restored
from hlat.runtime import CheckpointError

if TYPE_CHECKING:
    import torch

    from hlat.evaluation import Perplexity
    from hlat.model import Decoder


def evaluate(checkpoint: str | Path, data: str | Path | None = None, *, weights: str = "model") -> "Perplexity":
    """Evaluate a checkpoint on its complete validation split.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        data: folder of prepared data; None for that of the run.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Returns:
        ``loss`` (nats per token), ``perplexity``, ``bits_per_byte`` and ``tokens``.

    Raises:
        CheckpointError: there is no valid checkpoint.
        DataError: there is no prepared data, or it does not fit the checkpoint, or is damaged.
    """
    with restored():
        from hlat.evaluation import evaluate_checkpoint

        return evaluate_checkpoint(checkpoint, data, weights)


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    weights: str = "model",
) -> str:
    """Continue a text.

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder.
        prompt: text to continue.
        max_tokens: most tokens to generate; fewer if the context is full or the text ends.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from the k most likely tokens.
        top_p: sample from the smallest set of tokens with total probability p.
        seed: seed of the sampling.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Returns:
        The continuation, without the prompt.

    Raises:
        CheckpointError: there is no valid checkpoint, or it has no tokenizer.
        DataError: the prompt has no tokens, or too many for the model.
    """
    with restored():
        from hlat.evaluation import Sampling, generate_text

        sampling = Sampling(temperature, top_k, top_p, seed)
        return generate_text(checkpoint, prompt, max_tokens, sampling, weights)


def load_model(
    checkpoint: str | Path,
    *,
    dtype: "torch.dtype | None" = None,
    device: "torch.device | str" = "cpu",
    weights: str = "model",
) -> "Decoder":
    """Load a trained model as a plain ``torch.nn.Module``, in eval mode.

    ``model(tokens)`` maps token ids of shape (batch, sequence) to logits of shape (batch, sequence, vocabulary).

    Args:
        checkpoint: a checkpoint, a checkpoints folder or a run folder; or a Hugging Face folder, such as an export.
        dtype: data type of the weights and of the computation; None for the stored one.
        device: device of the weights.
        weights: "model", or "ema" for the average of the weights, if the run keeps one.

    Raises:
        CheckpointError: there is no valid checkpoint, it has no such weights, or files of the folder are damaged.
        RecipeError: hlat does not have the architecture of the Hugging Face folder.
    """
    from hlat.checkpoint import is_checkpoint, load_hf_model
    from hlat.checkpoint import load_model as load_checkpoint

    folder = Path(checkpoint)
    if (folder / "config.json").is_file() and not is_checkpoint(folder) and not (folder / "checkpoints").is_dir():
        if weights != "model":
            raise CheckpointError(f"{folder}: a Hugging Face folder has one set of weights, not weights={weights!r}.")
        return load_hf_model(folder, device, dtype).eval()
    model, _ = load_checkpoint(folder, device, dtype, weights)
    return model.eval()
