"""Compiled decoding steps: the logits of transformers in float64, for every family, whatever rows, mask and threads."""

from typing import Any

import pytest
import torch

from hlat.config.sections.model import ModelConfig
from hlat.model import Decoder, KVCache
from hlat.model import decoding as decode
from hlat.model import decoding as step
from hlat.model.architectures.base import NormPlace
from hlat.model.decoding import compile_step
from tests.model.test_parity import distance, longest_path
from tests.support.model.families import (
    FAMILIES,
    WITHOUT_STEP,
    config_of,
    float64_norms,
    our_model,
    tokens_of,
    twin,
)
from tests.support.model.kernel_cases import same_bits, torch_only

pytest.importorskip("transformers", reason="the extra [hf] is not installed")
CPU, B = torch.device("cpu"), torch.bfloat16
pytestmark = pytest.mark.skipif(
    decode.decoding_library(CPU, torch.float32, 64) is None, reason="no AVX2, or no C compiler"
)
FUSION = [(family, coalesce) for family in FAMILIES if family not in WITHOUT_STEP for coalesce in (True, False)]


class Counted:
    """A step that counts its calls."""

    def __init__(self, model: Decoder) -> None:
        found = compile_step(model)
        assert found is not None
        self._step, self.calls = found, 0

    def takes(self, x: torch.Tensor, cache: KVCache) -> bool:
        return self._step.takes(x, cache)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls += 1
        return self._step(*arguments)


