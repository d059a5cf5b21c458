"""KV cache: keys and values of all positions so far, for generation.

    prompt (S tokens) -> keys, values 0..S-1 stored -> token S attends to them -> stored -> token S+1 ...

Tensor suffixes: B batch, K kv heads, S new positions, T all positions so far, E head width.
"""

from dataclasses import dataclass

import torch

from hlat.config.sections import ModelConfig


class KVCache:
    """Storage for keys and values of ``max_length`` positions of every layer, allocated once.

    Args:
        config: the model.
        batch: number of sequences generated together; all have the same number of tokens.
        max_length: maximum number of positions, prompt included.
        device: device of the model.
        dtype: dtype of the stored keys and values.
    """

    def __init__(
        self, config: ModelConfig, batch: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, 2, batch, config.n_kv_heads, max_length, config.n_head_dim)
        self._memory = torch.empty(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.length = 0

    def layer(self, index: int) -> "LayerCache":
        """View of the keys and values of one layer."""
        keys, values = self._memory[index]
        return LayerCache(keys, values, self.length)

    def advance(self, count: int) -> None:
        """Record that ``count`` more positions have been stored in every layer."""
        self.length += count

    def check_room(self, count: int) -> None:
        """Raise ValueError if ``count`` more positions do not fit."""
        if self.length + count > self.max_length:
            used = f"room for {self.max_length} positions, {self.length} are in use"
            raise ValueError(f"the KV cache has {used}, {count} more do not fit")


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, as views of the cache."""

    keys_BKTE: torch.Tensor
    values_BKTE: torch.Tensor
    length: int  # positions stored before this call

    def append(self, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new positions and return keys and values of all positions so far."""
        stop = self.length + k_BKSE.shape[2]
        self.keys_BKTE[:, :, self.length : stop] = k_BKSE
        self.values_BKTE[:, :, self.length : stop] = v_BKSE
        return self.keys_BKTE[:, :, :stop], self.values_BKTE[:, :, :stop]
