"""Scaled rotary positions: the bits of transformers for every kind, also where they depend on the length of a text."""

from typing import Any

import pytest
import torch

from hlat.config import SCALINGS, ModelConfig, hf_to_model, model_problems
from hlat.evaluation import generate
from hlat.model.hf.config import config_json
from hlat.model.rope import _SCALED, Rope, _Table, frequencies
from hlat.parallel.forward_model import ForwardModel
from hlat.runtime.errors import DataError
from tests.model.test_parity import distance, ours, theirs
from tests.support.model.families import BASE, LLAMA3, float64_norms, our_model, tokens_of, twin

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
CPU = torch.device("cpu")
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position": 64}
DYNAMIC = {"kind": "dynamic", "factor": 4.0, "original_max_position": 32}

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "dynamic": DYNAMIC,
    "dynamic, odd factor": DYNAMIC | {"factor": 1.1, "original_max_position": 40},
    "yarn": YARN,
    "yarn, Qwen": YARN | {"factor": 4.0, "original_max_position": 32768},
    "yarn, limits": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, equal limits": YARN | {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
    "yarn, gpt-oss": YARN | {"factor": 32.0, "original_max_position": 4096, "truncate": False},
    "yarn, DeepSeek": YARN | {"factor": 40.0, "original_max_position": 4096, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, one mscale": YARN | {"mscale": 0.5},
    "yarn, given factor": YARN | {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, shorter": YARN | {"factor": 0.5},
    "yarn, all kept": YARN | {"original_max_position": 10**9},
    "yarn, none kept": YARN | {"original_max_position": 2},
}


def model_of(scaling: dict[str, Any] | None, **more: Any) -> ModelConfig:
    more = {"theta": 10000.0, **more}
    rope = {"theta": more.pop("theta"), "scaling": scaling}
    return ModelConfig.model_validate({**BASE, "rope": rope, **more})


def rotary(config: ModelConfig) -> Any:
    """Module of transformers that has frequencies, from the exported config.json."""
    content = config_json(config, torch.float32, eos_id=None, bos_id=None)
    return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**content))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 16), (500000.0, 128), (3.5, 24)])
def test_frequencies_are_those_of_transformers(name: str, theta: float, head_dim: int) -> None:
    config = model_of(SCALED[name], theta=theta, head_dim=head_dim)
    radians, factor = frequencies(config.rope, head_dim, 0)
    reference = rotary(config)
    assert torch.equal(radians, reference.inv_freq) and factor == reference.attention_scaling


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("length", [17, 32, 33, 40, 41, 300])
def test_tables_are_those_of_transformers(name: str, length: int) -> None:
    config = model_of(SCALED[name])
    cos, sin = Rope(config.rope, 16).tables(((0, length),), CPU)
    expected = rotary(config)(torch.empty(0), torch.arange(length)[None])
    for table, both in zip((cos, sin), expected, strict=True):
        assert torch.equal(torch.cat([table, table], dim=-1), both[0])


@pytest.mark.parametrize("name", SCALED)
def test_a_table_is_the_same_on_every_rank_and_for_every_document(name: str) -> None:
    """Ranks of context parallelism have other positions, and documents begin anew; the rows have one length."""
    rope = Rope(model_of(SCALED[name]).rope, 16)
    whole, rope.length = rope.tables(((0, 64),), CPU), 64
    for spans in (((0, 16), (48, 64)), ((16, 32), (32, 48))):
        for part, table in zip(rope.tables(spans, CPU), whole, strict=True):
            assert torch.equal(part, torch.cat([table[start:stop] for start, stop in spans]))
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None]
    for part, table in zip(rope.tables(((0, 48),), CPU, positions), whole, strict=True):
        assert torch.equal(part, table[positions])


@pytest.mark.parametrize("name", SCALED)
def test_float64_agrees_to_1e_9(name: str) -> None:
    """Logits and gradients of texts longer than some of the original contexts."""
    config = model_of(SCALED[name], kv_heads=2)
    logits, gradients = ours(config, torch.float64)
    expected_logits, expected = theirs(config)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-9, atol=1e-9 * float(expected_logits.abs().max()))
    assert max(distance(gradients[name], expected[name]) for name in expected) < 1e-9


@pytest.mark.parametrize("name", SCALED)
def test_every_scaling_is_exported_and_imported_again(name: str) -> None:
    config = model_of(SCALED[name], max_sequence_length=128)
    content = config_json(config, torch.float32, eos_id=None, bos_id=None)
    again = ModelConfig.model_validate(hf_to_model(content))
    assert again.rope == config.rope
    longest = again.max_sequence_length
    assert longest is not None and config_json(again, torch.float32, eos_id=None, bos_id=None) == content
    assert not model_problems(again)


@pytest.mark.parametrize("name", ["dynamic", "yarn, DeepSeek"])
@pytest.mark.parametrize("prompt", [5, 40])
def test_a_text_grows_as_in_transformers(name: str, prompt: int) -> None:
    """Prompts below and above the original context of 32: each token has the frequencies of the text up to it."""
    config = model_of(SCALED[name], kv_heads=2)
    model, reference = our_model(config, torch.float64), twin(our_model(config), torch.float64)
    tokens = tokens_of(config, 1, prompt)
    with float64_norms(reference):
        text = reference.generate(tokens, max_new_tokens=60, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert generate(model, tokens[0].tolist(), 60) == text[0, prompt:].tolist()
    assert len(set(text[0, prompt:].tolist())) > 3


def test_texts_that_are_rotated_by_their_lengths_are_not_computed_together() -> None:
    config = model_of(DYNAMIC)
    model = ForwardModel(our_model(config), CPU)
    cache = model.new_cache(2, 40)
    model.hidden(tokens_of(config, 2, 31), cache)
    model.hidden(tokens_of(config, 2, 1), cache)
    with pytest.raises(DataError, match="those above 32 tokens are rotated by their lengths"):
        model.hidden(tokens_of(config, 2, 1), cache)


def test_every_kind_has_a_formula_and_a_case() -> None:
    assert set(SCALINGS) == set(_SCALED) == {str(scaling["kind"]) for scaling in SCALED.values()}


@pytest.mark.parametrize("name", ["none", "linear", "yarn"])
def test_logits_depend_on_differences_of_positions_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a document that is cut over rows would gain nothing if its positions were carried on into the next row.

    A position is a multiple of the frequencies, here in float64: angles of up to 1,048 radians are wrong by up to
    1,048 * 2**-53 = 1.2e-13, a score by twice that times its norms, which are below 10. Softmax and two layers multiply
    that by less than 10 each: 2.4e-10. A shift that is not constant, by 1 from the middle on, changes the logits.
    """
    config = model_of(SCALED.get(name))

    def logits(shift: torch.Tensor) -> torch.Tensor:
        def build(rope: Rope, length: int, rows: int, device: torch.device) -> _Table:
            radians, factor = frequencies(rope._rope, rope._width, length)
            angles = torch.outer(torch.arange(rows, dtype=torch.float64) + shift[:rows], radians.double())
            return _Table(length, angles.cos() * factor, angles.sin() * factor)

        monkeypatch.setattr(Rope, "_build", build)
        with torch.no_grad():
            return our_model(config, torch.float64)(tokens_of(config))

    plain, shifted = (logits(torch.full((1024,), float(shift))) for shift in (0, 1000))
    assert distance(shifted, plain) < 2.4e-10
    assert distance(logits((torch.arange(1024) > 24).double()), plain) > 1e-4
