"""Laws 3 and 5 on real models: training from a restored state is bitwise equal, with fused parameters or without."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hlat.checkpoint import collect, load_weights, restore
from hlat.checkpoint.format.tensor_files import replicated_chunks
from hlat.checkpoint.protocol.reader import Checkpoint, open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import AdamWConfig
from hlat.model import Decoder, build, collect_local_parameters
from hlat.model.parameter_layout import canonical_shapes
from hlat.optim import build_optimizer
from hlat.optim.adamw import Fp32AdamW
from hlat.runtime.errors import CheckpointError
from hlat.runtime.randomness import rng_state, set_rng_state
from tests.support.checkpoint.saved_states import assemble, assert_equal

PLAIN = {
    "vocab_size": 61,
    "layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "heads": 4,
    "kv_heads": 2,
}
VARIANTS = {
    "gqa": {},
    "mha": {"kv_heads": 4},
    "mqa, tied": {"kv_heads": 1, "tie_embeddings": True},
    "bias, qk norm": {"qkv_bias": True, "qk_norm": True, "head_dim": 8},
}


def make(
    dtype: torch.dtype = torch.float32, seed: int | None = 0, **changes: object
) -> tuple[Decoder, torch.optim.AdamW]:
    model = build(ModelConfig.model_validate(PLAIN | changes), device="cpu", seed=seed, dtype=dtype)
    return model, build_optimizer(collect_local_parameters(model), AdamWConfig(lr=0.01))


def train(model: Decoder, optimizer: torch.optim.AdamW, steps: range) -> None:
    """Train some steps on batches from torch's global generators."""
    for step in steps:
        tokens = torch.randint(0, 61, (2, 9)) + random.randrange(2) * np.random.randint(1)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    before = rng_state()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    yield
    set_rng_state(before)


def save(folder: Path, state: dict[str, torch.Tensor], step: int = 3) -> Checkpoint:
    store = CheckpointStore(folder / "checkpoints", 2)
    return open_checkpoint(store.save(step, replicated_chunks(state), {"step": step}))


def snapshot(model: Decoder, optimizer: torch.optim.AdamW | None = None) -> dict[str, torch.Tensor]:
    return assemble(collect(model.config, collect_local_parameters(model), optimizer))


def load(checkpoint: Checkpoint, model: Decoder, optimizer: torch.optim.AdamW) -> None:
    restore(checkpoint, model.config, collect_local_parameters(model), optimizer)


