"""Which part of a model one process builds: the whole, or a share of its heads, rows and layers.

    model, part -> the layers it holds; of each layer the query heads, kv heads, inner columns and vocabulary rows

A part is arithmetic over the model only: it neither knows nor cares how many processes there are or who they are.
"""

from dataclasses import dataclass

from hlat.config.sections import ModelConfig


@dataclass(frozen=True)
class ModelShard:
    """A tensor-parallel share of a run of layers; by default the whole model.

    Attributes:
        tensor_index, tensor_count: which share of every layer, of how many.
        layers: the decoder blocks it holds, by index; None for all of them.
        embedding: whether it begins with token ids.
        head: whether it ends with the final norm and the head.
    """

    tensor_index: int = 0
    tensor_count: int = 1
    layers: range | None = None
    embedding: bool = True
    head: bool = True

    def layer_range(self, config: ModelConfig) -> range:
        """The blocks it holds."""
        return range(config.layers) if self.layers is None else self.layers

    @property
    def has_full_layers(self) -> bool:
        """Whether nothing is left out of a layer."""
        return self.tensor_count == 1


FULL_MODEL = ModelShard()


@dataclass(frozen=True)
class Heads:
    """The attention heads of one share.

    Where there are more shares than kv heads, each kv head is held by several neighbouring shares, and each of them
    has a part of its query heads. The first of them ``owns`` it: it is counted and saved there.
    """

    first_query: int
    queries: int
    first_kv: int
    kvs: int
    owns_kv: bool


def shard_heads(config: ModelConfig, shard: ModelShard) -> Heads:
    """The heads of a share."""
    index, count, kv_heads = shard.tensor_index, shard.tensor_count, config.n_kv_heads
    assert config.heads % count == 0, "the rules of a recipe require it"
    queries = config.heads // count
    if count <= kv_heads:
        assert kv_heads % count == 0, "the rules of a recipe require it"
        kvs = kv_heads // count
        return Heads(index * queries, queries, index * kvs, kvs, True)
    assert count % kv_heads == 0, "the rules of a recipe require it"
    copies = count // kv_heads
    return Heads(index * queries, queries, index // copies, 1, index % copies == 0)


def kv_replication(config: ModelConfig, tensor_count: int) -> int:
    """How many neighbouring shares hold the same kv head."""
    return max(1, tensor_count // config.n_kv_heads)


def intermediate_columns(config: ModelConfig, shard: ModelShard) -> range:
    """The columns of the feed-forward layer's inner activation that a share holds."""
    assert config.intermediate_size % shard.tensor_count == 0, "the rules of a recipe require it"
    size = config.intermediate_size // shard.tensor_count
    return range(shard.tensor_index * size, (shard.tensor_index + 1) * size)


def vocabulary_rows(config: ModelConfig, shard: ModelShard) -> range:
    """The rows of embedding and head that a share holds: as even as can be."""
    index, count, rows = shard.tensor_index, shard.tensor_count, config.vocab_size
    return range(index * rows // count, (index + 1) * rows // count)
