"""The training step of torchtitan on a CPU, from a checkout: its model, its loss, its units of FSDP, in one process.

Written for the checkout of 2026-08-21 (b5bcd76), which needs `pip install spmd_types tyro einops`. What it needs to run
on a CPU is done here, the checkout stays as it is: its language models take only FlexAttention and varlen attention,
neither of which has a backward pass on a CPU, so that its own ScaledDotProductAttention takes their place, on rows of
the packed tokens. Its units of FSDP on a mesh of one process set the dtypes of its mixed precision.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


def torchtitan_step(checkout, mode, compiled, *, vocabulary, layers, width, ffn, heads, kv_heads, length, batch):
    """Build the model and return a step, which takes a number and (batch, length + 1) tokens, and the parameters.

    Args:
        checkout: folder of torchtitan's repository.
        mode: "fp32", "bf16" (fp32 weights, bf16 computation) or "bf16-sr", for which it has weights in bf16.
        compiled: True to compile each block, as its `compile.enable` does.
        vocabulary: number of different tokens.
        layers: number of blocks.
        width: model width.
        ffn: width of the feed-forward layer.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        length: tokens of a row.
        batch: rows of a batch.
    """
    sys.path.insert(0, str(Path(checkout).resolve()))
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.loss import cross_entropy_loss

    torch.manual_seed(0)
    model = _build(vocabulary, layers, width, ffn, heads, kv_heads, length)
    if mode == "bf16-sr":
        model.to(torch.bfloat16)
    model.init_states()
    file = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    if compiled:
        for block in model.layers.values():
            block.compile(fullgraph=True)
    _shard(model, init_device_mesh("cpu", (1,)), torch.float32 if mode == "fp32" else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    positions = torch.arange(length).repeat(batch)

    def step(number, tokens):
        logits = model(tokens[:, :-1].flatten(), positions=positions)
        loss = cross_entropy_loss(logits, tokens[:, 1:].flatten()) / positions.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, sum(each.numel() for each in model.parameters())


def _build(vocabulary, layers, width, ffn, heads, kv_heads, length):
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class RowAttention(ScaledDotProductAttention):
        """Attention of rows of equal length, which follow each other."""

        @dataclass(kw_only=True, slots=True)
        class Config(ScaledDotProductAttention.Config):
            """The settings of torchtitan's."""

        def forward(self, q, k, v, **settings):
            rows = (each.unflatten(0, (-1, length)) for each in (q, k, v))
            return super().forward(*rows, **settings).flatten(0, 1)

    llama3.get_attention_config = lambda _: RowAttention.Config()
    return llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)),
        layers=llama3._build_llama3_layers(
            n_layers=layers,
            dim=width,
            n_heads=heads,
            n_kv_heads=kv_heads,
            hidden_dim=ffn,
            rope=ComplexRoPE.Config(dim=width // heads, max_context_length=length, theta=500000, scaling="llama"),
            attn_backend="rows",
        ),
    ).build()


def _shard(model, mesh, dtype):
    """Apply FSDP to the units that torchtitan has: embedding, each block, norm with head, and the model."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (model.tok_embeddings, *model.layers.values(), [model.norm, model.lm_head], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
