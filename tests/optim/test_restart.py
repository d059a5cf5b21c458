"""AdamW over bf16 weights goes on after a restart as if nothing had been, in the same share of a model or another."""

from pathlib import Path

import pytest
import torch

from hlat.checkpoint import collect, restore
from hlat.checkpoint.protocol import CheckpointStore, open_checkpoint
from hlat.config.sections import ModelConfig, OptimizerConfig
from hlat.model import LocalParameter, ModelShard
from hlat.optim import build_optimizer, state_tensors
from hlat.runtime import CheckpointError
from tests.support.optim.parameters import canonical, config_of, fill_gradients, fill_weights, share

MODES = ("bf16-sr", "bf16", "bf16-kahan")
SAVED, ALL = 3, 5


def build(held: list[LocalParameter], mode: str) -> torch.optim.Optimizer:
    return build_optimizer(held, OptimizerConfig(lr=0.01), mode, seed=2)


def train(held: list[LocalParameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        fill_gradients(held, step)
        optimizer.step()


def whole(config: ModelConfig, mode: str, steps: int) -> tuple[list[LocalParameter], torch.optim.Optimizer]:
    [held] = share(config, ModelShard())
    fill_weights(held)
    optimizer = build(held, mode)
    train(held, optimizer, range(steps))
    return held, optimizer


def everything(config: ModelConfig, shares: list[tuple[list[LocalParameter], torch.optim.Optimizer]]) -> dict:
    """Weights and states of all shares as canonical tensors."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for held, optimizer in shares:
        canonical(config, held, lambda one: one.tensor, found.setdefault("weight", {}))
        for name, tensors in state_tensors(optimizer, held).items():
            local = {one.name: tensor for one, tensor in zip(held, tensors, strict=True)}
            assert all(tensor.dtype == torch.bfloat16 for tensor in tensors)
            canonical(config, held, lambda one, local=local: local[one.name], found.setdefault(name, {}))
    return found


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for kind, tensors in left.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, right[kind][name]), (kind, name)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("count", "cuts"), [(1, []), (2, [0.3]), (4, [])], ids=["whole", "two by two", "four"])
def test_restored_into_any_share_it_ends_with_the_bits_of_the_run_that_was_not_stopped(store, mode, count, cuts):
    config = config_of()
    held, optimizer = whole(config, mode, SAVED)
    path = store.save(SAVED, collect(config, held, optimizer), {})
    shares = []
    for index in range(count):
        for part in share(config_of(coalesce=False), ModelShard(index, count), cuts):
            with torch.no_grad():
                for one in part:
                    one.tensor.fill_(torch.nan)
            restored = build(part, mode)
            restore(open_checkpoint(path), config, part, restored)
            shares.append((part, restored))
    assert_same(everything(config, [(held, optimizer)]), everything(config, shares))
    for part, restored in shares:
        train(part, restored, range(SAVED, ALL))
    assert_same(everything(config, [whole(config, mode, ALL)]), everything(config, shares))


def test_saved_before_the_first_step_it_starts_like_a_new_one(store):
    config = config_of()
    held, optimizer = whole(config, "bf16-kahan", 0)
    path = store.save(1, collect(config, held, optimizer), {})
    [part] = share(config, ModelShard())
    restored = build(part, "bf16-kahan")
    restore(open_checkpoint(path), config, part, restored)
    train(part, restored, range(2))
    assert_same(everything(config, [whole(config, "bf16-kahan", 2)]), everything(config, [(part, restored)]))


def test_what_another_mode_saved_is_refused_by_name(store):
    """Its moments would be taken for what they are not: bf16-kahan misses its compensation, fp32 finds bf16."""
    config = config_of()
    path = store.save(1, collect(config, *whole(config, "bf16-sr", 1)), {})
    [part] = share(config, ModelShard())
    with pytest.raises(CheckpointError, match=r"optimizer\.compensation\.model\.norm\.weight"):
        restore(open_checkpoint(path), config, part, build(part, "bf16-kahan"))


def test_state_dict_of_torch_carries_it_too():
    config = config_of()
    held, optimizer = whole(config, "bf16-sr", SAVED)
    [other] = share(config, ModelShard())
    with torch.no_grad():
        for mine, theirs in zip(other, held, strict=True):
            mine.tensor.copy_(theirs.tensor)
    loaded = build(other, "bf16-sr")
    loaded.load_state_dict(optimizer.state_dict())
    train(other, loaded, range(SAVED, ALL))
    assert_same(everything(config, [whole(config, "bf16-sr", ALL)]), everything(config, [(other, loaded)]))
