"""A model for forward passes only, complete or sharded over tensor-parallel ranks: hidden states, then the next token.

    config, degree, rank -> process groups -> shard of the decoder, collectives attached -> weights are loaded into it
    tokens -> hidden states (the same on every tensor-parallel rank) -> selected positions
        -> log-probabilities of given tokens, without gathering logits
        -> complete logits, gathered, to choose the next token from

Data-parallel ranks have replicas that do not communicate: each computes other tokens.

Tensor suffixes: B batch, S sequence, D model width, N positions, v local vocabulary rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from hlat.config import ModelConfig, ParallelConfig
from hlat.model import (
    Decoder,
    Head,
    KVCache,
    LocalParameter,
    ModelShard,
    allocate,
    collect_local_parameters,
    replace_parameters,
    vocabulary_rows,
)
from hlat.parallel.layout import Layout
from hlat.parallel.process_groups import all_gather, create_process_groups
from hlat.parallel.tensor_parallel import parallelize
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DataError, LaunchError
from hlat.runtime.terminal import plural


@dataclass(frozen=True)
class ForwardModel:
    """This rank's shard of a model, for forward passes."""

    decoder: Decoder  # has all layers
    device: torch.device
    # The tensor-parallel ranks, which call all methods together; None for a complete model
    group: ProcessGroup | None = None

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def local_parameters(self) -> list[LocalParameter]:
        return collect_local_parameters(self.decoder)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        weight = next(self.decoder.parameters())
        dtype = self.decoder.compute or weight.dtype
        return KVCache(self.config, batch, max_length, self.device, dtype, self.decoder.shard)

    @torch.no_grad()
    def hidden(
        self, tokens_BS: torch.Tensor, cache: KVCache | None = None, positions_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the input of the head, (B, S, D); for arguments see ``Decoder.hidden``.

        DataError: rows so long that each, as its own length has it, would be rotated otherwise.
        """
        length = tokens_BS.shape[1] + (0 if cache is None else cache.length)
        if self.decoder.depends_on_length(length):
            raise DataError(
                f"texts of {length} tokens cannot be computed together: with the model's RoPE scaling, those above "
                f"{self.config.rope.constant_up_to} tokens are rotated by their lengths. Use shorter ones."
            )
        return self.decoder.hidden(tokens_BS, positions=positions_BS, cache=cache)

    @torch.no_grad()
    def log_probabilities(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute how likely next tokens (N,), int64, are after positions with these hidden states.

        Returns log-probabilities in nats, (N,), fp32 or wider; and (N,) True for the most likely token (the first of
        equals).
        """
        head = self._head
        columns = len(vocabulary_rows(self.config, self.decoder.shard))
        rows = head.cross_entropy.chunk(columns, self.config.hidden_size)
        chunks = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
        results = [head.cross_entropy.score(head(hidden_nD), targets_n) for hidden_nD, targets_n in chunks]
        return torch.cat([each[0] for each in results]), torch.cat([each[1] for each in results])

    @torch.no_grad()
    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the complete vocabulary, (N, V), on every tensor-parallel rank."""
        logits_Nv: torch.Tensor = self._head(hidden_ND)
        if self.group is None:
            return logits_Nv
        shards = [ModelShard(index, self.group.size()) for index in range(self.group.size())]
        widths = [len(vocabulary_rows(self.config, shard)) for shard in shards]
        # Shards of the vocabulary differ by at most one row, and an all-gather takes equal ones.
        padding = max(widths) - logits_Nv.shape[1]
        gathered = all_gather(torch.nn.functional.pad(logits_Nv, (0, padding)), self.group)
        return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], dim=1)

    @property
    def _head(self) -> Head:
        assert self.decoder.head is not None, "the shard has all layers"
        return self.decoder.head


def build_forward_model(
    config: ModelConfig, runtime: Runtime, tensor: int, dtype: torch.dtype
) -> tuple[ForwardModel, Layout]:
    """Build this rank's shard of a model, with memory for its weights, which are not initialised. Collective.

    Returns the model, and the layout of all ranks: ``tensor`` x data-parallel replicas. LaunchError: processes, heads
    or columns cannot be divided by the degree.
    """
    _check_degree(config, runtime.world, tensor)
    layout = Layout.of(ParallelConfig(tensor=tensor, sequence=False, zero=0), runtime.world)
    groups = create_process_groups(layout, runtime.rank, config, runtime.device)
    with torch.device("meta"):
        model = Decoder(config, ModelShard(layout.coordinates(runtime.rank).tp, tensor))
    replace_parameters(model, lambda parameter: parameter.to(dtype))
    if groups.tensor is not None:
        parallelize(model, groups.tensor, False)
    allocate(model, runtime.device)
    return ForwardModel(model.eval(), runtime.device, groups.tensor), layout


def _check_degree(config: ModelConfig, world: int, tensor: int) -> None:
    sizes = (("processes", world), ("heads", config.heads), ("feed-forward columns", config.intermediate_size))
    problems = [f"{size:,} {name} cannot be divided evenly by it" for name, size in sizes if size % tensor]
    kv_heads = config.n_kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        problems.append(f"{kv_heads} kv heads can neither be divided evenly by it nor copied evenly")
    if problems:
        fits = [d for d in range(1, world + 1) if not (world % d or config.heads % d or config.intermediate_size % d)]
        works = [d for d in fits if not (kv_heads % d and d % kv_heads)]
        raise LaunchError(
            f"tensor-parallel degree {tensor}: {'; '.join(problems)}. With {plural(world, 'process')} these work: "
            f"{', '.join(map(str, works))}."
        )
