"""The decoder: a language model, complete or one shard of it; its parameters on this process and their initial values.

    tokens -> embedding -> blocks -> norm -> head -> logits, or the loss if labels are given

    Decoder(config, shard) on the meta device -> sharded over data-parallel ranks or not -> allocate: memory, once
        --collect_local_parameters--> LocalParameter, ...: the local tensor, and the rows of the parameter that it holds
        --initialise--> initial values: the i-th normal sample of the stream (seed, canonical name) * std for element i

Initialisation, norms, optimizer and checkpoints access a model through its local parameters, so that none depends on
the parallel layout. ``build`` makes an unsharded decoder on one device.

Initial values are a pure function of (seed, canonical name, element index), and of the tensor's row of the table in
``parametrization.py``. An element's index is its row-major index in the canonical (unfused, unsharded) tensor, so
coalescing, sharding and the chunk size do not change a single bit.

Tensor suffixes: B batch, S sequence, D model width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import nn

from hlat.config import ModelConfig, OptimizerConfig, RopeConfig
from hlat.model.architectures import architecture_of, build_block
from hlat.model.document_attention import DocumentMask, Spans, row_offsets
from hlat.model.kernels.matmul import Embedding
from hlat.model.kv_cache import KVCache
from hlat.model.layers import DecoderBlock
from hlat.model.loss import Head, Reduction, TiedHead, head_loss
from hlat.model.parameter_layout import WEIGHT_DTYPES, RowBlock, RowLayout, RowRun, parameter_layouts
from hlat.model.parametrization import Scale, scale_of
from hlat.model.rope import Rope, RopeTables
from hlat.model.spec import FULL_MODEL, ModelShard, vocabulary_rows
from hlat.runtime.distributed.join import host_values
from hlat.runtime.random_keys import stream_key
from hlat.runtime.randomness import normal_block

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class DecodingStep(Protocol):
    """A faster way to compute all blocks and the final norm for one new token of each row."""

    def takes(self, x_BSD: torch.Tensor, cache: KVCache) -> bool:
        """Return True if it computes this call; else the blocks do."""
        ...

    def __call__(self, x_B1D: torch.Tensor, tables: RopeTables, cache: KVCache, window: int | None) -> torch.Tensor:
        """Compute (B, 1, D) -> (B, 1, D), in the memory of ``x``; keys and values are appended to the cache."""
        ...


class Decoder(nn.Module):
    """A decoder-only language model, or the shard of one that a process builds.

    Its submodules, in order of execution: embedding, layers ("0", "1", ...), norm, head. Embedding, norm and head are
    None if they are not in this shard.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard = FULL_MODEL) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        rows = len(vocabulary_rows(config, shard))
        self.embedding = Embedding(rows, config.hidden_size) if shard.embedding else None
        self.layers = nn.ModuleDict({str(index): build_block(config, shard) for index in shard.layer_range(config)})
        architecture = architecture_of(config)
        norm_class = architecture.block().norm_class
        self.norm = norm_class(config.hidden_size, config.norm_eps) if shard.head else None
        self.head = self._build_head(rows) if shard.head else None
        self.kinds = {name: config.layer_kind(int(name)) for name in self.layers}
        self.ropes = {kind.rope: Rope(kind.rope, config.n_head_dim) for kind in self.kinds.values() if kind.rope}
        self._scales = _embedding_scales(config.hidden_size) if architecture.scales_embedding else {}
        # (start, stop) pairs of the sequence positions that this process computes; None for all of them
        self.spans: Spans | None = None
        # Tokens of a complete sequence, if this process computes several spans of it; None if that is not known
        self.longest: int | None = None
        # Dtype of the activations, and so of the matrix products; None for that of the weights. Norm statistics,
        # rotations, softmax and loss are always computed in fp32 or wider.
        self.compute: torch.dtype | None = None
        # Computes calls with one token of each row and a cache, if it takes them; None for the blocks
        self.step: DecodingStep | None = None
        self._check_description()

    def _check_description(self) -> None:
        # All other rooms rely on the description, so a module that differs from it must not be built.
        described = {name: layout.shape for name, layout in parameter_layouts(self.config, self.shard).items()}
        built = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        wrong = sorted(name for name in built.keys() | described.keys() if built.get(name) != described.get(name))
        assert not wrong, f"hlat.model.architectures describes these parameters otherwise: {', '.join(wrong)}"

    def _build_head(self, rows: int) -> Head:
        tied = self.embedding if self.config.tie_embeddings else None
        head = Head(rows, self.config.hidden_size) if tied is None else TiedHead(tied)
        head.cross_entropy.softcap = self.config.final_logit_softcapping
        return head

    def blocks(self) -> Iterator[DecoderBlock]:
        for block in self.layers.values():
            assert isinstance(block, DecoderBlock), "layers has decoder blocks only"
            yield block

    def hidden(
        self, x: torch.Tensor, *, positions: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """Compute the hidden states: the input of the head, or of the next stage if this shard has no head.

        Args:
            x: token ids (B, S), int64; if this shard has no embedding, the hidden states (B, S, D) of the stage before.
            positions: position of each token within its document, int64 (B, S), for all positions of ``spans``, also if
                x is a shard of the sequence. Every 0 starts a document, and attention stays within documents. Every row
                starts a document. With a cache they only rotate: its mask says what tokens attend to.
            cache: keys and values of earlier tokens; the new ones are appended. Together with ``positions`` only if it
                has a mask for this call (``KVCache.attend_to``), which also has to include the sliding window.

        Returns:
            (B, S, D), normalised by the final norm if this shard has the head.

        Raises:
            ValueError: the cache has no room for the new tokens.
        """
        masked = cache is not None and cache.has_mask
        assert positions is None or cache is None or masked, "generation continues a single document"
        spans = self._spans(x, cache)
        tables: dict[RopeConfig | None, RopeTables]
        tables = {rope: its.tables(spans, x.device, positions) for rope, its in self.ropes.items()}
        masks = {} if masked else self._document_masks(x, spans, positions)
        x_BSD = self.embedding(x) if self.embedding is not None else x
        if self.compute is not None:
            x_BSD = x_BSD.to(self.compute)
        if self.embedding is not None and self._scales:
            x_BSD = x_BSD * self._scales[x_BSD.dtype]
        if cache is not None and self.step is not None and self.step.takes(x_BSD, cache):
            kind = next(iter(self.kinds.values()))
            x_BSD = self.step(x_BSD, tables[kind.rope], cache, kind.window)
            cache.advance(1)
            return x_BSD
        for name, block in self.layers.items():
            kind = self.kinds[name]
            layer_cache = cache.layer(int(name), kind.window) if cache is not None else None
            x_BSD = block(x_BSD, tables.get(kind.rope), layer_cache, masks.get(kind.window))
        if cache is not None:
            cache.advance(x.shape[1])
        return self.norm(x_BSD) if self.norm is not None else x_BSD

    def depends_on_length(self, length: int) -> bool:
        """True if sequences of this length and shorter ones are rotated by different frequencies."""
        return any(rope.depends_on_length(length) for rope in self.ropes.values())

    @property
    def windows(self) -> set[int | None]:
        """Tokens that a token attends to, itself included, in some layer; None for all before it."""
        return {kind.window for kind in self.kinds.values()}

    def _document_masks(
        self, x: torch.Tensor, spans: Spans, positions: torch.Tensor | None
    ) -> dict[int | None, DocumentMask]:
        """Masks by window of a layer; those without one attend to all earlier positions of complete rows."""
        start, stop = spans[0][0], spans[-1][1]
        longest = stop if len(spans) == 1 else self.longest or math.inf
        # A window that no sequence fills is none.
        limits = {each: each if each is not None and each < longest else None for each in self.windows}
        if positions is None:
            # Causal attention to all positions is built into the kernels. If start > 0, the cache has those before.
            has_cached = start > 0 and len(spans) == 1
            altered = self.config.alters_softmax  # which is not
            kept = {window: limit for window, limit in limits.items() if limit is not None or altered}
            limits = {} if has_cached else kept
            positions = row_offsets(spans, x.device).expand(x.shape[0], -1) if limits else None
        if positions is None:
            return {}
        found = DocumentMask.of_windows(positions, spans, set(limits.values()))
        return {window: found[limit] for window, limit in limits.items()}

    def _spans(self, x: torch.Tensor, cache: KVCache | None) -> Spans:
        if self.spans is not None:
            return self.spans
        start, count = 0, x.shape[1]
        if cache is not None:
            cache.check_room(count)
            start = cache.length
        return ((start, start + count),)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,  # token ids (B, S), int64
        *,
        positions: torch.Tensor | None = None,
        cache: KVCache | None = None,
        reduction: Reduction = head_loss,  # or ``row_losses``, ``next_tokens``: instead of the scalar loss
    ) -> torch.Tensor:
        """Compute logits (B, S, V) in the dtype of the activations, or the loss of labels; see ``hidden``."""
        hidden_BSD = self.hidden(x, positions=positions, cache=cache)
        # A shard without head returns hidden states, labels or not
        out: torch.Tensor = self.head(hidden_BSD, labels, reduction=reduction) if self.head is not None else hidden_BSD
        return out


