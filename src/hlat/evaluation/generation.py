"""Autoregressive text generation.

prompt -> tokens -> [ model with KV cache -> logits of the last position -> next token ] -> text
"""

from collections.abc import Collection
from pathlib import Path

import torch

from hlat.checkpoint import end_token_ids, load_model, open_checkpoint, read_tokenizer, resolve
from hlat.evaluation.fast_decoding import fast_decoding
from hlat.evaluation.recorded_decoding import decode_on_device
from hlat.evaluation.sampling import Sampling, choose_token
from hlat.model import Decoder, KVCache
from hlat.runtime.backend.table import backend_of
from hlat.runtime.distributed.join import join_run
from hlat.runtime.errors import DataError


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    end_ids: Collection[int] = (),
    use_cache: bool = True,
) -> list[int]:
    """Continue a prompt.

    If ``max_tokens`` allows ``FEWEST_TOKENS`` (24) new tokens or more, a CPU multiplies by packed weights, which rounds
    differently (``hlat.evaluation.packed_weights``). So where two tokens are almost equally likely, the same greedy
    text may go on differently for another ``max_tokens``.

    Args:
        model: on the device to run on.
        prompt: at least one token id.
        max_tokens: number of new tokens at most. Generation also ends when prompt and new tokens reach the model's
            ``max_sequence_length``, if it has one: positions beyond it were never trained.
        sampling: greedy if None.
        end_ids: tokens that end the text; the end token is not returned.
        use_cache: cache keys and values of earlier positions instead of recomputing them for each token.

    Returns:
        The new token ids.

    Raises:
        DataError: the prompt is empty, or leaves no room for a new token, or no new token is asked for.
    """
    total = _total_length(len(prompt), max_tokens, model.config.max_sequence_length)
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    if use_cache and backend_of(device).has_graphs:
        return decode_on_device(model, prompt, total - len(prompt), sampling, end_ids)
    dtype = model.compute or next(model.parameters()).dtype
    cache = KVCache(model.config, 1, total, device, dtype) if use_cache else None
    assert model.head is not None, "the model is complete"
    tokens = list(prompt)
    new = torch.tensor([tokens], device=device)
    with fast_decoding(model, total - len(prompt)):
        for index in range(total - len(prompt)):
            logits_V = model.head(model.hidden(new, cache=cache)[0, -1])
            token = choose_token(logits_V, sampling, index)
            if token in end_ids:
                break
            tokens.append(token)
            new = torch.tensor([[token] if use_cache else tokens], device=device)
    return tokens[len(prompt) :]


def _total_length(prompt: int, max_tokens: int, longest: int | None) -> int:
    """Return the largest number of tokens of prompt and new text together."""
    if not prompt:
        raise DataError("the prompt has no tokens. Give at least one character.")
    if max_tokens < 1:
        raise DataError(f"max_tokens {max_tokens} must be 1 or above.")
    if longest is None:
        return prompt + max_tokens
    if prompt >= longest:
        raise DataError(
            f"the prompt has {prompt} tokens, and the model's limit is {longest} (model.max_sequence_length). "
            f"Shorten the prompt to {longest - 1} tokens at most."
        )
    return min(prompt + max_tokens, longest)


def generate_text(
    checkpoint: str | Path, prompt: str, max_tokens: int, sampling: Sampling | None = None, weights: str = "model"
) -> str:
    """Load a checkpoint on this machine's device and continue a text.

    The prompt is encoded as in training, with a BOS token if the tokenizer adds one. ``weights`` is ``model``, or
    ``ema`` for their average. A greedy text may depend on ``max_tokens``, as ``generate`` says.

    Raises:
        CheckpointError: the folder has no valid checkpoint, or the checkpoint has no tokenizer.
        DataError: the prompt has no tokens, or too many for the model.
    """
    folder = resolve(Path(checkpoint))
    ends = end_token_ids(open_checkpoint(folder))
    tokenizer = read_tokenizer(
        folder, eos_token=None
    )  # end tokens are read above; an imported tokenizer may define none
    tokens = tokenizer.encode_prompt(prompt)
    model, _ = load_model(folder, join_run().device, weights=weights)
    return tokenizer.decode(generate(model, tokens, max_tokens, sampling, end_ids=ends))
