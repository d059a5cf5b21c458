"""Generation with a KV cache gives the same tokens as without, and as transformers."""

import pytest
import torch

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, KVCache
from tests.support.model.families import FAMILIES, config_of, our_model, tokens_of, twin

NEW = 24


def cache_for(config: ModelConfig, length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(config, batch, length, "cpu", dtype)


@torch.no_grad()
def greedy(model: Decoder, prompt_BS: torch.Tensor, *, cached: bool) -> torch.Tensor:
    tokens = new = prompt_BS
    cache = cache_for(model.config, prompt_BS.shape[1] + NEW, len(prompt_BS)) if cached else None
    for _ in range(NEW):
        chosen = model(new, cache=cache)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], dim=1)
        new = chosen if cached else tokens
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("coalesce", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_cached_generation_equals_uncached_and_transformers(family: str, coalesce: bool) -> None:
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    config = config_of(family, coalesce=coalesce)
    model, prompt_BS = our_model(config), tokens_of(config, 2, 11)
    cached = greedy(model, prompt_BS, cached=True)
    assert torch.equal(cached, greedy(model, prompt_BS, cached=False))
    reference = twin(model, torch.float32)
    expected = reference.generate(prompt_BS, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(cached, expected)
    assert len(set(cached[0, 11:].tolist())) > 5  # a constant continuation would prove little


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "chunks", [[7, 6, 1, 6], *(pytest.param(each, marks=pytest.mark.slow) for each in ([20], [1] * 20, [1, 19]))]
)
@torch.no_grad()
def test_a_prompt_in_chunks_of_any_size_gives_the_same_logits(family: str, chunks: list[int]) -> None:
    config = config_of(family)
    model, tokens_BS = our_model(config, torch.float64), tokens_of(config, 2, 20)
    cache = cache_for(config, 20, dtype=torch.float64)
    outputs = [model(chunk, cache=cache) for chunk in tokens_BS.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(outputs, dim=1), model(tokens_BS), rtol=1e-11, atol=1e-11)
    assert cache.length == 20


def test_all_layers_of_a_call_share_one_mask_and_the_next_call_has_its_own() -> None:
    cache = cache_for(config_of("mistral-window"), 8)
    cache.advance(3)
    first, second = (cache.layer(index, 3).mask(2) for index in (0, 1))
    assert first is second and first.tolist() == [[False, True, True, True, False], [False, False, True, True, True]]
    cache.advance(2)
    assert cache.layer(0, 3).mask(2).shape == (2, 7)
    assert cache.layer(0, 3).mask(1).tolist() == [[False, False, False, True, True, True]]


@torch.no_grad()
def test_a_full_cache_raises_before_anything_is_stored() -> None:
    config = config_of("llama2-mha")
    model, cache = our_model(config), cache_for(config, 8)
    model(tokens_of(config, 2, 6), cache=cache)
    with pytest.raises(ValueError, match="has room for 8 positions, 6 are in use, 3 more"):
        model(tokens_of(config, 2, 3), cache=cache)
    assert cache.length == 6


@torch.no_grad()
def test_a_bf16_cache_works_for_a_model_that_computes_in_bf16() -> None:
    config = config_of("llama31-gqa")
    model, tokens_BS = our_model(config), tokens_of(config, 2, 12)
    model.compute = torch.bfloat16
    cache = cache_for(config, 12, dtype=torch.bfloat16)
    outputs = torch.cat([model(chunk, cache=cache) for chunk in tokens_BS.split(5, dim=1)], dim=1)
    whole = model(tokens_BS)
    # other kernels for chunks, so bf16 roundings differ: 11 per block and one for the logits, 2^-9 each, on both sides
    assert float((outputs - whole).norm() / whole.norm()) < 2 * (11 * config.layers + 1) * 2.0**-9
