"""Layouts that are compared with one process, each with the smallest model that it needs."""

from dataclasses import dataclass, field
from typing import Any

GQA = {"layers": 4, "heads": 8, "kv_heads": 4}
TWO_KV_HEADS = {"layers": 4, "heads": 8, "kv_heads": 2}
EIGHT_LAYERS = {"layers": 8, "heads": 4, "kv_heads": 2}
FIVE_LAYERS = {"layers": 5, "heads": 4, "kv_heads": 2}
TIED = {"layers": 4, "heads": 4, "kv_heads": 2, "tie_embeddings": True}
# every kind of parameter whose gradient is summed over ranks, and a vocabulary that no degree divides
ODD = {"layers": 4, "heads": 4, "kv_heads": 2, "qk_norm": True, "qkv_bias": True, "vocab_size": 307}
# norms after attention and feed-forward, and norms over all heads, whose statistics are summed over ranks
NORMS_AFTER = {"layers": 4, "heads": 8, "kv_heads": 2, "architecture": "olmo2", "vocab_size": 307}
# frequencies that depend on the length of rows, of which ranks of context parallelism have parts that end elsewhere
DYNAMIC = {**GQA, "rope": {"scaling": {"kind": "dynamic", "factor": 4.0, "original_max_position": 8}}}
WINDOW = {"layers": 4, "heads": 8, "kv_heads": 4, "architecture": "mistral", "sliding_window": 5}
# windows and rotations that differ between layers, in a pattern that the stages of a pipeline do not share
MIXED = {
    **NORMS_AFTER,
    "architecture": "olmo3",
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "local_rope": {"theta": 100.0},
}
NORMS_BEFORE_AND_AFTER = {**MIXED, "architecture": "gemma3_text", "query_pre_attn_scalar": 5, "tie_embeddings": True}
CAPPED = {
    **{name: value for name, value in NORMS_BEFORE_AND_AFTER.items() if name != "local_rope"},
    "architecture": "gemma2",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
# sinks are sharded by heads; biases are added to sums over ranks
SINKS = {
    **{name: value for name, value in MIXED.items() if name != "local_rope"},
    "architecture": "gpt_oss",
    "rope": {"scaling": {"kind": "yarn", "factor": 4.0, "original_max_position": 8, "truncate": False}},
}
PARTLY_ROTATED = {**TWO_KV_HEADS, "architecture": "phi3", "rope": {"partial_rotary_factor": 0.5}}
NO_ROPE = {"layers": 4, "heads": 4, "kv_heads": 2, "architecture": "smollm3", "rope_layers": [True, False, False]}

# Norms after attention and feed-forward give larger first gradients. At 3e-3 twenty steps multiply differences by a
# hundred, in float64 too; at this rate they do not, as the bound of comparing.py assumes.
CALM = 3e-4

SEQUENCE_LENGTH = 32
GLOBAL_BATCH = 8
STEPS = 20


@dataclass(frozen=True)
class Case:
    """A layout: number of processes, parallel section, model, sequences per micro-batch, learning rate."""

    name: str
    world: int
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: dict(GQA))
    micro_batch: int = 2
    lr: float = 3e-3

    def __str__(self) -> str:
        return self.name


def _pipelines() -> list[Case]:
    cases = []
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"):
        deep = schedule not in ("gpipe", "1f1b")
        for degree in (2, 4):
            model = dict(EIGHT_LAYERS) if deep and degree == 4 else dict(GQA)
            parallel = {"pipeline": degree, "schedule": schedule}
            # zbv has twice as many micro-batches in flight as ranks
            micro_batch = 1 if schedule == "zbv" else 2
            cases.append(Case(f"PP{degree} {schedule}", degree, parallel, model, micro_batch))
    return cases