def seeded(model: Decoder, optimizer: torch.optim.AdamW) -> None:
    """Overwrite everything with other values, so that a value that is not restored is detected."""
    train(model, optimizer, range(1))
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    random.gauss(0, 1)
    np.random.standard_normal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    """Bit for bit: weights, moments, steps and generators, and again after three more steps."""
    model, optimizer = make(dtype, **VARIANTS[variant])
    train(model, optimizer, range(3))
    saved = snapshot(model, optimizer)
    checkpoint = save(tmp_path, saved)
    train(model, optimizer, range(3, 6))
    straight = snapshot(model, optimizer)

    resumed, resumed_optimizer = make(dtype, seed=5, **VARIANTS[variant])
    seeded(resumed, resumed_optimizer)
    load(checkpoint, resumed, resumed_optimizer)
    assert_equal(snapshot(resumed, resumed_optimizer), saved)
    train(resumed, resumed_optimizer, range(3, 6))
    assert_equal(snapshot(resumed, resumed_optimizer), straight)
    assert not torch.equal(straight["model.model.norm.weight"], saved["model.model.norm.weight"]), (
        "the weights have changed"
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("coalesced", [True, False])
def test_a_state_can_be_loaded_with_another_choice_of_fused_parameters(
    tmp_path: Path, variant: str, coalesced: bool
) -> None:
    """Loading and saving back changes nothing, and the other model computes the same."""
    model, optimizer = make(coalesce=coalesced, **VARIANTS[variant])
    train(model, optimizer, range(2))
    state = snapshot(model, optimizer)
    other, other_optimizer = make(seed=5, coalesce=not coalesced, **VARIANTS[variant])
    load(save(tmp_path, state), other, other_optimizer)
    assert_equal(snapshot(other, other_optimizer), state)
    weights = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert weights == set(canonical_shapes(model.config)) == set(canonical_shapes(other.config))


def test_optimizer_groups_keep_their_own_state(tmp_path: Path) -> None:
    """Every moment is restored to its parameter, with and without weight decay, fused or not."""
    model, optimizer = make()
    train(model, optimizer, range(2))
    other, other_optimizer = make(seed=5)
    load(save(tmp_path, snapshot(model, optimizer)), other, other_optimizer)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[ours][key], other_optimizer.state[theirs][key])
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in other_optimizer.param_groups
    ]


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_before_the_first_step_can_be_saved(tmp_path: Path, fused: bool) -> None:
    """Moments that do not exist yet are saved as zeros, and the first step is the same with them."""
    model, _ = make()
    plain, _ = make()
    optimizers = [Fp32AdamW(m.parameters(), lr=0.01, fused=fused) for m in (model, plain)]
    checkpoint = save(tmp_path, snapshot(model, optimizers[0]))
    other, _ = make(seed=5)
    other_optimizer = Fp32AdamW(other.parameters(), lr=0.01, fused=fused)
    load(checkpoint, other, other_optimizer)
    before = rng_state()
    for m, optimizer in ((model, optimizers[0]), (plain, optimizers[1]), (other, other_optimizer)):
        set_rng_state(before)
        train(m, optimizer, range(1))
    expected = snapshot(plain, optimizers[1])
    assert_equal(snapshot(model, optimizers[0]), expected)
    assert_equal(snapshot(other, other_optimizer), expected)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoint = save(tmp_path, snapshot(model, optimizer))
    other, other_optimizer = make(seed=5, intermediate_size=48)
    before = snapshot(other, other_optimizer)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, other, other_optimizer)
    for layer in range(2):
        for kind in ("gate", "up", "down"):
            assert f"model.model.layers.{layer}.mlp.{kind}_proj.weight" in str(caught.value)
    assert "optimizer.exp_avg_sq.model.layers.1.mlp.down_proj.weight" in str(caught.value)
    assert_equal(snapshot(other, other_optimizer), before)


def test_weights_alone_cannot_be_resumed_from(tmp_path: Path) -> None:
    """A missing optimizer state is an error, while HLAT continued with zeros."""
    model, optimizer = make()
    checkpoint = save(tmp_path, snapshot(model))
    with pytest.raises(CheckpointError, match=r"optimizer\.exp_avg\..*not in the checkpoint"):
        load(checkpoint, model, optimizer)


def test_weights_can_start_another_run_in_another_dtype(tmp_path: Path) -> None:
    """bf16 weights are widened exactly; generators and optimizer are unchanged."""
    model, _ = make(torch.bfloat16)
    checkpoint = save(tmp_path, snapshot(model))
    other, _ = make(seed=5)
    before = rng_state()
    load_weights(checkpoint.path, other.config, collect_local_parameters(other))
    assert_equal(rng_state(), before)
    assert_equal(snapshot(other), {name: tensor.float() for name, tensor in snapshot(model).items()})
    larger, _ = make(seed=5, vocab_size=62)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*needed as"):
        load_weights(checkpoint.path, larger.config, collect_local_parameters(larger))


def test_weights_that_a_run_began_with_are_known_by_their_content(tmp_path: Path) -> None:
    model, _ = make()
    old = save(tmp_path, snapshot(model))
    began_with = load_weights(tmp_path, model.config, collect_local_parameters(model))
    assert load_weights(old.path, model.config, collect_local_parameters(model), expected=began_with) == began_with
    other, _ = make(seed=5)
    save(tmp_path, snapshot(other), step=9)  # the run whose newest checkpoint was taken has gone on
    with pytest.raises(CheckpointError, match=r"step-0*9: these are not the weights that this run began with"):
        load_weights(tmp_path, model.config, collect_local_parameters(model), expected=began_with)


def test_loading_does_not_consume_randomness(tmp_path: Path) -> None:
    model, optimizer = make()
    state = snapshot(model, optimizer)
    before = rng_state()
    checkpoint = save(tmp_path, state)
    checkpoint.load("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointStore(tmp_path / "checkpoints", 1).newest()
    assert_equal(rng_state(), before)