def _embedding_scales(width: int) -> dict[torch.dtype, float]:
    """Square root of the width by dtype of the activations, rounded as transformers does: in fp32, then in it."""
    with host_values():
        scale = torch.tensor(width**0.5, dtype=torch.float32, device="cpu")
        return {dtype: float(scale.to(dtype)) for dtype in WEIGHT_DTYPES}


@dataclass(frozen=True)
class LocalParameter:
    """The rows of one parameter that this process stores."""

    name: str  # in the complete model, such as "layers.3.attention.qkv.weight"
    parameter: nn.Parameter  # the one that the optimizer updates
    # The canonical tensors and rows that the rows of the parameter (or its tensor-parallel shard) map to
    layout: RowLayout
    first_row: int  # row of the layout that the first local row is; the other local rows follow
    # True if, of all processes that store these rows, this one counts and saves them. Single canonical tensors of the
    # layout may still be owned by another tensor-parallel shard (``CanonicalTensor.owned``).
    owned: bool
    model: ModelConfig  # section of the complete model

    def scale(self, optimizer: OptimizerConfig) -> Scale:
        """The row of the table of initial values and rates; of fused tensors, whose rates are the same, the first."""
        return scale_of(self.layout.tensors[0].spec, self.model, optimizer)

    @property
    def tensor(self) -> torch.Tensor:
        """Local rows; shares memory with the parameter."""
        return local(self.parameter.detach())

    @property
    def gradient(self) -> torch.Tensor | None:
        """Gradient of the local rows; None before the first backward pass."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def row_blocks(self) -> list[RowBlock]:
        return self.layout.row_blocks(self.first_row, self.first_row + self.tensor.shape[0])

    def row_views(self, block: RowBlock, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a block as views of a tensor of the local shape (weights, gradients or moments)."""
        return [tensor.narrow(0, run.start - self.first_row, run.count) for run in block.runs]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    # By attribute: importing the class DTensor takes a second that one process can save.
    return hasattr(tensor, "to_local")


