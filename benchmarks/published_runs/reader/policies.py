"""Words for recomputation, sharding of state, and precision.

"selective" -> RecomputePolicy,  "FSDP FULL_SHARD" -> ZeRO stage,  "bf16 + fp8 (delayed scaling)" -> 16 or 8 bits
"""

import re
from dataclasses import dataclass
from typing import Literal

from hlat.planner.problem.workload import RECOMPUTE_POLICIES, RecomputePolicy
from published_runs.reader.frameworks import Selective
from published_runs.reader.reading import Reading, UnreadableError
from published_runs.reader.texts import has_word, is_unstated, lower

UNKNOWN_RECOMPUTE = 0.1
"""Spread of a step whose recomputation is not stated: none and full differ by a third."""

Kept = Literal["", "projections", "alternate"]
"""Products whose results full recomputation keeps: none, attention's projections, or every second one."""


@dataclass(frozen=True)
class Recomputation:
    """Operations that a backward pass computes again.

    Attributes:
        policy: policy of the cost model.
        layers: share of the layers that it acts on.
        kept: products of these layers whose results are kept.
    """

    policy: RecomputePolicy
    layers: float = 1.0
    kept: Kept = ""


_PROJECTIONS = r"(?:q?kv?o?|qkvo?|qkv_out|attention)[ _]?proj\w*|query[ _]proj\w*|native_attention"
_NONE, _SELECTIVE, _FULL = (Recomputation(policy) for policy in RECOMPUTE_POLICIES)
_SAVED, _ALTERNATE = Recomputation("full", kept="projections"), Recomputation("full", kept="alternate")
_HALF = 0.5
"""Share of the layers where a page says that some are recomputed: the middle of what it may mean."""
_OPERATORS = "every second product and attention are saved, the rest is computed again"

# In this order: the first pattern that occurs decides.
_RECOMPUTE: tuple[tuple[str, Recomputation, float, str], ...] = (
    (r"save_dots?_with_no_batch\w*|dots?_with_no_batch\w*", _SELECTIVE, 0.0,
     "JAX: products with weights are saved, attention's are not"),
    (r"none|no|off|false|disabled|without|0|no-?(?:remat|recompute|ac|checkpointing)|save_everything", _NONE, 0.0, ""),
    (r"minimal(?:_| with )?(?:flash|context)\S*|minimal_with_context\S*", _NONE, 0.0,
     "MaxText saves every product and the context of attention"),
    (r"save_dot_except_mlp\w*", _SAVED, 0.05, "MaxText recomputes the feed-forward products only"),
    (r"minimal\S*|dots?\w*|save_dots\w*", _SELECTIVE, 0.0,
     "MaxText, JAX: products with weights are saved, attention's are not"),
    (r"selective[- _(]*(?:per[- ])?(?:op|operator|operators|ops)|per[- ]?op\w*|op-level", _ALTERNATE, 0.03,
     f"torchtitan's operator policy: {_OPERATORS}"),
    (_PROJECTIONS, _SAVED, 0.05, "keeps the projections of attention, and recomputes the rest"),
    (r"offload (?!dots)\w+.*", _FULL, 0.05, "moves some named tensors to the host, and recomputes the rest"),
    (r"save_nothing", _FULL, 0.0, "JAX: recomputes everything"),
    (r"selective|attention|core[- _]?attn|attn", _SELECTIVE, 0.0, ""),
    (r"save_\w+|custom\S*|decoder_layer_input\w*", _FULL, 0.05,
     "saves or moves to the host some named tensors, and recomputes the rest"),
    (r"full\S*|all|uniform|block|every layer|true|yes|on|1|complete|layer|checkpoint\w*|remat\w*|recompute\w*|enabled",
     _FULL, 0.0, ""),
)  # fmt: skip

# Some of the layers, all of each: a fraction, a percentage, "8 of 32 layers", "every 2nd", torchtitan's number.
_PARTS = (
    (r"(\d+) ?(?:/|of|out of) ?(\d+)(?: of the)?(?: (?:layers?|blocks?))?", lambda a, b: a / b),
    (r"(\d+(?:\.\d+)?) ?%(?: of .*)?", lambda a: a / 100),
    (r"every (\d+)(?:st|nd|rd|th)?(?: layers?| blocks?)?|selective[ _-]?(\d+)", lambda *found: 1 / max(found)),
    (r"every (?:second|other)(?: layer| block)?", lambda: 0.5),
)
_SOME = r"partial\w*|some(?: of the)? (?:layers?|blocks?)|block-?\d+|first \d+ layers|selective.*(?:layer|block)s?"


