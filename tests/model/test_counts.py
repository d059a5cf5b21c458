"""Counts equal measurements: parameters of built models, PyTorch's FLOP counter, tensors saved for backward."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hlat.config import PRESETS
from hlat.config.sections.model import ModelConfig
from hlat.model import ModelShard, build
from hlat.model.activations import RankWorkload, activation_bytes
from hlat.model.counts import (
    attended_positions,
    count_parameters,
    effective_window,
    flops_per_token,
    forward_flops_per_token,
)
from hlat.model.spec import RECOMPUTABLE
from hlat.precision import MODES
from hlat.runtime.backend.cpu import CpuBackend
from tests.support.model.families import FAMILIES, config_of, our_model, tokens_of
from tests.support.model.kernel_cases import torch_only

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.1-405b": 405_853_388_800,
    # of the safetensors files, as Hugging Face shows them
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
}
KINDS = [(family, coalesce) for family in FAMILIES for coalesce in (True, False)]


@pytest.mark.parametrize("preset", PRESETS)
def test_parameter_counts_of_presets_equal_built_models_and_published_numbers(preset: str) -> None:
    config = ModelConfig(**PRESETS[preset])
    built = sum(p.numel() for p in build(config, device="meta", seed=None).parameters())
    assert count_parameters(config).total == built == PUBLISHED.get(preset, built)


@pytest.mark.parametrize(("family", "coalesce"), KINDS)
def test_parameter_counts_by_component_equal_the_built_model(family: str, coalesce: bool) -> None:
    config = config_of(family, coalesce=coalesce)
    model = build(config, device="meta", seed=None)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    count = count_parameters(config)
    norms = sum(n for name, n in sizes.items() if "norm" in name)
    attention = sum(n for name, n in sizes.items() if ".attention." in name and "norm" not in name)
    assert (count.norms, count.attention) == (norms, attention)
    assert count.feed_forward == sum(n for name, n in sizes.items() if ".feed_forward." in name)
    assert (count.embedding, count.head) == (sizes["embedding.weight"], sizes.get("head.weight", 0))
    assert count.total == sum(sizes.values())


@pytest.mark.parametrize(("family", "coalesce"), KINDS)
def test_flops_by_the_full_convention_equal_torchs_flop_counter(
    family: str, coalesce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operations with plain products in attention: the counter does not know other kernels' operators."""
    monkeypatch.setattr(CpuBackend, "fp32_by_onednn", False)  # oneDNN's operator is one of these, on AMD's processors
    config = config_of(family, coalesce=coalesce).model_copy(update={"attn_logit_softcapping": None})
    # Within a window, and with another softmax, attention is an operation of hlat's own, which torch cannot count.
    model, tokens = our_model(config), tokens_of(config, 2, min(48, config.sliding_window or 48))
    model.config = config.model_copy(update={"attention_sinks": False})
    for block in model.blocks():
        block.attention.sinks = None
    with torch_only(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with torch_only(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        loss.backward()
    length = tokens.shape[1]
    assert forward.get_total_flops() == tokens.numel() * forward_flops_per_token(config, length, "full")
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total == tokens.numel() * flops_per_token(config, length, "full")


def test_flops_by_the_causal_convention_count_each_query_key_pair() -> None:
    config, length = config_of("llama31-gqa"), 48
    pairs = sum(position + 1 for position in range(length))
    per_pair = 3 * 4 * config.layers * config.heads * config.n_head_dim
    weights = 6 * count_parameters(config).matmul
    assert length * flops_per_token(config, length) == length * weights + pairs * per_pair
    with pytest.raises(ValueError, match="'causal' or 'full'"):
        flops_per_token(config, length, "half")  # type: ignore[arg-type]


def saved_bytes(config: ModelConfig, tokens: torch.Tensor, mode: str) -> int:
    """Bytes of all storages saved for backward, each once, except for parameters and rotation tables."""
    model = our_model(config, MODES[mode].weights)
    model.compute = MODES[mode].compute
    model(tokens[:, :2])  # creates the tables
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    known |= {
        t.untyped_storage().data_ptr() for rope in model.ropes.values() for t in rope.tables(((0, 1),), tokens.device)
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
    with hooks:
        model(tokens, tokens)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("family", "coalesce"), KINDS)
@pytest.mark.parametrize(
    "mode", ["mixed", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("fp32", "bf16-sr"))]
)
def test_activation_bytes_equal_the_tensors_saved_for_backward(family: str, coalesce: bool, mode: str) -> None:
    config = config_of(family, coalesce=coalesce)
    tokens = tokens_of(config, 2, 64)
    counted = activation_bytes(config, *tokens.shape, mode)
    assert counted.total == saved_bytes(config, tokens, mode)
    # per layer too: the difference of one layer is exactly per_layer
    fewer = config.model_copy(update={"layers": config.layers - 1})
    assert saved_bytes(config, tokens, mode) - saved_bytes(fewer, tokens, mode) == counted.per_layer


def test_tensor_parallelism_divides_activation_bytes_of_a_layer() -> None:
    """Korthikanti et al. 2022, section 4.2.2: all tensors but the gathered inputs are sharded."""
    config, ranks = config_of("llama31-gqa"), 2
    shard = ModelShard(tensor_index=1, tensor_count=ranks)
    whole = activation_bytes(config, 2, 64, "bf16-sr").layer
    sharded = activation_bytes(config, 2, 64, "bf16-sr", workload=RankWorkload(shard, sequence=True)).layer
    gathered = {"attention_input", "feed_forward_input"}
    assert {name for name, size in sharded.items() if size == whole[name]} == gathered
    assert all(size * ranks == whole[name] for name, size in sharded.items() if name not in gathered)
    again = activation_bytes(config, 2, 64, "bf16-sr", gathered, RankWorkload(shard, sequence=True))
    freed = ("attention_input", "feed_forward_input", "attention_norm_scale", "feed_forward_norm_scale")
    assert again.per_layer * ranks == sum(whole.values()) - sum(whole[name] for name in freed)


def test_recomputing_every_step_saves_only_the_input_of_a_block() -> None:
    config = config_of("qwen3-norm-bias-tied")
    everything = activation_bytes(config, 2, 64, "mixed").layer
    assert activation_bytes(config, 2, 64, "mixed", RECOMPUTABLE).layer == {"x": everything["x"]}


@pytest.mark.parametrize(("window", "length"), [(1, 12), (5, 12), (11, 12), (12, 12), (40, 12)])
def test_a_sliding_window_limits_the_attended_positions(window: int, length: int) -> None:
    config = config_of("mistral-window", sliding_window=window)
    attended = [sum(1 for key in range(length) if query - window < key <= query) for query in range(length)]
    assert attended_positions(config, length) == pytest.approx(sum(attended) / length, rel=1e-15)
    assert attended_positions(config, length, "full") == min(window, length)


def test_layers_of_two_kinds_attend_to_their_mean() -> None:
    config, length = config_of("olmo3"), 30
    counts = [
        sum(1 for key in range(length) if query - (window or length) < key <= query)
        for window in config.windows(length)
        for query in range(length)
    ]
    assert attended_positions(config, length) == pytest.approx(sum(counts) / len(counts), rel=1e-15)
    wide = [window or length for window in config.windows(length)]
    assert attended_positions(config, length, "full") == sum(wide) / config.layers
    # The planner's formula, for one window and for the mixture
    costs = [each * (2 - each / length) for each in (*wide, effective_window(config, length))]
    assert costs[-1] == pytest.approx(sum(costs[:-1]) / config.layers, rel=1e-14)
    assert effective_window(config_of("mistral-window"), length) == 9
    assert effective_window(config_of("mistral-window"), 9) == math.inf
