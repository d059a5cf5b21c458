"""Sizes of the axes of a model, and the range of each that a tensor-parallel shard has.

axis, model, shard -> first index, number of indices, and the size of the complete axis
"""

from dataclasses import dataclass

from hlat.config import ModelConfig
from hlat.model.model_shard import FULL_MODEL, ModelShard, intermediate_columns, shard_heads, vocabulary_rows
from hlat.model.spec import Axis, TensorSpec


@dataclass(frozen=True)
class AxisRange:
    """The range of an axis that a shard has.

    Attributes:
        first: first index.
        count: number of indices.
        owned: True if this shard counts and saves them; if several shards have copies, the first of them does.
    """

    first: int
    count: int
    owned: bool = True


def axis_range(config: ModelConfig, shard: ModelShard, axis: Axis) -> AxisRange:
    """Return the range of an axis that a shard has."""
    if axis in (Axis.WIDTH, Axis.HEAD):
        return AxisRange(0, config.hidden_size if axis is Axis.WIDTH else config.n_head_dim, shard.tensor_index == 0)
    if axis in (Axis.QUERIES, Axis.KEYS):
        heads, size = shard_heads(config, shard), config.n_head_dim
        if axis is Axis.QUERIES:
            return AxisRange(heads.first_query * size, heads.queries * size)
        return AxisRange(heads.first_kv * size, heads.kvs * size, heads.owns_kv)
    indices = intermediate_columns(config, shard) if axis is Axis.INNER else vocabulary_rows(config, shard)
    return AxisRange(indices.start, len(indices))


def axis_size(config: ModelConfig, axis: Axis) -> int:
    """Return the size of a complete axis."""
    return axis_range(config, FULL_MODEL, axis).count


def axis_share(config: ModelConfig, axis: Axis, tensor_count: int) -> float:
    """Return the mean number of an axis' indices per tensor rank; a kv head is never split."""
    if axis in (Axis.WIDTH, Axis.HEAD):
        return axis_size(config, axis)
    if axis is Axis.KEYS:
        return max(config.n_kv_heads / tensor_count, 1.0) * config.n_head_dim
    return axis_size(config, axis) / tensor_count


def element_share(config: ModelConfig, tensor: TensorSpec, tensor_count: int) -> float:
    """Return the mean number of a tensor's elements per tensor rank."""
    columns = 1.0 if tensor.columns is None else axis_share(config, tensor.columns, tensor_count)
    return axis_share(config, tensor.rows, tensor_count) * columns


def local_elements(config: ModelConfig, shard: ModelShard, tensor: TensorSpec) -> int:
    """Count the elements of a tensor that a shard has."""
    columns = 1 if tensor.columns is None else axis_range(config, shard, tensor.columns).count
    return axis_range(config, shard, tensor.rows).count * columns
