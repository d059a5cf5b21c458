"""Documents that see only themselves.

    place of each token in its document -> for each query, where in the row its document begins
        CPU: attention document by document (``document_kernel.py``)
        accelerators: torch's flex attention, and which blocks of 128 x 128 scores it has to look at

Both cost what the documents cost, and no mask of queries x keys exists. What depends on the documents is made once per
micro-batch, for all layers.

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

_BLOCK = 128  # queries, and keys, that flex attention takes or leaves together


@dataclass(frozen=True)
class DocumentMask:
    """What the tokens of a micro-batch see: their document, up to themselves.

    Attributes:
        first_Bs: place in the row of the first token of each query's document, int64.
        spans: (start, stop) of the places in their rows that the queries have, one run after another.
        blocks: the same for flex attention; None on a CPU.
    """

    first_Bs: torch.Tensor
    spans: Spans
    blocks: BlockMask | None

    @classmethod
    def from_positions(cls, positions_Bs: torch.Tensor, spans: Spans) -> "DocumentMask":
        """From the place of each query in its document.

        Args:
            positions_Bs: int64, where attention is computed; 0 in the first place of every row.
            spans: of the queries, ascending.
        """
        where_s = torch.cat([torch.arange(start, stop, device=positions_Bs.device) for start, stop in spans])
        first_Bs = where_s - positions_Bs
        blocks = None if positions_Bs.device.type == "cpu" else block_mask(first_Bs, where_s, spans[-1][1])
        return cls(first_Bs, spans, blocks)

    def attend(self, q_BHsE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor) -> torch.Tensor:
        """Softmax attention of the queries: (B, H, s, E), and (B, G, T, E) of whole rows -> (B, H, s, E)."""
        if self.blocks is None:
            return attend_within_documents(
                q_BHsE, k_BGTE, v_BGTE, self.first_Bs, [end for span in self.spans for end in span]
            )
        keys = self.spans[-1][1]  # nobody here sees those after them
        out: torch.Tensor = _flex()(
            q_BHsE, k_BGTE[:, :, :keys], v_BGTE[:, :, :keys], block_mask=self.blocks, enable_gqa=True
        )
        return out


def _flex() -> Any:
    """The function. Not compiled it would materialise all scores; in a compiled block it is compiled with the block."""
    return flex_attention if torch.compiler.is_compiling() else _compiled()


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(first_Bs: torch.Tensor, where_s: torch.Tensor, keys: int) -> BlockMask:
    """What flex attention computes: query i of a row sees keys ``first_Bs[row, i] <= j <= where_s[i]``.

    Found from the least and the greatest of these ends in every block of queries, so that nothing larger than blocks x
    blocks exists. A block of queries from two runs of places may be given blocks of keys that none of them sees; what
    each query sees is exact.

    Args:
        first_Bs: int64.
        where_s: place of each query in its row, int64.
        keys: of a row, up to the last that a query sees.
    """
    rest = -len(where_s) % _BLOCK
    # What fills the last block up sees nothing: no block is then whole for it, and no end moves.
    first_BN = F.pad(first_Bs, (0, rest), value=keys).unflatten(1, (-1, _BLOCK))
    where_N = F.pad(where_s, (0, rest), value=-1).unflatten(0, (-1, _BLOCK))
    start_M = torch.arange(0, keys, _BLOCK, device=first_Bs.device)
    last_M = start_M + _BLOCK - 1
    some_BNM = (first_BN.amin(2)[:, :, None] <= last_M) & (where_N.amax(1)[:, None] >= start_M)
    whole_BNM = (first_BN.amax(2)[:, :, None] <= start_M) & (where_N.amin(1)[:, None] >= last_M)

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (first_Bs[row, query] <= key) & (key <= where_s[query])

    partial, whole = _listed(some_BNM & ~whole_BNM), _listed(whole_BNM)
    return BlockMask.from_kv_blocks(
        *partial, *whole, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(len(where_s), keys)
    )


def _listed(taken_BNM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys a block of queries takes, (B, 1, N), and which, those first: (B, 1, N, M), int32."""
    order_BNM = taken_BNM.int().argsort(dim=2, descending=True, stable=True)
    return taken_BNM.sum(2).int()[:, None], order_BNM.int()[:, None]