CASES: tuple[Case, ...] = (
    Case("TP2 + SP", 2, {"tensor": 2}, micro_batch=8),
    Case("TP2", 2, {"tensor": 2, "sequence": False}, micro_batch=8),
    Case("TP4 + SP", 4, {"tensor": 4}, micro_batch=8),
    Case("TP4", 4, {"tensor": 4, "sequence": False}, micro_batch=8),
    Case("TP4 + SP, 2 kv heads", 4, {"tensor": 4}, dict(TWO_KV_HEADS), micro_batch=8),
    Case("TP4, 2 kv heads", 4, {"tensor": 4, "sequence": False}, dict(TWO_KV_HEADS), micro_batch=8),
    Case("TP2, q and k norms, odd vocabulary", 2, {"tensor": 2, "sequence": False}, dict(ODD), micro_batch=8),
    Case("TP4 + SP, q and k norms, odd vocabulary", 4, {"tensor": 4}, dict(ODD), micro_batch=8),
    Case("TP4 + SP, 2 kv heads, norms after", 4, {"tensor": 4}, dict(NORMS_AFTER), micro_batch=8, lr=CALM),
    Case(
        "TP4, 2 kv heads, norms after", 4, {"tensor": 4, "sequence": False}, dict(NORMS_AFTER), micro_batch=8, lr=CALM
    ),
    Case("TP2 x PP2 zbv, norms after", 4, {"tensor": 2, "pipeline": 2, "schedule": "zbv"}, dict(NORMS_AFTER), lr=CALM),
    Case("CP2 x DP2, ZeRO 3, norms after", 4, {"context": 2, "zero": 3}, dict(NORMS_AFTER), lr=CALM),
    Case("PP2, norms after, tied", 2, {"pipeline": 2}, {**NORMS_AFTER, "tie_embeddings": True}, lr=CALM),
    Case("CP2, sliding window", 2, {"context": 2}, dict(WINDOW), micro_batch=8),
    Case("TP2 x CP2, sliding window", 4, {"tensor": 2, "context": 2}, dict(WINDOW), micro_batch=8),
    Case("TP2 + SP x PP2, sliding window", 4, {"tensor": 2, "pipeline": 2}, dict(WINDOW), micro_batch=4),
    Case("TP2 x PP2, layers differ", 4, {"tensor": 2, "pipeline": 2}, dict(MIXED), micro_batch=4, lr=CALM),
    Case("CP2 x DP2, ZeRO 3, layers differ", 4, {"context": 2, "zero": 3}, dict(MIXED), lr=CALM),
    Case(
        "TP4 + SP, 2 kv heads, norms before and after",
        *(4, {"tensor": 4}, dict(NORMS_BEFORE_AND_AFTER)),
        micro_batch=8,
        lr=CALM,
    ),
    Case(
        "TP2 x PP2, norms before and after",
        *(4, {"tensor": 2, "sequence": False, "pipeline": 2}, dict(NORMS_BEFORE_AND_AFTER)),
        micro_batch=4,
        lr=CALM,
    ),
    Case(
        "CP2 x DP2, ZeRO 3, norms before and after", 4, {"context": 2, "zero": 3}, dict(NORMS_BEFORE_AND_AFTER), lr=CALM
    ),
    Case("TP2 x PP2, capped", 4, {"tensor": 2, "pipeline": 2}, dict(CAPPED), micro_batch=4, lr=CALM),
    Case("CP2 x DP2, ZeRO 3, capped", 4, {"context": 2, "zero": 3}, dict(CAPPED), lr=CALM),
    Case("TP4 + SP, 2 kv heads, sinks", 4, {"tensor": 4}, dict(SINKS), micro_batch=8, lr=CALM),
    Case("TP2, sinks", 2, {"tensor": 2, "sequence": False}, dict(SINKS), micro_batch=8, lr=CALM),
    Case("PP2, sinks", 2, {"pipeline": 2}, dict(SINKS), lr=CALM),
    Case("CP2, sinks", 2, {"context": 2}, dict(SINKS), micro_batch=8, lr=CALM),
    Case("DP4, ZeRO 3, sinks, an empty shard", 4, {"zero": 3}, {**SINKS, "heads": 2}, micro_batch=1, lr=CALM),
    Case("TP2 x PP2, partly rotated", 4, {"tensor": 2, "pipeline": 2}, dict(PARTLY_ROTATED), micro_batch=4),
    Case("CP2 x DP2, ZeRO 3, partly rotated", 4, {"context": 2, "zero": 3}, dict(PARTLY_ROTATED)),
    Case("TP2 x PP2, layers without RoPE", 4, {"tensor": 2, "pipeline": 2}, dict(NO_ROPE), micro_batch=4),
    Case("CP2 x DP2, ZeRO 3, layers without RoPE", 4, {"context": 2, "zero": 3}, dict(NO_ROPE)),
    *_pipelines(),
    Case("PP2, 5 layers", 2, {"pipeline": 2}, dict(FIVE_LAYERS)),
    Case("PP2, 1 + 4 layers", 2, {"pipeline": 2, "split": [1, 4]}, dict(FIVE_LAYERS)),
    Case("PP2, tied", 2, {"pipeline": 2}, dict(TIED)),
    Case("PP2 zbv, tied: both ends on one rank", 2, {"pipeline": 2, "schedule": "zbv"}, dict(TIED)),
    *(
        Case(f"DP{dp}, ZeRO {zero}", dp, {"zero": zero})
        for dp in (2, 4)
        for zero in (0, 1, 2, 3)
        if (dp, zero) != (4, 0)
    ),
    Case("hybrid 2 x 2, ZeRO 1", 4, {"zero": 1, "replicas": 2}, micro_batch=1),
    Case("hybrid 2 x 2, ZeRO 3", 4, {"zero": 3, "replicas": 2}, micro_batch=1),
    Case("DP4, ZeRO 3, an empty shard", 4, {"zero": 3}, {**ODD, "head_dim": 6}, micro_batch=1),
    Case("TP2 x PP2 zbv", 4, {"tensor": 2, "pipeline": 2, "schedule": "zbv"}),
    Case("CP2 x DP2, ZeRO 3", 4, {"context": 2, "zero": 3}),
    Case("CP2", 2, {"context": 2}, micro_batch=8),
    Case("CP4", 4, {"context": 4}, dict(DYNAMIC), micro_batch=8),
    Case("CP2, ZeRO 0", 2, {"context": 2, "zero": 0}, micro_batch=8),
    Case("TP2 x PP2", 4, {"tensor": 2, "pipeline": 2}, micro_batch=4),
    Case("TP2 x PP2, tied", 4, {"tensor": 2, "pipeline": 2}, dict(TIED), micro_batch=4),
    Case("TP2 x DP2, ZeRO 1", 4, {"tensor": 2, "zero": 1}, micro_batch=4),
    Case("TP2 x DP2, ZeRO 3", 4, {"tensor": 2, "zero": 3}, micro_batch=4),
    Case("TP4, 2 kv heads x DP2, ZeRO 1", 8, {"tensor": 4, "zero": 1}, dict(TWO_KV_HEADS), micro_batch=4),
    Case("PP2 x DP2, ZeRO 0", 4, {"pipeline": 2, "zero": 0}),
    Case("PP2 x DP2, ZeRO 1", 4, {"pipeline": 2, "zero": 1}),
    Case("PP2 x DP2, ZeRO 3", 4, {"pipeline": 2, "zero": 3}),
    Case("PP2 zbv x DP2, ZeRO 1", 4, {"pipeline": 2, "schedule": "zbv", "zero": 1}, micro_batch=1),
    Case("TP2 x CP2", 4, {"tensor": 2, "context": 2}, micro_batch=8),
    Case("TP2 x PP2 x DP2, ZeRO 1", 8, {"tensor": 2, "pipeline": 2, "zero": 1}),
    Case("PP2 x CP2 x DP2, ZeRO 1", 8, {"pipeline": 2, "context": 2, "zero": 1}),
)

