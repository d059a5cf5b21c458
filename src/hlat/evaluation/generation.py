"""Text from a model, token by token.

prompt -> tokens -> [ model with KV cache -> logits of the last position -> next token ] -> text
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from hlat.checkpoint import load_model, resolve
from hlat.config import DataError
from hlat.data import load_tokenizer
from hlat.model import Decoder, KVCache
from hlat.runtime import philox, start, stream_key


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # then the smallest set of likeliest tokens whose share reaches p
    seed: int = 0


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    *,
    eos_id: int | None = None,
    use_cache: bool = True,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: on the device to run on.
        prompt: at least one token id.
        max_tokens: number of new tokens at most; an EOS token ends earlier and is not returned.
        sampling: greedy if None.
        eos_id: token that ends the text, if any.
        use_cache: keep keys and values of earlier positions instead of computing them again each time.

    Returns:
        The new token ids.

    Raises:
        DataError: the prompt is empty.
    """
    if not prompt:
        raise DataError("the prompt has no tokens. Give at least one character.")
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    cache = KVCache(model.config, 1, len(prompt) + max_tokens, device, dtype) if use_cache else None
    tokens = list(prompt)
    new = torch.tensor([tokens], device=device)
    for index in range(max_tokens):
        logits_V = model(new, cache=cache)[0, -1]
        token = _choose(logits_V, sampling, index)
        if token == eos_id:
            break
        tokens.append(token)
        new = torch.tensor([[token] if use_cache else tokens], device=device)
    return tokens[len(prompt) :]


def _choose(logits_V: torch.Tensor, sampling: Sampling, index: int) -> int:
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    scores, ids = (logits_V.double() / sampling.temperature).sort(descending=True, stable=True)
    shares = scores[: sampling.top_k].softmax(0)
    if sampling.top_p is not None:
        # a token stays while the tokens before it have not reached p; the likeliest always stays
        before = shares.cumsum(0) - shares
        shares = shares[: max(1, int((before < sampling.top_p).sum()))]
    below = shares.cumsum(0) / shares.sum()
    draw = _uniform(sampling.seed, index)
    return int(ids[min(int((below <= draw).sum()), len(shares) - 1)])


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the position only."""
    word = philox(stream_key(seed, "sampling"), torch.tensor(index))[0]
    return int(word) / 2.0**32


def generate_text(checkpoint: str | Path, prompt: str, max_tokens: int, sampling: Sampling | None = None) -> str:
    """Continue a text with a checkpoint, on this machine's device.

    Raises:
        CheckpointError: no valid checkpoint there, or one without a tokenizer.
        DataError: the prompt has no tokens.
    """
    folder = resolve(Path(checkpoint))
    tokenizer = load_tokenizer(folder / "tokenizer")
    model, _ = load_model(folder, start().device)
    ids = generate(model, tokenizer.encode(prompt), max_tokens, sampling, eos_id=tokenizer.eos_id)
    return tokenizer.decode(ids)
