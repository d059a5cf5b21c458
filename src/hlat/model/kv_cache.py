"""KV cache: keys and values of all positions so far, for generation.

    prompt (S tokens) -> keys, values 0..S-1 stored -> token S attends to them -> stored -> token S+1 ...

Several sequences may continue the same prefix: it is computed once, and its positions are copied to every row.

Tensor suffixes: B batch, K kv heads, S new positions, T all positions so far, E head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hlat.config import ModelConfig
from hlat.model.spec import FULL_MODEL, ModelShard, shard_heads

# Masks of a call by stored positions, new ones, and window: bool (S, T)
CausalMasks = dict[tuple[int, int, int | None], torch.Tensor]
# Positions that each token of a call attends to, bool (B, 1, S, T), by the window of a layer
WindowMasks = dict[int | None, torch.Tensor]


class KVCache:
    """Storage for keys and values of ``max_length`` positions (prompt included) of every layer, allocated once.

    All sequences of the batch have the same number of positions. ``shard`` has all layers; the cache has its kv heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_length: int,
        device: torch.device | str,
        dtype: torch.dtype,
        shard: ModelShard = FULL_MODEL,
    ) -> None:
        shape = (config.layers, 2, batch, shard_heads(config, shard).kvs, max_length, config.n_head_dim)
        # Zeros: positions that a mask hides are multiplied by 0, and memory may contain NaN.
        self._memory = torch.zeros(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.length = 0
        self._masks: WindowMasks = {}
        self._causal: CausalMasks = {}

    @property
    def batch(self) -> int:
        return self._memory.shape[2]

    @property
    def memory(self) -> torch.Tensor:
        """Keys (0) and values (1) of all layers: (layers, 2, B, K, max_length, E)."""
        return self._memory

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Positions that each token of the next call attends to, bool (B, S, T); None for all in the window."""
        return self._masks[window][:, 0] if self._masks else None

    def start_with(self, prefix: "KVCache") -> None:
        """Copy the positions of a cache of one sequence to the beginning of every sequence of this empty one."""
        assert self.length == 0 and prefix.batch == 1, "every sequence starts with the same prefix"
        self.check_room(prefix.length)
        self._memory[..., : prefix.length, :] = prefix._memory[..., : prefix.length, :]
        self.length = prefix.length

    def put(self, row: int, place: int, source: "KVCache", source_row: int, positions: range) -> None:
        """Copy positions of a sequence of another cache to a place in one of this cache."""
        stored = source._memory[:, :, source_row, :, positions.start : positions.stop]
        self._memory[:, :, row, :, place : place + len(positions)] = stored

    def rows(self, start: int, stop: int) -> "KVCache":
        return self._with(self._memory[:, :, start:stop])

    def select(self, rows: Sequence[int]) -> "KVCache":
        # A copy: indexing by a tensor
        return self._with(self._memory[:, :, torch.tensor(rows, device=self._memory.device)])

    def attend_to(self, masks: Mapping[int | None, torch.Tensor]) -> None:
        """Let each token of the next call attend to some positions (at least one) of those stored and new.

        ``masks``: bool (B, S, T) for each window of a layer, where T counts stored and new positions.
        """
        self._masks = {window: mask_BST.unsqueeze(1) for window, mask_BST in masks.items()}

    @property
    def has_mask(self) -> bool:
        return bool(self._masks)

    def _with(self, memory: torch.Tensor) -> "KVCache":
        other = KVCache.__new__(KVCache)
        other._memory, other.max_length, other.length = memory, self.max_length, self.length
        other._masks, other._causal = {}, {}
        return other

    def layer(self, index: int, window: int | None = None) -> "LayerCache":
        """Return the part of a layer, whose tokens attend to the last ``window`` positions; None for all."""
        keys, values = self._memory[index]
        return LayerCache(keys, values, self.length, window, self._masks.get(window), self._causal)

    def advance(self, count: int) -> None:
        """Record that ``count`` more positions have been stored in every layer."""
        self.length += count
        # The masks were those of this call.
        self._masks = {}
        self._causal.clear()

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
    window: int | None = None  # positions that a token attends to, itself included; None for all
    mask_B1ST: torch.Tensor | None = None  # positions that each new token attends to; None for all before it
    causal: CausalMasks = field(default_factory=dict)  # those made so far, which all layers of a call share

    @property
    def is_plain(self) -> bool:
        """True if the new positions are the first ones, and attend to all before them."""
        return self.length == 0 and self.mask_B1ST is None

    def mask(self, new: int) -> torch.Tensor | None:
        """Positions that ``new`` tokens attend to: bool, broadcast over (B, heads, new, all positions so far)."""
        if self.mask_B1ST is not None:
            return self.mask_B1ST
        window = self.window
        # A single token attends to all of them
        if new == 1 and (window is None or self.length < window):
            return None
        if (key := (self.length, new, window)) not in self.causal:
            # Position length + i attends to every position up to itself, or to the last of them.
            shape = (new, self.length + new)
            mask_ST = torch.ones(shape, dtype=torch.bool, device=self.keys_BKTE.device).tril(self.length)
            self.causal[key] = mask_ST if window is None else mask_ST.triu(self.length - window + 1)
        return self.causal[key]

    def append(self, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new positions and return keys and values of all positions so far."""
        stop = self.length + k_BKSE.shape[2]
        self.keys_BKTE[:, :, self.length : stop] = k_BKSE
        self.values_BKTE[:, :, self.length : stop] = v_BKSE
        return self.keys_BKTE[:, :, :stop], self.values_BKTE[:, :, :stop]


class DeviceKVCache(KVCache):
    """A cache whose number of positions is on the device, for single tokens: every call has the same shapes and memory.

    So a device can repeat the recorded work of a token, without the host. The memory of ``cache``, which has at least
    one position, is shared; the cache must not be used any more. A window includes the token itself.
    """

    def __init__(self, cache: KVCache) -> None:
        # Keys and values are those of the complete cache, of which a mask hides the positions to come.
        self._memory = cache.memory
        self._place_1 = torch.full((1,), cache.length, device=cache.memory.device)
        self._places_T = torch.arange(cache.max_length, device=cache.memory.device)
        self.max_length = cache.max_length
        self.length = cache.max_length - 1  # on the host: that of the last token which there is room for
        self._masks = {}  # each made by the first layer of a call that has the window

    @property
    def has_mask(self) -> bool:
        return True

    @property
    def positions_B1(self) -> torch.Tensor:
        """Position of the next token, the same in each row: int64 (B, 1)."""
        return self._place_1.expand(self.batch, 1)

    def layer(self, index: int, window: int | None = None) -> "LayerCache":
        if window not in self._masks:
            hidden_T = self._places_T > self._place_1
            if window is not None:
                hidden_T |= self._places_T <= self._place_1 - window
            self._masks[window] = ~hidden_T[None, None, None]
        keys, values = self._memory[index]
        return DeviceLayerCache(keys, values, self.length, window, self._masks[window], place_1=self._place_1)

    def advance(self, count: int) -> None:
        self._masks = {}
        # On the device, in place: a repeated recording has to see it.
        self._place_1 += count


@dataclass(frozen=True)
class DeviceLayerCache(LayerCache):
    """Keys and values of one layer of a ``DeviceKVCache``."""

    place_1: torch.Tensor | None = None  # of the new token

    def append(self, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one new position and return keys and values of all that there is room for."""
        assert self.place_1 is not None, "DeviceKVCache gives it"
        _store(self.keys_BKTE, 2, self.place_1, k_BKSE.to(self.keys_BKTE.dtype))
        _store(self.values_BKTE, 2, self.place_1, v_BKSE.to(self.values_BKTE.dtype))
        return self.keys_BKTE, self.values_BKTE


def _store(target: torch.Tensor, dim: int, place_1: torch.Tensor, value: torch.Tensor) -> None:
    """Store values at one place of a dimension, which the device knows."""
    # In deterministic mode torch would sort the places on a GPU, about twelve kernels: there is only one place.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        target.index_copy_(dim, place_1, value)
    finally:
        torch.set_deterministic_debug_mode(before)
