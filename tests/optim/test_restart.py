"""AdamW over bf16 weights resumes from a checkpoint bit for bit, with the same sharding of the model or another."""

from pathlib import Path

import pytest
import torch

from hlat.checkpoint import collect, restore
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config.sections.model import ModelConfig
from hlat.config.sections.training import AdamWConfig
from hlat.model import LocalParameter, ModelShard
from hlat.optim import Optimizer, build_optimizer
from hlat.runtime.errors import CheckpointError
from tests.support.optim.parameters import canonical, config_of, fill_gradients, fill_weights, shard_model

MODES = ("bf16-sr", "bf16", "bf16-kahan")
SAVED, ALL = 3, 5


def build(parameters: list[LocalParameter], mode: str) -> Optimizer:
    return build_optimizer(parameters, AdamWConfig(lr=0.01), mode, seed=2)


def train(parameters: list[LocalParameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        fill_gradients(parameters, step)
        optimizer.step()


def train_complete(config: ModelConfig, mode: str, steps: int) -> tuple[list[LocalParameter], Optimizer]:
    [parameters] = shard_model(config, ModelShard())
    fill_weights(parameters)
    optimizer = build(parameters, mode)
    train(parameters, optimizer, range(steps))
    return parameters, optimizer


def everything(config: ModelConfig, shards: list[tuple[list[LocalParameter], Optimizer]]) -> dict:
    """Collect weights and states of all shards as canonical tensors."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for parameters, optimizer in shards:
        canonical(config, parameters, lambda each: each.tensor, found.setdefault("weight", {}))
        for name, tensors in optimizer.state_tensors(parameters).items():
            local = {each.name: tensor for each, tensor in zip(parameters, tensors, strict=True)}
            assert all(tensor.dtype == torch.bfloat16 for tensor in tensors)
            canonical(config, parameters, lambda each, local=local: local[each.name], found.setdefault(name, {}))
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
@pytest.mark.parametrize(("count", "cuts"), [(1, []), (2, [0.3]), (4, [])], ids=["one process", "two by two", "four"])
def test_restored_with_any_sharding_training_ends_with_the_bits_of_an_uninterrupted_run(store, mode, count, cuts):
    config = config_of()
    parameters, optimizer = train_complete(config, mode, SAVED)
    path = store.save(SAVED, collect(config, parameters, optimizer), {})
    shards = []
    for index in range(count):
        for shard in shard_model(config_of(coalesce=False), ModelShard(index, count), cuts):
            with torch.no_grad():
                for each in shard:
                    each.tensor.fill_(torch.nan)
            restored = build(shard, mode)
            restore(open_checkpoint(path), config, shard, restored)
            shards.append((shard, restored))
    assert_same(everything(config, [(parameters, optimizer)]), everything(config, shards))
    for shard, restored in shards:
        train(shard, restored, range(SAVED, ALL))
    assert_same(everything(config, [train_complete(config, mode, ALL)]), everything(config, shards))


def test_an_optimizer_saved_before_its_first_step_starts_like_a_new_one(store):
    config = config_of()
    parameters, optimizer = train_complete(config, "bf16-kahan", 0)
    path = store.save(1, collect(config, parameters, optimizer), {})
    [shard] = shard_model(config, ModelShard())
    restored = build(shard, "bf16-kahan")
    restore(open_checkpoint(path), config, shard, restored)
    train(shard, restored, range(2))
    assert_same(everything(config, [train_complete(config, "bf16-kahan", 2)]), everything(config, [(shard, restored)]))


def test_state_saved_in_another_mode_is_rejected_by_name(store):
    """bf16-kahan needs a compensation, which bf16-sr did not save."""
    config = config_of()
    path = store.save(1, collect(config, *train_complete(config, "bf16-sr", 1)), {})
    [shard] = shard_model(config, ModelShard())
    with pytest.raises(CheckpointError, match=r"optimizer\.compensation\.model\.norm\.weight"):
        restore(open_checkpoint(path), config, shard, build(shard, "bf16-kahan"))


def test_torchs_state_dict_works_too():
    config = config_of()
    parameters, optimizer = train_complete(config, "bf16-sr", SAVED)
    [other] = shard_model(config, ModelShard())
    with torch.no_grad():
        for mine, theirs in zip(other, parameters, strict=True):
            mine.tensor.copy_(theirs.tensor)
    loaded = build(other, "bf16-sr")
    loaded.load_state_dict(optimizer.state_dict())
    train(other, loaded, range(SAVED, ALL))
    assert_same(everything(config, [train_complete(config, "bf16-sr", ALL)]), everything(config, [(other, loaded)]))