def collect_local_parameters(model: Decoder, owned: bool = True) -> list[LocalParameter]:
    """Collect the local parameters of a model or model shard, in order of execution.

    Args:
        model: its parameters may be sharded by rows over one mesh dimension (FSDP2), and replicated over others.
        owned: True if this process owns the parameters that FSDP2 does not shard or replicate itself.
    """
    layouts = parameter_layouts(model.config, model.shard)
    collected = []
    for name, parameter in model.named_parameters():
        first, is_first = _first_row(parameter)
        collected.append(LocalParameter(name, parameter, layouts[name], first, owned and is_first, model.config))
    return collected


def _first_row(parameter: nn.Parameter) -> tuple[int, bool]:
    """First stored row of a parameter, and True if this process has its first replica."""
    if not _is_sharded(parameter):
        return 0, True
    first, is_first, rows = 0, True, parameter.shape[0]
    for dimension, placement in enumerate(parameter.placements):
        index, count = parameter.device_mesh.get_local_rank(dimension), parameter.device_mesh.size(dimension)
        if placement.is_shard():
            first = min(index * -(-rows // count), rows)  # FSDP2 splits rows like torch.chunk
        else:
            is_first = is_first and index == 0
    return first, is_first


_CHUNK = 1 << 22  # elements drawn at a time: 16 MiB of fp32 in addition to the weights


def initial_rows(
    config: ModelConfig, seed: int, layout: RowLayout, start: int, stop: int, optimizer: OptimizerConfig
) -> torch.Tensor:
    """Compute the initial values of the rows ``start <= row < stop`` of a layout: fp32, on the CPU."""
    width = math.prod(layout.columns)
    out = torch.empty(stop - start, width)
    for run in layout.runs(start, stop):
        scale = scale_of(run.tensor.spec, config, optimizer)
        out[run.start - start : run.start - start + run.count] = _run_values(scale, seed, layout, run, width)
    return out.view(stop - start, *layout.columns)


def _run_values(scale: Scale, seed: int, layout: RowLayout, run: RowRun, width: int) -> torch.Tensor:
    if not run.tensor.spec.is_random:
        return torch.full((run.count, width), scale.initial)
    key = stream_key(seed, "init", run.name)
    values = normal_block(key, run.canonical_start, run.count, layout.row_size or width, layout.first_column, width)
    return values.mul_(scale.initial)


@torch.no_grad()
def initialise(
    parameters: Iterable[LocalParameter], config: ModelConfig, seed: int, optimizer: OptimizerConfig | None = None
) -> None:
    """Fill every parameter in place with its initial values, the same bits for any device and sharding."""
    optimizer = optimizer or OptimizerConfig()
    for parameter in parameters:
        # A chunk at a time on the CPU: all values of a large parameter would take its size in fp32 once more.
        chunk = max(1, _CHUNK // math.prod(parameter.layout.columns))
        rows, layout, first = parameter.tensor, parameter.layout, parameter.first_row
        for start in range(0, rows.shape[0], chunk):
            stop = min(start + chunk, rows.shape[0])
            rows[start:stop].copy_(initial_rows(config, seed, layout, first + start, first + stop, optimizer))


def build(
    config: ModelConfig, *, device: torch.device | str, seed: int | None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Build a decoder on a device; on "meta" no memory is allocated.

    Without a seed weights stay uninitialised, to be loaded later.
    """
    # On the meta device first, so that no weight is allocated twice
    with torch.device("meta"):
        model = Decoder(config)
    replace_parameters(model, lambda parameter: parameter.to(dtype))
    if torch.device(device).type == "meta":
        return model
    allocate(model, torch.device(device))
    if seed is not None:
        initialise(collect_local_parameters(model), config, seed)
    return model


def allocate(model: Decoder, device: torch.device) -> None:
    """Replace every parameter by one of the same shape and dtype with memory on a device, without values."""
    # Not torch.empty_like: of a tensor on the meta device it imports sympy, half a second
    replace_parameters(model, lambda each: torch.empty(each.shape, dtype=each.dtype, device=device))


def replace_parameters(model: Decoder, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter by ``function`` of its detached tensor."""
    # nn.Module.to and to_empty swap the contents of fake tensors (in a rehearsal), which torch forbids for some of
    # them.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(function(parameter.detach())))
