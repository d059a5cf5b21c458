"""Attention within documents and within sliding windows: tokens attend to the last tokens of their own document only.

    position of each token in its document, window -> for each query, the row offset at which its document starts
        varlen, on CPUs: attention document by document (``varlen_attention.py``)
        flex, on accelerators: torch's flex attention with a block mask over 128 x 128 blocks of scores

Either way the cost is the sum over documents and windows, and no mask of queries x keys is built. What depends on the
documents is computed once per micro-batch and shared by all layers.

Tensor suffixes: B batch, s queries of a row, T keys of a row, N blocks of queries, M blocks of keys, H query heads, G
kv heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hlat.model.rope import Spans
from hlat.model.varlen_attention import attend_within_documents
from hlat.runtime.backend.table import backend_of, is_simulated
from hlat.runtime.errors import LaunchError

_BLOCK = 128  # queries, and keys, of a block of scores that flex attention computes or skips


@dataclass(frozen=True)
class DocumentMask:
    """The keys that each token of a micro-batch attends to: those of its document, or the last of them, up to itself.

    Attributes:
        first_Bs: row offset of the first token of each query's document, int64.
        spans: (start, stop) pairs of the row offsets of the queries, ascending.
        blocks: the same as a block mask for flex attention; None if the kernel takes documents one by one.
        window: number of keys that a query attends to at most, itself included; None for no limit.
    """

    first_Bs: torch.Tensor
    spans: Spans
    blocks: BlockMask | None
    window: int | None = None

    @classmethod
    def from_rows(cls, batch: int, spans: Spans, device: torch.device, window: int) -> "DocumentMask":
        """Build the mask of rows that are one document each; see ``from_positions``."""
        return cls.from_positions(_offsets(spans, device).expand(batch, -1), spans, window)

    @classmethod
    def from_positions(cls, positions_Bs: torch.Tensor, spans: Spans, window: int | None = None) -> "DocumentMask":
        """Build the mask from each query's position within its document.

        Args:
            positions_Bs: int64, on the device of attention. The first position of every row of the batch is 0.
            spans: (start, stop) pairs of the row offsets of the queries, ascending.
            window: number of keys that a query attends to at most, itself included; None for no limit.

        Raises:
            LaunchError: the device has no kernel for this.
        """
        offsets_s = _offsets(spans, positions_Bs.device)
        first_Bs = offsets_s - positions_Bs
        limited_Bs = first_Bs if window is None else first_Bs.maximum(offsets_s - window + 1)
        kernel = backend_of(positions_Bs.device).document_kernel
        if kernel is None:  # a run is refused earlier, an evaluation is not
            device_type = positions_Bs.device.type
            field = "data.isolate=true" if window is None else f"model.sliding_window={window}"
            raise LaunchError(f"{field}: attention within documents cannot run on a {device_type} device.")
        # Flex attention has to be compiled, which a rehearsal does not: the other kernel keeps the same tensors.
        blocks = None if is_simulated() else _MASKS[kernel.name](limited_Bs, offsets_s, spans[-1][1])
        return cls(first_Bs, spans, blocks, window)

    def attend(self, q_BHsE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor) -> torch.Tensor:
        """Softmax attention: queries (B, H, s, E), keys and values (B, G, T, E) of complete rows -> (B, H, s, E)."""
        if self.blocks is None:
            ends = [end for span in self.spans for end in span]
            return attend_within_documents(q_BHsE, k_BGTE, v_BGTE, self.first_Bs, ends, self.window)
        keys = self.spans[-1][1]  # no query attends to later keys
        out: torch.Tensor = _flex()(
            q_BHsE, k_BGTE[:, :, :keys], v_BGTE[:, :, :keys], block_mask=self.blocks, enable_gqa=True
        )
        return out


def _offsets(spans: Spans, device: torch.device) -> torch.Tensor:
    """Row offsets of all queries, (s,), int64."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def _flex() -> Any:
    """Return compiled flex attention; in a compiled block the plain function. Uncompiled, it builds all scores."""
    return flex_attention if torch.compiler.is_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(first_Bs: torch.Tensor, offsets_s: torch.Tensor, keys: int) -> BlockMask:
    """Build flex attention's block mask: query i of a row attends to keys ``first_Bs[row, i] <= j <= offsets_s[i]``.

    It is computed from the minimum and maximum of these limits in every block of queries, so that no tensor is larger
    than blocks x blocks. If a block has queries of two spans, it may include blocks of keys that none of them attends
    to. The mask of each query is exact all the same.

    Args:
        first_Bs: row offset of the first key of each query, int64.
        offsets_s: row offset of each query, int64.
        keys: number of keys of a row, up to the last that a query attends to.
    """
    padding = -len(offsets_s) % _BLOCK
    # Padding queries attend to no key: they make no block full, and change no minimum of first or maximum of offsets.
    first_BN = F.pad(first_Bs, (0, padding), value=keys).unflatten(1, (-1, _BLOCK))
    offsets_N = F.pad(offsets_s, (0, padding), value=-1).unflatten(0, (-1, _BLOCK))
    start_M = torch.arange(0, keys, _BLOCK, device=first_Bs.device)
    last_M = start_M + _BLOCK - 1
    some_BNM = (first_BN.amin(2)[:, :, None] <= last_M) & (offsets_N.amax(1)[:, None] >= start_M)
    full_BNM = (first_BN.amax(2)[:, :, None] <= start_M) & (offsets_N.amin(1)[:, None] >= last_M)

    def attends(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (first_Bs[row, query] <= key) & (key <= offsets_s[query])

    partial, full = _key_blocks(some_BNM & ~full_BNM), _key_blocks(full_BNM)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=(len(offsets_s), keys)
    )


_MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], BlockMask | None]] = {
    # name of a backend's document kernel -> block mask that it needs
    "varlen": lambda first_Bs, offsets_s, keys: None,
    "flex": block_mask,
}


def _key_blocks(selected_BNM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the selected key blocks of each query block, (B, 1, N), and list them first, (B, 1, N, M); int32."""
    order_BNM = selected_BNM.int().argsort(dim=2, descending=True, stable=True)
    return selected_BNM.sum(2).int()[:, None], order_BNM.int()[:, None]
