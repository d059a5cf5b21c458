"""A LLaMA-class model and its training step in plain torch, as a user would write them: the peer of other benchmarks.

    tokens -> Stock (RMSNorm, sdpa, silu of torch) -> mean cross-entropy -> backward -> clip_grad_norm_ -> fused AdamW

Data parallelism is torch's: ``DistributedDataParallel``, or FSDP2 (``fully_shard``) of each block and of the rest.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

Shape = Mapping[str, int]
"""vocab_size, hidden_size, layers, heads, kv_heads, intermediate_size: the fields of hlat's model section."""

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A training step of this process's rows: inputs and labels (B, S) -> mean loss of its rows."""


class Block(nn.Module):
    """Pre-norm attention with rotary positions, and SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape["hidden_size"], shape["intermediate_size"]
        self.heads, self.groups = shape["heads"], shape["kv_heads"]
        self.head_dim = width // self.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.groups * self.head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        normal = self.norm_1(x)
        q, k, v = (p(normal).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        normal = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Stock(nn.Module):
    """The decoder; the angles of rotary positions are those of ``length`` positions."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape["layers"]))
        self.norm = nn.RMSNorm(shape["hidden_size"], 1e-5)
        self.head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)
        half = shape["hidden_size"] // shape["heads"] // 2
        angles = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(half) / half))
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of (B, S) tokens."""
        x = self.embedding(inputs)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def make_step(shape: Shape, length: int, kind: str, world: int, bf16: bool) -> Step:
    """Build a model and its optimizer, and return the step.

    Args:
        shape: the model.
        length: tokens of a sequence.
        kind: "one" process; "ddp"; "fsdp", whose parameters stay gathered until backward; "fsdp, reshard", of which
            each block is gathered again in backward.
        world: number of processes.
        bf16: compute in bf16 with fp32 weights: autocast, and with FSDP2 its mixed precision.
    """
    torch.manual_seed(0)
    model: nn.Module = Stock(shape, length)
    if kind.startswith("fsdp"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        settings = {
            "mesh": init_device_mesh("cpu", (world,)),
            "reshard_after_forward": kind == "fsdp, reshard",
            "mp_policy": policy,
        }
        for layer in model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    casts = bf16 and not kind.startswith("fsdp")

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = model(inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
