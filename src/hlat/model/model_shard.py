"""The shard of a model that one process builds: all of it, or a tensor-parallel shard of some layers.

    model, shard -> its layers; of each layer the query heads, kv heads, intermediate columns and vocabulary rows

A shard is defined by indices into the model only. It does not depend on the number of processes or on ranks.
"""

import math
from dataclasses import dataclass

from hlat.config import ModelConfig

_MAX_GROUPS = 64
_MIN_GROUP_ROWS = 128


@dataclass(frozen=True)
class ModelShard:
    """A tensor-parallel shard of consecutive layers; by default the complete model.

    Attributes:
        tensor_index, tensor_count: index of the tensor-parallel shard, and the number of shards of every layer.
        layers: indices of its decoder blocks; None for all of them.
        embedding: True if it has the embedding, so that its input is token ids.
        head: True if it has the final norm and the head.
    """

    tensor_index: int = 0
    tensor_count: int = 1
    layers: range | None = None
    embedding: bool = True
    head: bool = True

    def layer_range(self, config: ModelConfig) -> range:
        """Indices of its decoder blocks."""
        return range(config.layers) if self.layers is None else self.layers

    @property
    def has_full_layers(self) -> bool:
        """True if its layers are not sharded by tensor parallelism."""
        return self.tensor_count == 1


FULL_MODEL = ModelShard()


@dataclass(frozen=True)
class Heads:
    """The attention heads of a shard: two ranges of heads, by first head and number.

    If there are more shards than kv heads, several neighbouring shards hold a copy of the same kv head, each with some
    of its query heads. The first of them owns it (``owns_kv``): only there it is counted and saved.
    """

    first_query: int
    queries: int
    first_kv: int
    kvs: int
    owns_kv: bool


def shard_heads(config: ModelConfig, shard: ModelShard) -> Heads:
    """Return the heads of a shard."""
    index, count, kv_heads = shard.tensor_index, shard.tensor_count, config.n_kv_heads
    assert config.heads % count == 0, "recipe validation checks this"
    queries = config.heads // count
    if count <= kv_heads:
        assert kv_heads % count == 0, "recipe validation checks this"
        kvs = kv_heads // count
        return Heads(index * queries, queries, index * kvs, kvs, True)
    assert count % kv_heads == 0, "recipe validation checks this"
    copies = count // kv_heads
    return Heads(index * queries, queries, index // copies, 1, index % copies == 0)


def kv_replication(config: ModelConfig, tensor_count: int) -> int:
    """Number of neighbouring tensor-parallel shards that hold a copy of the same kv head."""
    return max(1, tensor_count // config.n_kv_heads)


def intermediate_columns(config: ModelConfig, shard: ModelShard) -> range:
    """Columns of the feed-forward layer's intermediate activation that a shard has."""
    assert config.intermediate_size % shard.tensor_count == 0, "recipe validation checks this"
    size = config.intermediate_size // shard.tensor_count
    return range(shard.tensor_index * size, (shard.tensor_index + 1) * size)


def vocabulary_rows(config: ModelConfig, shard: ModelShard) -> range:
    """Rows of embedding and head that a shard has; shards differ by at most one row."""
    index, count, rows = shard.tensor_index, shard.tensor_count, config.vocab_size
    return range(index * rows // count, (index + 1) * rows // count)


def gate_up_groups(config: ModelConfig, shard: ModelShard = FULL_MODEL) -> int:
    """Number of groups of the fused gate and up matrix of a shard.

    The complete model has gcd(kv heads, intermediate size) groups, doubled while the number divides the intermediate
    size, is at most 64, and a group has at least 128 rows each of gate and up. The activation function reads gate and
    up with a stride of a group: down to 128 rows that costs nothing measurable on a CPU, at 96 it takes twice the time
    in bf16. A shard has its fraction of these groups, or one group if they cannot be divided evenly.
    """
    inner = config.intermediate_size
    groups = math.gcd(config.n_kv_heads, inner)
    while 2 * groups <= _MAX_GROUPS and inner % (2 * groups) == 0 and inner // (2 * groups) >= _MIN_GROUP_ROWS:
        groups *= 2
    return groups // shard.tensor_count if groups % shard.tensor_count == 0 else 1
