"""Text from a model, token by token.

prompt -> tokens -> [ model with KV cache -> logits of the last position -> next token ] -> text
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from hlat.checkpoint import end_token_ids, load_model, read_tokenizer
from hlat.checkpoint.protocol import open_checkpoint, resolve
from hlat.model import Decoder, KVCache
from hlat.runtime import DataError
from hlat.runtime.distributed import join_run
from hlat.runtime.randomness import philox, stream_key


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
    end_ids: Collection[int] = (),
    use_cache: bool = True,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: on the device to run on.
        prompt: at least one token id.
        max_tokens: number of new tokens at most. Generation ends earlier where prompt and new tokens fill
            ``max_sequence_length`` of a model that declares one: beyond it no position was ever trained.
        sampling: greedy if None.
        end_ids: tokens that end the text; the one that does is not returned.
        use_cache: keep keys and values of earlier positions instead of computing them again each time.

    Returns:
        The new token ids.

    Raises:
        DataError: the prompt is empty, or leaves no room for a new token.
    """
    total = _total_length(len(prompt), max_tokens, model.config.max_sequence_length)
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    cache = KVCache(model.config, 1, total, device, dtype) if use_cache else None
    tokens = list(prompt)
    new = torch.tensor([tokens], device=device)
    for index in range(total - len(prompt)):
        logits_V = model(new, cache=cache)[0, -1]
        token = _choose(logits_V, sampling, index)
        if token in end_ids:
            break
        tokens.append(token)
        new = torch.tensor([[token] if use_cache else tokens], device=device)
    return tokens[len(prompt) :]


def _total_length(prompt: int, max_tokens: int, longest: int | None) -> int:
    """Tokens of prompt and text together, at most."""
    if not prompt:
        raise DataError("the prompt has no tokens. Give at least one character.")
    if longest is None:
        return prompt + max_tokens
    if prompt >= longest:
        raise DataError(
            f"the prompt has {prompt} tokens, and the model takes {longest} in all (model.max_sequence_length). "
            f"Shorten the prompt to {longest - 1} tokens at most."
        )
    return min(prompt + max_tokens, longest)


def _choose(logits_V: torch.Tensor, sampling: Sampling, index: int) -> int:
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    # On the CPU, as one token's numbers are few: CUDA has no running sum of floats that gives the same bits each time.
    scores, ids = (logits_V.cpu().double() / sampling.temperature).sort(descending=True, stable=True)
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

    The prompt is encoded as the model expects its input, with a BOS token where the tokenizer puts one.

    Raises:
        CheckpointError: no valid checkpoint there, or one without a tokenizer.
        DataError: the prompt has no tokens, or too many for the model.
    """
    folder = resolve(Path(checkpoint))
    ends = end_token_ids(open_checkpoint(folder))
    tokenizer = read_tokenizer(folder, eos_token=None)  # the ends are known; an import's tokenizer may not name any
    tokens = tokenizer.encode_prompt(prompt)
    model, _ = load_model(folder, join_run().device)
    return tokenizer.decode(generate(model, tokens, max_tokens, sampling, end_ids=ends))
