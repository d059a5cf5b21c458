"""Scaled rotary positions: the bits of transformers for every kind, also where they depend on the length of a text."""

from typing import Any

import pytest
import torch

from hlat.config import ModelConfig
from hlat.model.hf_config import config_json
from hlat.model.rope import Rope, frequencies
from tests.support.model.families import BASE, LLAMA3

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
    cos, sin = Rope(config.rope, 16).tables([(0, length)], CPU)
    expected = rotary(config)(torch.empty(0), torch.arange(length)[None])
    for table, both in zip((cos, sin), expected, strict=True):
        assert torch.equal(torch.cat([table, table], dim=-1), both[0])