def read_recompute(text: str | None, selective: Selective = "attention") -> Reading[Recomputation]:
    """Read the words for activation checkpointing.

    Args:
        text: the words.
        selective: meaning of "selective" in the framework.

    Raises:
        UnreadableError: the words are not understood.
    """
    if is_unstated(text):
        reason = "no activation checkpointing"
        return Reading("activation_ckpt", text or "", _NONE, "assumed", reason, UNKNOWN_RECOMPUTE)
    folded = lower(text)
    layers, reason, spread = _layers(folded, selective)
    if layers is not None:
        found = Recomputation("full", layers)
        return Reading("activation_ckpt", text or "", found, "implied", reason, spread)
    if selective == "operators" and re.fullmatch(r"selective|selective \(?ac\)?", folded):
        reason = f"the framework's default: {_OPERATORS}"
        return Reading("activation_ckpt", text or "", _ALTERNATE, "implied", reason, 0.03)
    for pattern, policy, spread, reason in _RECOMPUTE:
        if has_word(pattern, folded):
            return Reading("activation_ckpt", text or "", policy, "implied" if reason else "stated", reason, spread)
    raise UnreadableError(f"activation checkpointing not understood: {text}")


def _layers(text: str, selective: Selective) -> tuple[float | None, str, float]:
    """Share of the layers that are recomputed, where only some are; reason and spread."""
    for pattern, share in _PARTS:
        match = re.search(rf"(?<![a-z0-9.])(?:{pattern})(?![a-z0-9])", text)
        if match is not None:
            part = float(share(*(float(number) for number in match.groups() if number)))
            if 0 < part <= 1:
                return part, f"all of {part:.0%} of the layers", 0.02
    of_modules = selective == "granularity" and text.startswith("selective")
    if of_modules or not has_word(_SOME, text):
        return None, "", 0.0
    if selective == "operators":  # torchtitan's option "2", its default for layers
        return _HALF, "every second layer", 0.05
    return _HALF, "some of the layers: read as half of them", 0.1


_ZERO = (
    (r"zero[- _]?(?:stage[- _]?)?3|stage[- _]?3|fully[- ]sharded|full_shard|fsdp2?|hsdp|hybrid\w*|3", 3),
    (r"zero[- _]?(?:stage[- _]?)?2|stage[- _]?2|shard_grad_op|2", 2),
    (r"zero[- _]?(?:stage[- _]?)?1|stage[- _]?1|distributed[- ]optimizer|dist[- ]?opt|os|1", 1),
    (r"zero[- _]?(?:stage[- _]?)?0|stage[- _]?0|no_shard|ddp|none|no|0", 0),
)


def read_zero(text: str | None, framework: str, sharded_by_default: bool) -> Reading[int]:
    """Read the ZeRO stage; if not stated, the framework's words for it, then its default.

    Raises:
        UnreadableError: the words are not understood.
    """
    if not is_unstated(text):
        number = lower(text).removesuffix(".0")
        for pattern, stage in _ZERO:
            if has_word(pattern, number):
                hybrid = has_word(r"hsdp|hybrid\w*", number)
                reason = "hybrid: shards in groups whose size is not stated, read as all ranks" if hybrid else ""
                return Reading(
                    "zero_stage", text or "", stage, "implied" if hybrid else "stated", reason, 0.05 * hybrid
                )
        raise UnreadableError(f"sharding not understood: {text}")
    named = lower(framework)
    for pattern, stage in _ZERO:
        words = "|".join(part for part in pattern.split("|") if not part.isdigit() and part not in ("no", "none", "os"))
        if has_word(words, named):
            return Reading("zero_stage", text or "", stage, "implied", f"named by the framework: {framework}")
    if sharded_by_default:
        return Reading("zero_stage", text or "", 3, "implied", f"the default of {framework}", 0.02)
    return Reading("zero_stage", text or "", 0, "assumed", "no ZeRO", 0.05)


def read_eight_bit(text: str | None) -> Reading[bool]:
    """Read a precision: True if products run in 8 bits, False in 16.

    Raises:
        UnreadableError: not modelled (4 bits, integers, 32 bits), or not understood.
    """
    if is_unstated(text):
        return Reading("precision", text or "", False, "assumed", "16-bit products", 0.05)
    folded = lower(text)
    refused = r"nvfp4|mxfp4|fp4|int8|int4|fp6|mxfp6|fp64"
    if has_word(refused, folded):
        raise UnreadableError(f"precision not modelled: {text}")
    if has_word(r"(?:\w+[_-])?(?:mx)?(?:fp|float|f)8\w*|e4m3\w*|e5m2\w*|hybrid", folded):
        return Reading("precision", text or "", True)
    sixteen = r"(?:\w+[_-])?(?:bf16|fp16|bfloat16|float16|f16|half)\w*|mixed|amp|pure|16-?mixed|o[12]|16"
    if has_word(sixteen, folded):
        return Reading("precision", text or "", False)
    if has_word(r"fp32|float32|tf32|f32|single", folded):
        raise UnreadableError(f"precision not modelled: {text}")
    raise UnreadableError(f"precision not understood: {text}")