# The default suite: each kind of parallelism, of shared parameter and of uneven part, in at least one layout.
_USUAL = (
    "TP4 + SP, 2 kv heads",
    "TP4, 2 kv heads",
    "TP4 + SP, q and k norms, odd vocabulary",
    "TP4 + SP, 2 kv heads, norms after",
    "TP2 x PP2 zbv, norms after",
    "TP2 x CP2, sliding window",
    "TP2 x PP2, layers differ",
    "CP2 x DP2, ZeRO 3, layers differ",
    "TP4 + SP, 2 kv heads, norms before and after",
    "PP2 gpipe",
    "PP4 1f1b",
    "PP4 interleaved-1f1b",
    "PP2 interleaved-zero-bubble",
    "PP2 zbv",
    "PP2, 1 + 4 layers",
    "PP2 zbv, tied: both ends on one rank",
    "DP2, ZeRO 0",
    "DP4, ZeRO 1",
    "DP4, ZeRO 2",
    "DP2, ZeRO 3",
    "hybrid 2 x 2, ZeRO 3",
    "DP4, ZeRO 3, an empty shard",
    "CP4",
    "CP2 x DP2, ZeRO 3, norms after",
    "TP2 x PP2, tied",
    "TP2 x DP2, ZeRO 3",
    "PP2 zbv x DP2, ZeRO 1",
    "TP2 x PP2 x DP2, ZeRO 1",
)
USUAL: tuple[Case, ...] = tuple(case for case in CASES if case.name in _USUAL)

# One layout of each kind, for tests that repeat the comparison in several ways.
_SOME = ("TP4 + SP, 2 kv heads", "PP2 zbv", "DP2, ZeRO 3", "CP2", "TP2 x PP2 x DP2, ZeRO 1")
SOME: tuple[Case, ...] = tuple(case for case in CASES if case.name in _SOME)


def recipe_content(case: Case, **changes: Any) -> dict[str, Any]:
    """Recipe of a case as a mapping; ``changes`` replace fields of sections, such as model={"coalesce": False}."""
    content: dict[str, Any] = {
        "model": {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 96, "head_dim": 8, **case.model},
        "data": {"path": "none", "sequence_length": SEQUENCE_LENGTH, "tokenizer": {"train": "char"}},
        "batch": {"global_batch": GLOBAL_BATCH, "micro_batch": case.micro_batch},
        "optimizer": {"lr": case.lr},
        "schedule": {"warmup_steps": 5},
        "training": {"steps": 100, "seed": 3},
        "precision": {"mode": "fp32"},
        "parallel": case.parallel,
    }
    for section, fields in changes.items():
        content[section] = {**content.get(section, {}), **fields}
    return content
