"""What it costs to compute a piece of a block again, in FLOPs and what takes as long.

    sizes of a rank, name -> FLOPs of products + bytes through memory x 300 + bytes over links x 2,000

The two factors are a machine's balance: an H100 does 989 TFLOP/s in bf16, reads 3.35 TB/s and is linked by NVLink at
450 GB/s in each direction (NVIDIA's data sheet), hence 295 and 2,200 FLOPs in the time of a byte; an A100 156 and
1,040. They only order the choices: per byte freed in bf16, a norm or the SwiGLU product costs 600 to 900 FLOPs, a
product as many as the model is wide, attention as many as the sequence is long.
"""

from dataclasses import dataclass

from hlat.config.sections import ModelConfig
from hlat.model import shard_heads
from hlat.model.derived import RankWorkload
from hlat.precision import MODES

_MEMORY = 300.0
_LINK = 2000.0


@dataclass(frozen=True)
class RecomputeCosts:
    """Costs of one micro-batch in one block on a rank."""

    config: ModelConfig
    batch: int
    sequence_length: int
    mode: str
    workload: RankWorkload

    def by_name(self) -> dict[str, float]:
        """FLOPs, or what takes as long, of each of ``hlat.model.derived.RECOMPUTABLE``."""
        config, shard = self.config, self.workload.shard
        here, inner = shard_heads(config, shard), config.intermediate_size // shard.tensor_count
        width, heads = config.hidden_size, here.queries * config.n_head_dim
        keys_and_values = 2 * here.kvs * config.n_head_dim
        entering = self._pointwise(2 * width) / self._shards + self._link(width if self._shards > 1 else 0)
        gathered = keys_and_values * self.workload.context if self.workload.context > 1 else 0
        attention = 2.0 * self._tokens * heads * (self.sequence_length + 1) + self._link(gathered)
        # An all-reduce sends each number twice, a reduce-scatter once.
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
        """Weights in the dtype of the activations, where they are stored in another."""
        mode = MODES[self.mode]
        if mode.weights == mode.compute or not self.workload.weight_copies:
            return 0.0
        return _MEMORY * elements * (mode.weights.itemsize + mode.compute.itemsize)

    def _pointwise(self, per_token: int) -> float:
        return _MEMORY * self._tokens * per_token * MODES[self.mode].compute.itemsize

    def _link(self, per_token: int) -> float:
        return _LINK * self._tokens * per_token * MODES[self.mode].compute.itemsize