@torch.no_grad()
def decoded(model: Decoder, tokens_BS: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Hidden states, the first tokens computed together, the others one by one by the step."""
    counted = Counted(model)
    model.step = counted
    rows, length = tokens_BS.shape
    cache = KVCache(model.config, rows, length, CPU, model.compute or next(model.parameters()).dtype)
    chunks = [first] * (first > 0) + [1] * (length - first)
    hidden = [model.hidden(chunk, cache=cache) for chunk in tokens_BS.split(chunks, dim=1)]
    assert counted.calls == length - first and cache.length == length
    model.step = None
    return torch.cat(hidden, dim=1)


def exact(config: ModelConfig) -> torch.Tensor:
    """Logits of transformers in float64."""
    reference = twin(our_model(config), torch.float64)
    with float64_norms(reference), torch.no_grad():
        logits: torch.Tensor = reference(tokens_of(config), use_cache=False).logits
    return logits


@pytest.mark.parametrize(("family", "coalesce"), FUSION)
def test_the_error_of_fp32_is_explained_by_rounding(family: str, coalesce: bool) -> None:
    """The bound is that of the model's own blocks: a step has the same operations. ``norm_eps`` is large: it counts."""
    config = config_of(family, coalesce=coalesce, norm_eps=0.1)
    model = our_model(config)
    logits = model.head(decoded(model, tokens_of(config)))
    assert distance(logits.detach(), exact(config)) < longest_path(config, tokens_of(config).shape[1]) * 2.0**-24


@pytest.mark.parametrize(("family", "coalesce"), FUSION)
def test_the_error_of_bf16_is_explained_by_rounding(family: str, coalesce: bool) -> None:
    """As in test_parity: 14 roundings of 2^-9 in a block, three outside. Weights in fp32, products in bf16."""
    config = config_of(family, coalesce=coalesce)
    model = our_model(config)
    model.compute = B
    logits = model.head(decoded(model, tokens_of(config)))
    assert logits.dtype == B
    assert distance(logits.detach(), exact(config)) < (14 * config.layers + 3) * 2.0**-9


@pytest.mark.parametrize("dtype", [torch.float32, B], ids=str)
@pytest.mark.parametrize("family", ["llama31-gqa", "mistral-window", "olmo2-gqa", "qwen3-norm-bias-tied"])
def test_rows_and_threads_change_no_bit(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows are tiles of 4, 2 and 1; blocks that threads take are small, so that all of them have some."""
    config = config_of(family)
    model, tokens_BS = our_model(config, dtype), tokens_of(config, 7, 20)
    together = decoded(model, tokens_BS)
    for row in range(7):
        assert same_bits(decoded(model, tokens_BS[row : row + 1])[0], together[row])
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert same_bits(decoded(model, tokens_BS), together)


@pytest.mark.parametrize("family", ["llama2-mha", "linear-mqa", "mistral-window"])
def test_long_texts_are_attended_to_in_blocks(family: str) -> None:
    """600 positions are three blocks of 256 keys; those computed together come first."""
    config = config_of(family, max_sequence_length=700)
    model, tokens_BS = our_model(config), tokens_of(config, 2, 600)
    with torch.no_grad():
        expected = our_model(config, torch.float64).hidden(tokens_BS)
    found = decoded(model, tokens_BS, first=590)[:, 590:]
    assert distance(found, expected[:, 590:]) < longest_path(config, 600) * 2.0**-24


@pytest.mark.parametrize("family", ["llama31-gqa", "olmo2-mha"])
@torch.no_grad()
def test_a_mask_says_what_each_row_attends_to(family: str) -> None:
    """Padding on the left, of another number of positions in each row, with the positions of the text.

    Both computations have the error of a step, so that they differ by two of them.
    """
    config = config_of(family)
    model, padding, length = our_model(config), (0, 5, 9), 20
    tokens_BS = tokens_of(config, 3, length)
    model.step = Counted(model)
    cache = KVCache(config, 3, length, CPU, torch.float32)
    cache.memory.fill_(torch.nan)  # nothing is read that the mask hides, but values, times 0: these are numbers
    cache.memory[:, 1] = 0
    place = torch.arange(length)
    for index in range(length):
        mask = torch.stack([(place[: index + 1] >= min(each, index)) for each in padding])
        cache.attend_to(dict.fromkeys(model.windows, mask[:, None]))
        positions = (index - torch.tensor(padding)).clamp(min=0)[:, None]
        found = model.hidden(tokens_BS[:, index : index + 1], cache=cache, positions=positions)
    for row, each in enumerate(padding):
        alone = decoded(model, tokens_BS[row : row + 1, each:])
        assert distance(found[row, -1], alone[0, -1].double()) < 2 * longest_path(config, length) * 2.0**-24
    assert distance(found[0], decoded(model, tokens_BS[:1])[0, -1:]) == 0.0


def test_what_has_no_step_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama2-mha")
    model = our_model(config)
    found = compile_step(model)
    assert found is not None
    cache = KVCache(config, 2, 8, CPU, torch.float32)
    x = torch.zeros(2, 1, 64)
    with torch.no_grad():
        assert found.takes(x, cache)
        assert not found.takes(torch.zeros(2, 2, 64), cache), "several tokens"
        assert not found.takes(x.to(B), cache), "another dtype"
        assert not found.takes(x, KVCache(config, 2, 8, CPU, B)), "a cache of another dtype"
        assert not found.takes(torch.zeros(step.MOST_ROWS + 1, 1, 64), cache), "many rows"
    assert not found.takes(x, cache), "gradients"
    assert compile_step(our_model(config, torch.float64)) is None
    with torch_only():
        assert compile_step(model) is None
    assert all(compile_step(our_model(config_of(family))) is None for family in WITHOUT_STEP)
    monkeypatch.setattr(step, "norm_place", lambda config: None)
    assert compile_step(model) is None, "an architecture that says nothing about its norms"


def test_the_place_of_norms_matters() -> None:
    """A step with norms in another place is another model, so that the comparisons above would notice it."""
    config = config_of("llama2-mha")
    model = our_model(config)
    right = decoded(model, tokens_of(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "norm_place", lambda config: NormPlace.OUTPUT)
        assert distance(decoded(model, tokens_of(config)), right.double()) > 0.1


def test_without_a_compiler_torch_decodes_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode._compiled.cache_clear()
    for compiler in ("false", "gcc -mno-avx2"):
        monkeypatch.setenv("CC", compiler)
        assert compile_step(our_model(config_of("llama2-mha"))) is None
        assert "tokens are decoded by torch, more slowly" in caplog.text
        decode._compiled.cache_clear()
        caplog.clear()
