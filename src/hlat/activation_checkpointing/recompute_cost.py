"""Cost of recomputing each step of a block, in FLOPs or their equivalent in time.

    sizes of a rank, step -> FLOPs of matrix products + bytes of memory traffic x 300 + bytes over links x 2,000

The factors are the balance of a machine: an H100 has 989 TFLOP/s in bf16, 3.35 TB/s of memory bandwidth and NVLink with
450 GB/s in each direction (NVIDIA's data sheet), hence 295 and 2,200 FLOPs in the time of a byte; an A100 156 and
1,040.
They matter only for the order of choices: per byte freed in bf16, a norm or the SwiGLU product costs 600 to 900 FLOPs,
a matrix product about the model width, and attention about the sequence length.
"""

from dataclasses import dataclass

from hlat.config import ModelConfig
from hlat.model import RankWorkload, attended_positions, shard_heads
from hlat.precision import MODES

_MEMORY = 300.0
_LINK = 2000.0


@dataclass(frozen=True)
class RecomputeCosts:
    """Recomputation costs of one micro-batch in one block on a rank; see ``activation_bytes`` for the attributes."""

    config: ModelConfig
    batch: int
    sequence_length: int
    mode: str
    workload: RankWorkload

    def by_name(self) -> dict[str, float]:
        """Return the cost of each name of ``hlat.model.spec.RECOMPUTABLE``, in FLOPs or their equivalent."""
        config, shard = self.config, self.workload.shard
        here, inner = shard_heads(config, shard), config.intermediate_size // shard.tensor_count
        width, heads = config.hidden_size, here.queries * config.n_head_dim
        keys_and_values = 2 * here.kvs * config.n_head_dim
        entering = self._pointwise(2 * width) / self._shards + self._link(width if self._shards > 1 else 0)
        gathered = keys_and_values * self.workload.context if self.workload.context > 1 else 0
        attended = attended_positions(config, self.sequence_length)
        attention = 2.0 * self._tokens * heads * 2 * attended + self._link(gathered)
        # An all-reduce sends each element twice, a reduce-scatter once.
        summed = 0 if shard.has_full_layers else width if self.workload.sequence else 2 * width
        adding = self._pointwise(3 * width) / self._shards + self._link(summed)
        return {
            "attention_input": entering,
            "qkv": self._product(width, heads + keys_and_values) + self._pointwise(2 * (heads + keys_and_values)),
            "attention_log_sum": attention,
            "attention_output": attention,
            "residual": self._product(heads, width) + adding,
            "feed_forward_input": entering,
            "gate_up": self._product(width, 2 * inner),
            "inner": self._pointwise(3 * inner),
            "down_weight_copy": self._cast(inner * width),
        }

    @property
    def _tokens(self) -> int:
        return self.batch * self.sequence_length // self.workload.context

    @property
    def _shards(self) -> int:
        return self.workload.shard.tensor_count if self.workload.sequence else 1

    def _product(self, width: int, rows: int) -> float:
        return 2.0 * self._tokens * width * rows + self._cast(width * rows)

    def _cast(self, elements: int) -> float:
        """Cost of casting weights to the dtype of the activations; 0 if they are stored in it."""
        mode = MODES[self.mode]
        if mode.weights == mode.compute or not self.workload.weight_copies:
            return 0.0
        return _MEMORY * elements * (mode.weights.itemsize + mode.compute.itemsize)

    def _pointwise(self, per_token: int) -> float:
        return _MEMORY * self._tokens * per_token * MODES[self.mode].compute.itemsize

    def _link(self, per_token: int) -> float:
        return _LINK * self._tokens * per_token * MODES[self.mode].compute.itemsize
