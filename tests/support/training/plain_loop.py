"""Independent reference of a training run: transformers and torch.optim in a plain loop, in float64.

    prepared tokens, weights of a Hugging Face folder -> one process, batches in the published order -> every number

Nothing here uses hlat: files are read with numpy, the order of the samples is computed with Python integers from the
documented formula, and so is the learning rate of a step.
"""

import hashlib
import json
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Training:
    """Settings of a run, for both hlat and the plain loop."""

    steps: int
    sequence_length: int
    global_batch: int
    micro_batch: int
    seed: int
    peak: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decay_vectors: bool
    clip_norm: float
    warmup: int
    floor: float
    ramp: tuple[tuple[int, int], ...] = ()  # tokens and batch of each stage before ``global_batch``

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 1: linear warm-up, then a cosine to its minimum at the last step."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        progress = (step - self.warmup) / (self.steps - self.warmup)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    def batches(self) -> list[range]:
        """Return the samples of each step: a stage goes on until it has had its tokens."""
        batches, position, stages, left = [], 0, list(self.ramp), 0
        size = self.global_batch
        for _ in range(self.steps):
            if left <= 0:
                left, size = stages.pop(0) if stages else (10**18, self.global_batch)
            batches.append(range(position, position + size))
            position, left = position + size, left - size * self.sequence_length
        return batches


@dataclass
class PlainLoopResult:
    """Result of the plain loop: the metrics of each step, and the weights after the last one."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    validation: tuple[float, float] = (math.nan, math.nan)  # nats per token, bits per byte
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    samples_of_an_epoch: int = 0


class PreparedTokens:
    """Tokens of a folder of prepared data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._splits = json.loads((folder / "manifest.json").read_text())["splits"]

    def of(self, split: str) -> np.ndarray:
        """Return all tokens of a split: int64."""
        shards = [np.fromfile(self._folder / shard["file"], dtype="<u2") for shard in self._splits[split]["shards"]]
        return np.concatenate(shards).astype(np.int64)

    def bytes_of(self, tokens: np.ndarray) -> int:
        """Count the UTF-8 bytes of byte-level tokens: one per letter, none for special tokens."""
        content = json.loads((self._folder / "tokenizer" / "tokenizer.json").read_text())
        lengths = {number: len(piece) for piece, number in content["model"]["vocab"].items()}
        lengths |= {added["id"]: 0 for added in content["added_tokens"]}
        return sum(lengths[token] for token in tokens.tolist())


def shuffled(seed: int, epoch: int, place: int, n: int) -> int:
    """Return the sample at a position of an epoch: eight Feistel rounds on 2b bits, repeated until below n."""
    bits = max(3, (max(n - 1, 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = place >> bits, place & mask
        for turn in range(8):
            left, right = right, left ^ (_mix(right ^ _key(seed, epoch, turn)) & mask)
        place = left << bits | right
        if place < n:
            return place


def _key(seed: int, epoch: int, turn: int) -> int:
    text = "\x1f".join([str(seed), "order", str(epoch), str(turn)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
    return word ^ word >> 33


def reference_model(hf_folder: Path) -> nn.Module:
    """Return transformers' model in float64, with torch's norms, because its own compute in fp32."""
    from transformers import LlamaForCausalLM  # noqa: PLC0415  (slow to import, and an extra)

    model = LlamaForCausalLM.from_pretrained(hf_folder, dtype=torch.float32, attn_implementation="sdpa")
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon)
            norm.load_state_dict(module.state_dict())
            model.set_submodule(name, norm)
    return model.double().train()


def train(numbers: Training, hf_folder: Path, prepared: Path) -> PlainLoopResult:
    """Train the complete run in one process."""
    files, model, out = PreparedTokens(prepared), reference_model(hf_folder), PlainLoopResult()
    tokens, length = files.of("train"), numbers.sequence_length
    n = (len(tokens) - 1) // length
    out.samples_of_an_epoch = n
    out.initial = _copy(model)
    optimizer = optimizer_of(numbers, model)
    for step, samples in enumerate(numbers.batches(), start=1):
        starts = [length * shuffled(numbers.seed, sample // n, sample % n, n) for sample in samples]
        rows = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]))
        loss = 0.0
        for part in rows.split(numbers.micro_batch):
            term = nats(model, part) / (len(rows) * length)
            term.backward()
            loss += float(term.detach())
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), numbers.clip_norm))
        for group in optimizer.param_groups:
            group["lr"] = numbers.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        out.lines.append(
            {
                "step": step,
                "tokens": samples.stop * length,
                "samples": samples.stop,
                "batch_crc32": sum(zlib.crc32(row.numpy().tobytes()) for row in rows[:, :-1]) % 2**32,
                "loss": loss,
                "grad_norm": norm,
                "param_norm": math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters())),
                "lr": numbers.rate(step),
            }
        )
    out.weights, out.validation = _copy(model), _validate(model, files, length)
    return out


def optimizer_of(numbers: Training, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW with the decay of matrices and vectors."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    decay_of_vectors = numbers.weight_decay if numbers.decay_vectors else 0.0
    groups = [
        {"params": matrices, "weight_decay": numbers.weight_decay},
        {"params": vectors, "weight_decay": decay_of_vectors},
    ]
    return torch.optim.AdamW(groups, betas=numbers.betas, eps=numbers.eps, foreach=False)


def nats(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies of rows, each token and the next."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@torch.no_grad()
def _validate(model: nn.Module, files: PreparedTokens, length: int) -> tuple[float, float]:
    """Validate on all tokens of the split but the first, in windows; the last one is shorter."""
    tokens, total = files.of("validation"), 0.0
    for start in range(0, len(tokens) - 1, length):
        total += float(nats(model, torch.from_numpy(tokens[start : start + length + 1]).unsqueeze(0)))
    return total / (len(tokens) - 1), total / (math.log(2) * files.bytes_of(tokens[1:]))
