"""Context parallelism: a sequence sharded over several ranks.

    chunks of a sequence   0 1 2 3 4 5 6 7   over 4 ranks, load-balanced for the causal mask:
    rank                   0 1 2 3 3 2 1 0   each rank computes the same number of query-key pairs

Attention is the only operation that needs other tokens. Every rank all-gathers all keys and values (after RoPE, so that
positions are already applied) and attends from the queries of its two chunks to all positions up to them. Gradients of
keys and values return by a reduce-scatter. This sends the same number of bytes as ring attention, in one collective per
layer and direction. Llama 3 was trained this way (Grattafiori et al. 2024, section 3.3.2): with grouped-query
attention, keys and values are small compared to the attention computation.

Tensor suffixes: B batch, H query heads, G kv heads, s positions of this rank, C positions of a chunk, T positions of
the complete sequence, E head width, R ranks.
"""

import torch
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from hlat.model import AlteredSoftmax, DocumentMask, LayerCache, attend
from hlat.parallel.process_groups import all_gather, differentiable, reduce_scatter

# (...) -> (R, ...) on every rank
_all_gather = differentiable("AllGather", all_gather, reduce_scatter)


class ContextParallelCore:
    """Causal attention of this rank's two chunks to all earlier positions, or to those of the same documents."""

    def __init__(self, group: ProcessGroup, length: int) -> None:
        self._group = group
        last = 2 * group.size() - 1
        self._chunks = (group.rank(), last - group.rank())
        self._masks: dict[tuple[int, int], CausalBias] = {}
        # Masks for the length that a compiled block takes: they cannot be built while it is compiled. Those for other
        # lengths are built when they are needed.
        for chunk in self._chunks:
            self._mask(length // (last + 1), chunk)

    def __call__(
        self,
        q_BHsE: torch.Tensor,
        k_BGsE: torch.Tensor,
        v_BGsE: torch.Tensor,
        cache: LayerCache | None,
        document_mask: DocumentMask | None,
        softmax: AlteredSoftmax | None = None,
    ) -> torch.Tensor:
        assert cache is None, "generation does not shard sequences"
        k_BGTE, v_BGTE = self._gather(k_BGsE, v_BGsE)
        if document_mask is not None:
            return document_mask.attend(q_BHsE, k_BGTE, v_BGTE, softmax)
        assert softmax is None, "the decoder makes a mask then"
        outs = [
            self._attend_to_prefix(q_BHCE, k_BGTE, v_BGTE, chunk)
            for q_BHCE, chunk in zip(q_BHsE.chunk(2, dim=2), self._chunks, strict=True)
        ]
        return torch.cat(outs, dim=2)

    def _gather(self, k_BGsE: torch.Tensor, v_BGsE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather keys and values and restore the order of positions."""
        # In one collective
        both_2BGsE = torch.stack((k_BGsE, v_BGsE))
        all_R2BGsE = _all_gather(both_2BGsE, self._group)
        early, late = all_R2BGsE.chunk(2, dim=4)  # chunks i and 2 R - 1 - i of each rank i
        in_order = torch.cat((early, late.flip(0)))
        k_BGTE, v_BGTE = in_order.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return k_BGTE, v_BGTE

    def _attend_to_prefix(
        self, q_BHCE: torch.Tensor, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        size = q_BHCE.shape[2]
        stop = (chunk + 1) * size
        k, v = k_BGTE[:, :, :stop], v_BGTE[:, :, :stop]
        return attend(q_BHCE, k, v) if chunk == 0 else attend(q_BHCE, k, v, self._mask(size, chunk))

    def _mask(self, size: int, chunk: int) -> CausalBias:
        """Mask of a chunk's queries, the last positions of its prefix; kernels that align so build none."""
        if (size, chunk) not in self._masks:
            with _disable_current_modes():  # dispatch modes cannot handle this tensor subclass during construction
                self._masks[size, chunk] = causal_lower_right(size, (chunk + 1) * size)
        return self._masks[size, chunk]
